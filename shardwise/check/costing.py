"""What a model costs, for the planner, from the model itself: passes on fake tensors under the meter.

Rank 0 of each tensor degree runs as it will in training, on its part of the weights, with collectives that only count.
What its amounts lose against the whole model is what the ranks share.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.check.amounts import make_amount, shared_elements
from shardwise.check.description import illegal_by_numbers
from shardwise.check.metered import LENGTHS, Passes, SplitModel
from shardwise.check.tables import ProvenTables
from shardwise.errors import PlanError
from shardwise.models.build import build_on_meta
from shardwise.models.describe import describe_sizes
from shardwise.models.meter import MeteredProduct, Tally
from shardwise.models.passes import Tallies, is_expert_stack, part_of
from shardwise.models.structure import find_structure, text_config
from shardwise.spec.block import (
    Amount,
    Attention,
    BlockTables,
    Collective,
    ModelCosts,
    Parameters,
    PartCosts,
    Product,
    RecomputeLevel,
    TensorSplit,
)
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import legal_tensor_degrees
from shardwise.tensor.alternatives import offered_shares
from shardwise.tensor.cache import TableCache
from shardwise.tensor.edited import same_split
from shardwise.tensor.table import ShardingTable, Style

MOST_TABLES = 3  # beside the first ones, that the costs are told of
DEGREES = (1, 2, 4, 8, 16)
_OUTER = (Style.COLUMN, Style.COLUMN_GATHER, Style.VOCAB_HEAD)
_INNER = (Style.ROW, Style.ROW_SPLIT)


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
    proven = ProvenTables(model, cache)
    find = partial(proven.find, whole=whole)
    tables, rules = _tables(find, spec, _usual_degrees(spec) if degrees is None else degrees, tell)
    sliced = _sliced_tables(find, [degree for degree in tables if degree > 1])
    described = SplitModel(model, structure, spec, tables, sliced, rules)
    tell("passes on fake tensors")
    passes = Passes(described)
    parts = {part: _part(described, passes, part) for part in passes.parts}
    tied = structure.tied
    others = _other_tables(described, passes, proven, tell) if whole is None else ()
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
        tables=others,
        blocks=structure.blocks,
    )


def _other_tables(
    first: SplitModel, passes: Passes, proven: ProvenTables, tell: Callable[[str], None]
) -> tuple[BlockTables, ...]:
    """What blocks cost under some of the tables that leave more whole than the first ones and move less."""
    found: list[BlockTables] = []
    seen = [first.tables[first.lowest]]
    for share in offered_shares(first.tables[first.lowest], MOST_TABLES):
        tell(f"tables within tp_whole={share:g}")
        other = _within(first, proven, share)
        if other is None or any(same_split(other.tables[other.lowest], one) for one in seen):
            continue
        seen.append(other.tables[other.lowest])
        own = Passes(other, passes)
        kinds = range(max(first.structure.kinds) + 1)
        found.append(BlockTables(share, tuple(_part(other, own, part_of(kind)) for kind in kinds)))
    return tuple(found)


def _within(first: SplitModel, proven: ProvenTables, share: float) -> SplitModel | None:
    """The model under the tables within a share; a degree where they are the first ones has a rule. None: all have."""
    tables, rules = {1: first.tables[1]}, dict(first.rules)
    ends = (first.structure.embedding, first.structure.head)
    for degree, usual in list(first.tables.items())[1:]:
        try:
            table = proven.find(degree, whole=share)
        except PlanError as error:
            rules[degree] = error.rule
            continue
        assert table.cost is not None
        assert usual.cost is not None
        if table.cost.moved < usual.cost.moved and all(table.style(end) == usual.style(end) for end in ends):
            tables[degree] = table
        else:
            rules[degree] = f"no other table is within tp_whole={share:g}"
    return replace(first, tables=tables, sliced={}, rules=rules) if len(tables) > 1 else None


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


def _part(whole: SplitModel, passes: Passes, part: str) -> PartCosts:
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


def _traffic(passes: Passes, part: str, ratio: float, *, backward: bool) -> Amount:
    """Bytes of elementwise work; ``ratio``: the share of experts, where the pass does not tell."""

    def dense(tally: Tally, halves: bool) -> float:
        return (tally.half_traffic if halves else tally.traffic) * (1 - ratio)

    def experts(tally: Tally, halves: bool) -> float:
        return tally.traffic * ratio + tally.expert_traffic  # in compute precision, all of it

    amount = make_amount(passes.amount(part, backward, dense), passes.lowest)
    all_of_it, one_rank, *_ = passes.amount(part, backward, experts)
    inner, routed = shared_elements(all_of_it, one_rank, passes.lowest)
    return replace(amount, expert=inner, routed=routed)


def _saved(passes: Passes, part: str, level: RecomputeLevel) -> Amount:
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


def _parameters(whole: SplitModel, part: str, table: ShardingTable) -> tuple[Parameters, Parameters]:
    """Weights of a part as ``table`` cuts them: all, and those that train."""
    sums = {True: Parameters(), False: Parameters()}
    for name, parameter, of_experts in _part_weights(whole, part):
        cut = table.is_cut(name)
        kind = "expert" if of_experts and (cut or table.degree == 1) else "split" if cut else "whole"
        own = Parameters(**{kind: parameter.numel()})
        sums[parameter.requires_grad] = sums[parameter.requires_grad] + own
    return sums[True] + sums[False], sums[True]


def _part_weights(whole: SplitModel, part: str) -> list[tuple[str, nn.Parameter, bool]]:
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


def _product(whole: SplitModel, product: MeteredProduct, length: int) -> Product:
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


def _attention(whole: SplitModel, passes: Passes, part: str, block: nn.Module) -> Attention | None:
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


def _degree(whole: SplitModel, passes: Passes, part: str, degree: int) -> TensorSplit:
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
