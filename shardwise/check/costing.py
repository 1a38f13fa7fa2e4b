"""What a model costs, for the planner, from the model itself: passes on fake tensors under the meter.

Rank 0 of each tensor degree runs as it will in training, on its part of the weights, with collectives that only count.
What its amounts lose against the whole model is what the ranks share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.check.amounts import Fit, make_amount, make_fit, shared_elements
from shardwise.check.description import illegal_by_numbers
from shardwise.errors import PlanError
from shardwise.models.build import build_on_meta
from shardwise.models.describe import describe_sizes
from shardwise.models.meter import Meter, MeteredProduct, Tally
from shardwise.models.passes import Tallies, is_expert_stack, metered_pass, part_of, thin
from shardwise.models.structure import Structure, find_structure, text_config
from shardwise.parallel.tensor import proven_table
from shardwise.spec.block import (
    Amount,
    Attention,
    Collective,
    ModelCosts,
    Parameters,
    PartCosts,
    Product,
    RecomputeLevel,
    TensorSplit,
)
from shardwise.spec.layout import ParamLayout
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import legal_tensor_degrees
from shardwise.tensor.cache import TableCache
from shardwise.tensor.execute import apply_table
from shardwise.tensor.table import ShardingTable, Style

LENGTHS = (256, 512, 1024)
DEGREES = (1, 2, 4, 8, 16)
_OUTER = (Style.COLUMN, Style.COLUMN_GATHER, Style.VOCAB_HEAD)
_INNER = (Style.ROW, Style.ROW_SPLIT)


class CountingRank:
    """Rank 0 of a tensor group that is not there: its collectives have the right shapes, and are counted."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.meter: Meter | None = None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._sent("all_reduce", tensor.numel())

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._sent("all_gather", self.size * tensor.numel())
        return torch.stack([tensor] * self.size)

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        self._sent("reduce_scatter", tensors.numel())
        return tensors[0].clone()

    def _sent(self, op: str, elements: int) -> None:
        if self.meter is not None:
            self.meter.sent(op, elements)


@dataclass(frozen=True)
class _Model:
    """A model on meta, and what its parts are made from."""

    model: PreTrainedModel
    structure: Structure
    spec: ModelSpec
    tables: Mapping[int, ShardingTable]
    sliced: Mapping[int, ShardingTable]  # with the residual stream cut along the sequence, where that can be
    rules: Mapping[int, str]

    @property
    def lowest(self) -> int:
        """The least degree that splits; 1 where none does."""
        return min((degree for degree in self.tables if degree > 1), default=1)


def model_costs(
    folder: Path,
    cache: TableCache,
    degrees: Sequence[int] | None = DEGREES,
    name: str = "",
    tell: Callable[[str], None] = lambda _: None,
    attention: str | None = None,
    whole: float | None = None,
) -> ModelCosts:
    """The costs of the model in ``folder``.

    Args:
        degrees: tensor degrees to look at; 1 is always among them. None: the least that splits, and those of
            ``DEGREES`` that the model's numbers allow.
        name: of the model in the answer; empty: the folder's.
        tell: is called with what is being done, before it takes seconds.
        attention: ``sdpa`` or ``eager``; None: the first of them that the model has.
        whole: the share of the blocks' weights that tables may leave whole for less traffic; None: the first tables.

    Raises:
        ConfigError: transformers cannot build the model.
        PlanError: it has no blocks, embedding or head that can be told.
    """
    model = build_on_meta(folder, attention, torch.bfloat16)
    structure = find_structure(model)
    spec = describe_sizes(model, structure, folder)
    find = partial(proven_table, model, tables=cache, whole=whole)
    tables, rules = _tables(find, spec, _usual_degrees(spec) if degrees is None else degrees, tell)
    sliced = _sliced_tables(find, [degree for degree in tables if degree > 1])
    described = _Model(model, structure, spec, tables, sliced, rules)
    tell("passes on fake tensors")
    passes = _Passes(described)
    parts = {part: _part(described, passes, part) for part in passes.parts}
    tied = structure.tied
    return ModelCosts(
        name=name or folder.resolve().name,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        kinds=tuple(parts[part_of(kind)] for kind in range(max(structure.kinds) + 1)),
        order=structure.kinds,
        embedding=parts["embedding"],
        head=parts["head"],
        tied=tied,
        tied_parameters=model.get_submodule(structure.head).weight.numel() if tied else 0,
        num_experts=spec.num_experts,
    )


