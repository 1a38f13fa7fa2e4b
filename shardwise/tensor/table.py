"""The sharding table: how each module and parameter is split over the tensor axis, and what that costs.

Found by :mod:`shardwise.tensor.search`, proven by :mod:`shardwise.tensor.proof`, stored in ``plan.json``, executed
by :mod:`shardwise.tensor.execute`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from shardwise.errors import PlanError
from shardwise.tensor.parts import Part, Parts


class Style(StrEnum):
    """How a module is split, and which collective that costs."""

    COLUMN = "column"  # output features split; all-reduce of the input's gradient, once for a group
    ROW = "row"  # input features split; all-reduce of the output, bias added once
    VOCAB_EMBEDDING = "vocab_embedding"  # rows split; all-reduce of the output
    VOCAB_HEAD = "vocab_head"  # output features split, logits stay split; all-reduce of the input's gradient
    COLUMN_GATHER = "column_gather"  # as column; all-gather of the output
    ROW_SPLIT = "row_split"  # as row; each rank takes its part of a whole input, whose gradient it has a share of
    SUM_OUTPUT = "sum_output"  # whole weight; the readers of the output are split: all-reduce of its gradient
    SLICE = "slice"  # whole weight that sees only this rank's part; of the output each rank keeps its positions
    PARTIAL = "partial"  # whole weight that sees only this rank's part: gradient summed once a step
    EXPERTS = "experts"  # each expert's inner features split; all-reduce of the output and of the inputs' gradients


# Styles whose parameters are cut; a row module's bias is whole.
_CUT_BY = (
    *(Style.COLUMN, Style.ROW, Style.COLUMN_GATHER, Style.ROW_SPLIT),
    *(Style.VOCAB_EMBEDDING, Style.VOCAB_HEAD),
)


@dataclass(frozen=True)
class ModuleSplit:
    """The style of one module.

    Args:
        parts: what lies side by side in the dim that is cut, each cut over all ranks; empty: one part.
        group: modules of one group read the same input, and the gradient of that is summed once for all; empty: the
            input's gradient stays a share of this rank.
        shares: of a gathered output's gradient each rank has a share, which are summed.
        sequence: the result enters a residual stream that is cut along the sequence: its sum over the ranks is a
            reduce-scatter, and the tokens of an expert stack are gathered before it.
    """

    style: Style
    parts: Parts = ()
    group: str = ""
    shares: bool = False
    sequence: bool = False


@dataclass(frozen=True)
class ParamCut:
    """How the tensor axis cuts a parameter that is not a matrix of a split module.

    Args:
        dim: the dim that is cut, by ``parts``; None: whole, and each rank's gradient is its share.
        once: whole, and only the first rank computes with it (a bias of what is summed over the ranks). Of a matrix
            that is cut: what the result is without it counts on the first rank alone (experts without matrices).
    """

    dim: int | None = None
    parts: Parts = ()
    once: bool = False


@dataclass(frozen=True)
class LocalValue:
    """A number that a module's forward reads, and what a rank reads in its place: ``times`` / ``over`` of it."""

    attribute: str  # config.NAME: of the configuration that the module keeps
    times: int
    over: int


@dataclass(frozen=True)
class SequenceSplit:
    """The residual stream of all blocks, cut along the sequence.

    Args:
        blocks: name of the list of blocks; the sequence is cut before the first of a stage and joined after the last.
        gathered: module -> which of its arguments it needs for all positions, by place or name.
    """

    blocks: str
    gathered: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TableCost:
    """What a table leaves whole on every rank, and what a rank sends for it, forward and backward.

    Args:
        whole: parameters in the blocks that no rank cuts.
        total: all parameters in the blocks.
        forward: elements for each token of a pass, at ring cost.
        backward: the same of the backward pass.
    """

    whole: int
    total: int
    forward: float
    backward: float

    @property
    def moved(self) -> float:
        """Elements for each token, forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ShardingTable:
    """Everything that is not simply replicated, by full name.

    Args:
        modules: module -> its split.
        params: parameter outside of these -> its cut.
        values: module -> what it reads in place of whole-model numbers.
        refused: what stays whole on every rank, and why.
        sequence: how the residual stream is cut, None where every rank holds all of it.
        alternatives: costs of the first table and of some that leave more whole and move less; empty: there are none.
    """

    degree: int
    modules: Mapping[str, ModuleSplit] = field(default_factory=dict)
    params: Mapping[str, ParamCut] = field(default_factory=dict)
    values: Mapping[str, tuple[LocalValue, ...]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    cost: TableCost | None = None
    sequence: SequenceSplit | None = None
    alternatives: tuple[TableCost, ...] = ()

    def style(self, name: str) -> Style | None:
        """The style of a module, None where it is replicated."""
        split = self.modules.get(name)
        return None if split is None else split.style

    def is_cut(self, parameter: str) -> bool:
        """Whether a rank holds a part of a parameter, by its full name."""
        listed = self.params.get(parameter)
        if listed is not None:
            return listed.dim is not None
        module, _, short = parameter.rpartition(".")
        style = self.style(module)
        return style in _CUT_BY and (short != "bias" or style not in (Style.ROW, Style.ROW_SPLIT))

    def to_json(self) -> dict[str, Any]:
        return {
            "degree": self.degree,
            "modules": {name: _without_defaults(split) for name, split in self.modules.items()},
            "params": {name: _without_defaults(cut) for name, cut in self.params.items()},
            "values": {name: [asdict(value) for value in values] for name, values in self.values.items()},
            "refused": dict(self.refused),
            "cost": None if self.cost is None else asdict(self.cost),
            "sequence": None if self.sequence is None else _sequence_json(self.sequence),
            "alternatives": [asdict(cost) for cost in self.alternatives],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ShardingTable:
        """The inverse of :meth:`to_json`.

        Raises:
            PlanError: a field or a style that is not known.
        """
        try:
            return cls(
                degree=data["degree"],
                modules={name: _split(split) for name, split in data["modules"].items()},
                params={name: ParamCut(**(cut | {"parts": _parts(cut)})) for name, cut in data["params"].items()},
                values={
                    name: tuple(LocalValue(**value) for value in values) for name, values in data["values"].items()
                },
                refused=dict(data["refused"]),
                cost=None if data["cost"] is None else TableCost(**data["cost"]),
                sequence=None if data.get("sequence") is None else _sequence(data["sequence"]),
                alternatives=tuple(TableCost(**cost) for cost in data.get("alternatives", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError("the plan's sharding table", f"is damaged ({error})", "Make the plan again") from None


def _parts(data: Mapping[str, Any]) -> Parts:
    return tuple(Part(*part) for part in data.get("parts", ()))


def _sequence_json(split: SequenceSplit) -> dict[str, Any]:
    return {"blocks": split.blocks, "gathered": {name: list(keys) for name, keys in split.gathered.items()}}


def _sequence(data: Mapping[str, Any]) -> SequenceSplit:
    return SequenceSplit(data["blocks"], {name: tuple(keys) for name, keys in data["gathered"].items()})


def _split(data: Mapping[str, Any]) -> ModuleSplit:
    return ModuleSplit(**{**data, "style": Style(data["style"]), "parts": _parts(data)})


def _without_defaults(value: ModuleSplit | ParamCut) -> dict[str, Any]:
    fields = type(value).__dataclass_fields__
    kept = {name: getattr(value, name) for name, f in fields.items() if getattr(value, name) != f.default}
    return {name: list(v) if isinstance(v, tuple) else v for name, v in kept.items()}
