"""What the parts of a model cost, as the planner needs it: frozen data with JSON both ways. Imports no torch.

A part is one kind of decoder block, or an end of the model (all before the first block, all after the last).
Amounts are those of the whole part on one device; how ranks share them the fields say (``split``: cut evenly by the
tensor ranks; ``whole``: the same on each, cut along the sequence under sequence parallel). The planner multiplies by
tokens, degrees and bytes. An amount a token never depends on the batch; what grows with the length of a row has a
field of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from shardwise.errors import PlanError

RecomputeLevel = Literal["none", "selective", "full"]
RECOMPUTE_LEVELS: tuple[RecomputeLevel, ...] = ("none", "selective", "full")
CollectiveOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True)
class Product:
    """A matrix product [tokens, inner] x [inner, outer], forward; its backward pass follows from the shape.

    Args:
        split: the side that tensor ranks cut; ``none``: each rank computes all of it.
        uses: times a token passes one of the ``copies`` (k for experts that k of are chosen).
        copies: matrices of this shape side by side, each with its own tokens (experts); they are what expert
            ranks share out.
        trainable: False leaves out the gradient of the weight (a frozen layer under LoRA).
        input_gradient: False leaves out the gradient of the input (nothing trains before it).
    """

    name: str
    inner: int
    outer: int
    split: Literal["inner", "outer", "none"] = "none"
    uses: float = 1.0
    copies: int = 1
    trainable: bool = True
    input_gradient: bool = True


@dataclass(frozen=True)
class Attention:
    """Scores and weighted sums of one block.

    Args:
        qk_dim: width of a head's query and key; ``v_dim`` of its value.
        window: positions that a token sees at most; 0: all before it.
        kernel: ``fused`` keeps no score matrix, ``eager`` writes it to memory, ``linear`` costs the same for each
            token whatever the length.
        causal: half of the scores are needed (a fused kernel leaves the other half out, an eager one does not).
        split: each tensor rank has its part of the heads; else every one computes all of them.
    """

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    kernel: Literal["fused", "eager", "linear"] = "fused"
    causal: bool = True
    split: bool = True


@dataclass(frozen=True)
class Amount:
    """What each token of a micro-batch takes: memory to keep, or memory traffic.

    Elements are in the compute precision (2 or 4 bytes each), ``*_bytes`` do not depend on it (masks, fp32 copies,
    indices); ``*_growing`` are elements for each token and each position of its row (score matrices). ``expert`` and
    ``routed`` are elements on the rank where a token's experts lie: of the experts' inner width, which tensor ranks
    cut, and of copies of the hidden state, which they do not.
    """

    split: float = 0.0
    whole: float = 0.0
    split_bytes: float = 0.0
    whole_bytes: float = 0.0
    split_growing: float = 0.0
    split_growing_bytes: float = 0.0
    expert: float = 0.0
    expert_bytes: float = 0.0
    routed: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class Parameters:
    """Numbers of weights: that tensor ranks cut, that each holds whole, and of all routed experts together.

    ``expert`` weights are shared out over the expert ranks, and cut by the tensor ranks where these have no expert
    axis of their own.
    """

    split: int = 0
    whole: int = 0
    expert: int = 0

    @property
    def total(self) -> int:
        return self.split + self.whole + self.expert

    def __add__(self, other: Parameters) -> Parameters:
        return Parameters(self.split + other.split, self.whole + other.whole, self.expert + other.expert)


@dataclass(frozen=True)
class Collective:
    """Traffic of one kind over the tensor ranks.

    Args:
        elements: for each token, of the whole tensor (the input of a reduce, the output of a gather).
        forward: times in a forward pass, ``backward`` times in a backward pass (without any recomputation).
    """

    op: CollectiveOp
    elements: float
    forward: float
    backward: float


@dataclass(frozen=True)
class TensorSplit:
    """How one tensor degree cuts a part; ``rule`` is empty where that is legal, else says why not.

    Args:
        collectives: without sequence parallel.
        sequence: with sequence parallel; None where the part cannot run so.
        whole: parameters that each rank holds whole at this degree, where that differs from ``Parameters.whole``
            (key and value heads fewer than ranks); the rest of the part is cut evenly.
    """

    degree: int
    rule: str = ""
    collectives: tuple[Collective, ...] = ()
    sequence: tuple[Collective, ...] | None = None
    whole: int | None = None


@dataclass(frozen=True)
class PartCosts:
    """One kind of block, or one end of a model.

    Args:
        parameters: all weights; ``trainable`` those of them that have gradients.
        forward_traffic: bytes that operators outside of products and attention read and write, forward;
            ``backward_traffic`` the same backward.
        saved: bytes that stay alive from forward to backward, by recompute level.
        operators: kernels of a forward pass that are started one after the other.
        degrees: every tensor degree from 1 that was looked at, legal or not.
        passes: times that a forward pass runs through this part (a block that is used twice).
        dispatched: elements for each token that are sent to its routed experts, and come back (k times the width).
    """

    name: str
    parameters: Parameters
    trainable: Parameters
    products: tuple[Product, ...] = ()
    attention: Attention | None = None
    forward_traffic: Amount = Amount()
    backward_traffic: Amount = Amount()
    saved: Mapping[RecomputeLevel, Amount] = field(default_factory=dict)
    operators: int = 0
    degrees: tuple[TensorSplit, ...] = (TensorSplit(1),)
    passes: float = 1.0
    dispatched: float = 0.0

    def degree(self, tp: int) -> TensorSplit:
        """The split at a degree.

        Raises:
            KeyError: it was not looked at.
        """
        for split in self.degrees:
            if split.degree == tp:
                return split
        raise KeyError(tp)


@dataclass(frozen=True)
class BlockTables:
    """The blocks under sharding tables that leave more whole than the first ones and move less.

    Args:
        whole: ``strategy.tp_whole`` that leads to them: the share of the blocks' weights that may stay whole.
        kinds: in the order of :attr:`ModelCosts.kinds`. A degree whose table within ``whole`` is the first one, or
            none that was proven, carries a rule; without sequence parallel alone.
    """

    whole: float
    kinds: tuple[PartCosts, ...]


@dataclass(frozen=True)
class ModelCosts:
    """A whole model: ``kinds`` of blocks, and for each block in order the index of its kind.

    ``embedding`` is all before the first block, ``head`` all after the last with the loss (its ``saved`` holds the
    logits). ``tied``: the head's matrix is the embedding's, counted in ``embedding.parameters`` alone; a stage that
    holds only the head then has a copy of ``tied_parameters`` weights.
    ``more``: further parts that run on the last stage, such as blocks that predict a second token.
    ``tables``: what the blocks cost under other tables than the first ones, which ``kinds`` are of.
    ``blocks``: the name of the module that lists them, such as ``model.layers``; empty where it is not known.
    """

    name: str
    hidden_size: int
    vocab_size: int
    kinds: tuple[PartCosts, ...]
    order: tuple[int, ...]
    embedding: PartCosts
    head: PartCosts
    tied: bool = False
    tied_parameters: int = 0
    num_experts: int = 0
    more: tuple[PartCosts, ...] = ()
    tables: tuple[BlockTables, ...] = ()
    blocks: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.order)

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied matrix counted once."""
        times = Counter(self.order)
        blocks = sum(kind.parameters.total * times[index] for index, kind in enumerate(self.kinds))
        ends = (self.embedding, self.head, *self.more)
        return blocks + sum(part.parameters.total for part in ends)

    def legal_degrees(self) -> list[int]:
        """Tensor degrees that every part can be cut by."""
        parts = (*self.kinds, self.embedding, self.head, *self.more)
        sets = [{split.degree for split in part.degrees if not split.rule} for part in parts]
        return sorted(set.intersection(*sets))

    def map_parts(self, change: Callable[[PartCosts], PartCosts]) -> ModelCosts:
        """The same model with every part changed, those under other tables too."""
        return replace(
            self,
            kinds=tuple(map(change, self.kinds)),
            more=tuple(map(change, self.more)),
            embedding=change(self.embedding),
            head=change(self.head),
            tables=tuple(replace(one, kinds=tuple(map(change, one.kinds))) for one in self.tables),
        )

    def under(self, whole: float | None) -> ModelCosts:
        """The model under one of its ``tables`` alone, by their ``whole``; None: under the first ones.

        Raises:
            KeyError: it has no such tables.
        """
        if whole is None:
            return replace(self, tables=())
        for one in self.tables:
            if one.whole == whole:
                return replace(self, kinds=one.kinds, tables=())
        raise KeyError(whole)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelCosts:
        """The inverse of :meth:`to_json`.

        Raises:
            PlanError: a field that is missing or unknown.
        """
        try:
            parts = {name: _part(data[name]) for name in ("embedding", "head")}
            lists = {name: tuple(_part(part) for part in data[name]) for name in ("kinds", "more")}
            tables = tuple(
                BlockTables(one["whole"], tuple(_part(part) for part in one["kinds"])) for one in data.get("tables", ())
            )
            return cls(**{**data, **parts, **lists, "order": tuple(data["order"]), "tables": tables})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError("the costs of a model", f"are damaged ({error})", "Describe the model again") from None


def _part(data: Mapping[str, Any]) -> PartCosts:
    made = {
        "parameters": Parameters(**data["parameters"]),
        "trainable": Parameters(**data["trainable"]),
        "products": tuple(Product(**product) for product in data["products"]),
        "attention": None if data["attention"] is None else Attention(**data["attention"]),
        "forward_traffic": Amount(**data["forward_traffic"]),
        "backward_traffic": Amount(**data["backward_traffic"]),
        "saved": {level: Amount(**amount) for level, amount in data["saved"].items()},
        "degrees": tuple(_tensor_split(split) for split in data["degrees"]),
    }
    return PartCosts(**{**data, **made})


def _tensor_split(data: Mapping[str, Any]) -> TensorSplit:
    made: dict[str, Any] = {"collectives": tuple(Collective(**one) for one in data["collectives"])}
    if data["sequence"] is not None:
        made["sequence"] = tuple(Collective(**one) for one in data["sequence"])
    return TensorSplit(**{**data, **made})