def _usual_degrees(spec: ModelSpec) -> list[int]:
    legal = legal_tensor_degrees(spec)
    return [degree for degree in legal if degree in (*DEGREES, *legal[1:2])]


def _tables(
    find: Callable[..., ShardingTable], spec: ModelSpec, degrees: Sequence[int], tell: Callable[[str], None]
) -> tuple[dict[int, ShardingTable], dict[int, str]]:
    tables, rules = {1: ShardingTable(1)}, {}
    for degree in sorted(set(degrees) - {1}):
        rule = illegal_by_numbers(spec, degree)
        if rule is None:
            tell(f"tensor degree {degree}: looking for a table")
            try:
                tables[degree] = find(degree)
            except PlanError as error:
                rule = error.rule
        if rule is not None:
            rules[degree] = rule
    return tables, rules


def _sliced_tables(find: Callable[..., ShardingTable], degrees: Sequence[int]) -> dict[int, ShardingTable]:
    """Tables for sequence parallelism; a model that refuses it at one degree refuses it at all."""
    found: dict[int, ShardingTable] = {}
    for degree in degrees:
        try:
            found[degree] = find(degree, sequence=True)
        except PlanError:
            break
    return found


class _Passes:
    """Tallies of all passes that the amounts need."""

    def __init__(self, whole: _Model) -> None:
        self.lowest = whole.lowest
        tables = {1: whole.tables[1], self.lowest: whole.tables[self.lowest]}
        self.half = {t: _metered(whole, table, torch.bfloat16, LENGTHS) for t, table in tables.items()}
        try:
            self.single = {t: _metered(whole, table, torch.float32, LENGTHS) for t, table in tables.items()}
        except Exception:  # stacks of experts have no product in fp32: then the dtype of each tensor tells
            self.single = {}
        self.collectives = {t: _short(whole, table) for t, table in whole.tables.items() if t > 1}
        self.sliced = {t: _short(whole, table) for t, table in whole.sliced.items()}

    def sequence(self, degree: int) -> Tallies | None:
        """With the residual stream cut along the sequence; None where that cannot be."""
        return self.sliced.get(degree)

    @property
    def parts(self) -> list[str]:
        """Names of the parts that ran."""
        return sorted({part for part, _ in self.half[1][LENGTHS[0]]})

    def amount(self, part: str, backward: bool, take: Callable[[Tally, bool], float]) -> tuple[Fit, ...]:
        """Fits of a quantity: (half, single) precision, each (whole model, one rank of the lowest degree).

        ``take(tally, halves)``: its bytes, or of these those of elements of two bytes.
        """

        def fit(passes: Mapping[int, Tallies], halves: bool) -> Fit:
            return make_fit({n: take(found.get((part, backward), Tally()), halves) for n, found in passes.items()})

        half = [fit(self.half[t], False) for t in (1, self.lowest)]
        if self.single:
            return (*half, *(fit(self.single[t], False) for t in (1, self.lowest)))
        # In fp32 what had two bytes has four.
        doubled = [one + fit(self.half[t], True) for one, t in zip(half, (1, self.lowest), strict=True)]
        return (*half, *doubled)


def _metered(whole: _Model, table: ShardingTable, dtype: torch.dtype, lengths: Sequence[int]) -> dict[int, Tallies]:
    """Tallies by length, of rank 0 under ``table``."""
    model = thin(whole.model, whole.structure).to(dtype)
    group = CountingRank(table.degree)
    if table.degree > 1:
        layouts = {name: ParamLayout(name, tuple(p.shape)) for name, p in model.named_parameters()}
        apply_table(model, table, group, layouts)

    def connect(meter: Meter) -> None:
        group.meter = meter

    return {n: metered_pass(model, whole.structure, 1, n, connect) for n in lengths}


def _short(whole: _Model, table: ShardingTable) -> Tallies:
    return _metered(whole, table, torch.bfloat16, LENGTHS[:1])[LENGTHS[0]]


def _part(whole: _Model, passes: _Passes, part: str) -> PartCosts:
    middle = LENGTHS[1]
    tally = passes.half[1][middle][part, False]
    blocks = list(whole.model.get_submodule(whole.structure.blocks).children())
    block = blocks[whole.structure.kinds.index(int(part.split()[1]))] if part.startswith("block") else None
    parameters, trainable = _parameters(whole, part, whole.tables[whole.lowest])
    products = tuple(_product(whole, product, middle) for product in tally.products)
    ratio = tally.expert_traffic / max(tally.traffic + tally.expert_traffic, 1)
    return PartCosts(
        name=part if block is None else f"{type(block).__name__} {part.split()[1]}",
        parameters=parameters,
        trainable=trainable,
        products=products,
        attention=None if block is None else _attention(whole, passes, part, block),
        forward_traffic=_traffic(passes, part, 0.0, backward=False),
        backward_traffic=_traffic(passes, part, ratio, backward=True),
        saved={level: _saved(passes, part, level) for level in ("none", "selective", "full")},
        operators=tally.operators,
        degrees=tuple(_degree(whole, passes, part, degree) for degree in sorted({*whole.tables, *whole.rules})),
        dispatched=sum(one.uses * one.inner for one in products if one.copies > 1 and "gate" in one.name)
        or max((one.uses * one.inner for one in products if one.copies > 1), default=0.0),
    )


def _traffic(passes: _Passes, part: str, ratio: float, *, backward: bool) -> Amount:
    """Bytes of elementwise work; ``ratio``: the share of experts, where the pass does not tell."""

    def dense(tally: Tally, halves: bool) -> float:
        return (tally.half_traffic if halves else tally.traffic) * (1 - ratio)

    def experts(tally: Tally, halves: bool) -> float:
        return tally.traffic * ratio + tally.expert_traffic  # in compute precision, all of it

    amount = make_amount(passes.amount(part, backward, dense), passes.lowest)
    all_of_it, one_rank, *_ = passes.amount(part, backward, experts)
    inner, routed = shared_elements(all_of_it, one_rank, passes.lowest)
    return replace(amount, expert=inner, routed=routed)


def _saved(passes: _Passes, part: str, level: RecomputeLevel) -> Amount:
    def chosen(tally: Tally, halves: bool, of_experts: bool) -> float:
        if part.startswith("block") and level == "full":
            return 0.0 if of_experts else float(tally.entry_bytes)
        kept, own = tally.saved, 0.0
        if part.startswith("block") and level == "selective":  # all but the last, which is the part's own result
            kept = {key: one for key, one in tally.results.items() if key != tally.last_result}
            own = 0.0 if of_experts else float(tally.entry_bytes)
        found = [one for one in kept.values() if one.of_experts is of_experts and (one.half or not halves)]
        return own + sum(one.num_bytes for one in found)

    def amount(of_experts: bool) -> Amount:
        fits = passes.amount(part, False, lambda t, halves: chosen(t, halves, of_experts))
        return make_amount(fits, passes.lowest)

    # Of experts the ranks share what is as wide as an expert; each has the hidden states that go in and come out.
    dense, experts = amount(False), amount(True)
    routed = experts.whole + experts.whole_bytes / 2
    return replace(dense, expert=experts.split, expert_bytes=experts.split_bytes, routed=routed)


def _parameters(whole: _Model, part: str, table: ShardingTable) -> tuple[Parameters, Parameters]:
    """Weights of a part as ``table`` cuts them: all, and those that train."""
    sums = {True: Parameters(), False: Parameters()}
    for name, parameter, of_experts in _part_weights(whole, part):
        cut = table.is_cut(name)
        kind = "expert" if of_experts and (cut or table.degree == 1) else "split" if cut else "whole"
        own = Parameters(**{kind: parameter.numel()})
        sums[parameter.requires_grad] = sums[parameter.requires_grad] + own
    return sums[True] + sums[False], sums[True]


def _part_weights(whole: _Model, part: str) -> list[tuple[str, nn.Parameter, bool]]:
    """(name, parameter, of a stack of experts) of a part, a tied one in the first that has it."""
    model, structure = whole.model, whole.structure
    inside = f"{structure.blocks}."
    stacks = {name for name, module in model.named_modules() if is_expert_stack(module)}
    found = []
    if part.startswith("block"):
        prefix = f"{inside}{structure.kinds.index(int(part.split()[1]))}."
        chosen = [(name, p) for name, p in model.named_parameters() if name.startswith(prefix)]
    else:
        embeddings = {
            f"{name}.{short}"
            for name, module in model.named_modules()
            for short, _ in module.named_parameters(recurse=False)
            if isinstance(module, nn.Embedding)
        }
        others = [(name, p) for name, p in model.named_parameters() if not name.startswith(inside)]
        chosen = [(name, p) for name, p in others if (name in embeddings) == (part == "embedding")]
    for name, parameter in chosen:
        found.append((name, parameter, name.rpartition(".")[0] in stacks))
    return found


def _product(whole: _Model, product: MeteredProduct, length: int) -> Product:
    name = product.parameter or "product"
    module, _, _ = name.rpartition(".")
    table = whole.tables[whole.lowest]
    style, cut = table.style(module), table.params.get(name)
    split: Any = "outer" if style in _OUTER else "inner" if style in _INNER else "none"
    if style is Style.EXPERTS and cut is not None and cut.dim is not None:
        shape = whole.model.get_parameter(name).shape
        split = "outer" if shape[cut.dim] == product.outer else "inner"
    label = re.sub(r"^.*?\.\d+\.", "", name) if whole.structure.blocks in name else name
    label = label.removesuffix(".weight")
    return Product(label, product.inner, product.outer, split, product.tokens / length, product.copies)


def _attention(whole: _Model, passes: _Passes, part: str, block: nn.Module) -> Attention | None:
    spec, config = whole.spec, text_config(whole.model)
    tally = passes.half[1][LENGTHS[1]][part, False]
    split = _splits_heads(tally, passes.half[passes.lowest][LENGTHS[1]][part, False])
    window = next((w for m in block.modules() if isinstance(w := getattr(m, "sliding_window", None), int)), 0)
    if tally.fused:
        heads, qk_dim, v_dim = tally.fused[0]
        kv_heads = spec.num_kv_heads if heads == spec.num_heads and not hasattr(config, "kv_lora_rank") else heads
        return Attention(heads, kv_heads, qk_dim, v_dim, window=window, split=split)
    if not tally.cores:
        return None
    per_token = [
        sum(2 * c.heads * c.queries * c.inner * c.outer for c in passes.half[1][n][part, False].cores) / n
        for n in LENGTHS[1:]
    ]
    first, last = tally.cores[0], tally.cores[-1]
    if per_token[1] > 1.5 * per_token[0]:
        return Attention(
            first.heads, spec.num_kv_heads or first.heads, first.inner, last.outer, window, "eager", split=split
        )
    heads = spec.num_heads or 1
    width = spec.head_dim or 1
    # The same work for each token, whatever the length: heads x width x state, twice.
    return Attention(heads, heads, max(round(per_token[0] / (4 * heads * width)), 1), width, 0, "linear", split=split)


def _splits_heads(whole: Tally, rank: Tally) -> bool:
    """Whether a rank of the lowest degree has fewer heads than the whole model (there may be no other degree)."""

    def heads(tally: Tally) -> int:
        return sum(one[0] for one in tally.fused) + sum(core.heads for core in tally.cores)

    return rank is whole or heads(rank) < heads(whole)


def _degree(whole: _Model, passes: _Passes, part: str, degree: int) -> TensorSplit:
    if degree in whole.rules:
        return TensorSplit(degree, whole.rules[degree])
    if degree == 1:
        return TensorSplit(1, sequence=())
    collectives = _collectives(passes.collectives[degree], part) or ()
    own = _parameters(whole, part, whole.tables[degree])[0].whole
    usual = _parameters(whole, part, whole.tables[whole.lowest])[0].whole
    sequence = _collectives(passes.sequence(degree), part)
    return TensorSplit(degree, "", collectives, sequence, None if own == usual else own)


def _collectives(found: Tallies | None, part: str) -> tuple[Collective, ...] | None:
    """What a part sends in a pass of the first of the lengths, alike ones in one entry."""
    if found is None:
        return None
    counts: dict[tuple[Any, float], list[float]] = {}
    for backward in (False, True):
        for op, elements in found.get((part, backward), Tally()).sent:
            counts.setdefault((op, elements / LENGTHS[0]), [0.0, 0.0])[backward] += 1
    return tuple(Collective(op, elements, *times) for (op, elements), times in counts.items())
