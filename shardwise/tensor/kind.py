"""A solved kind of block as a table: of its own block, with the sizes of the real model, spread over all blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.structure import Structure
from shardwise.tensor.real_parts import RealSizes, real_parts
from shardwise.tensor.search import Mode, Problem, Solution
from shardwise.tensor.sequence import REMEDY, VALUE, sliced_biases
from shardwise.tensor.table import (
    LocalValue,
    ModuleSplit,
    ParamCut,
    SequenceSplit,
    ShardingTable,
    Style,
    TableCost,
)
from shardwise.tensor.trace import BlockTrace

Signature = tuple[tuple[str, str, tuple[str, ...]], ...]


def signature(block: nn.Module) -> Signature:
    """What blocks of one kind have in common: names and classes of their modules, names of what trains in them."""
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(short for short, p in module.named_parameters(recurse=False) if p.requires_grad),
        )
        for name, module in block.named_modules()
    )


@dataclass
class Kind:
    """A kind of block on its way to a table; names are relative to the block."""

    block: str  # of the small model
    trace: BlockTrace
    problem: Problem
    cuts: dict[str, dict[str, ParamCut]]  # stack of experts -> its parameters
    values: dict[int, dict[str, tuple[LocalValue, ...]]]  # region -> module -> numbers
    solution: Solution
    gathered: dict[str, tuple[str, ...]] | None = None  # module -> arguments, where the residual stream is sliced


def relative(name: str, block: str) -> str:
    """The name of a module within its block."""
    return "" if name == block else name.removeprefix(f"{block}.")


def relative_table(
    kind: Kind, small: nn.Module, real: nn.Module | None, sizes: RealSizes | None = None
) -> ShardingTable:
    """The table of one kind, names relative to the block, parts those of ``real`` (None: of the small block).

    Args:
        sizes: what numbers of the small copy are in the real model.
    """
    sizes = sizes or RealSizes()
    modules: dict[str, ModuleSplit] = {}
    params: dict[str, ParamCut] = {}
    values: dict[str, tuple[LocalValue, ...]] = {}
    small_block = small.get_submodule(kind.block)
    for name, choice in kind.solution.choices.items():
        short = relative(name, kind.block)
        if choice.split is not None:
            group = relative(choice.split.group, kind.block) if choice.split.group else ""
            modules[short] = replace(choice.split, group=group)
            if choice.split.style is Style.EXPERTS:
                params |= {f"{short}.{p}": cut for p, cut in kind.cuts[name].items()}
        elif choice.partial:
            own = small_block.get_submodule(short).named_parameters(recurse=False)
            params |= {f"{short}.{p}": ParamCut() for p, _ in own}
    for index, mode in enumerate(kind.solution.modes):
        region = kind.problem.regions[index]
        if mode is Mode.SPLIT:
            params |= {relative(p, kind.block): region.cuts.get(p, ParamCut()) for p in sorted(region.params)}
            for module, numbers in kind.values.get(index, {}).items():
                short = relative(module, kind.block)
                values[short] = (*values.get(short, ()), *numbers)
        elif mode in (Mode.SHARES, Mode.SLICED):
            params |= {relative(p, kind.block): ParamCut() for p in sorted(region.params)}
    params |= _bias_cuts(kind, small_block)
    if real is not None:
        modules, params = _with_real_parts(modules, params, small_block, real, sizes)
        values = {n: tuple(_real_value(v, sizes) for v in numbers) for n, numbers in values.items()}
    return ShardingTable(kind.problem.degree, modules, params, values, _refused(kind), sequence=_sequence(kind))


def _bias_cuts(kind: Kind, small_block: nn.Module) -> dict[str, ParamCut]:
    """Biases that see this rank's positions alone."""
    own = {name for name, _ in small_block.named_parameters()}
    names = (relative(name, kind.block) for name in sliced_biases(kind.solution))
    return {name: ParamCut() for name in names if name in own}


def _sequence(kind: Kind) -> SequenceSplit | None:
    if kind.gathered is None:
        return None
    return SequenceSplit("", {relative(name, kind.block): keys for name, keys in kind.gathered.items()})


def _with_real_parts(
    modules: dict[str, ModuleSplit],
    params: dict[str, ParamCut],
    small: nn.Module,
    real: nn.Module,
    sizes: RealSizes,
) -> tuple[dict[str, ModuleSplit], dict[str, ParamCut]]:
    """The same splits and cuts with the parts of the real block."""
    dims = {n: (s.parts, width(real.get_submodule(n))) for n, s in modules.items() if s.parts}
    dims |= {n: (c.parts, real.get_parameter(n).shape[c.dim]) for n, c in params.items() if c.dim is not None}
    row = [n for n, s in modules.items() if s.style is Style.ROW and not s.parts]
    read = {n: (_read(small.get_submodule(n)), _read(real.get_submodule(n))) for n in row}
    found = real_parts(dims, {n: pair for n, pair in read.items() if all(pair)}, sizes)
    return (
        {n: replace(s, parts=found[n]) if s.parts else s for n, s in modules.items()},
        {n: c if c.dim is None else replace(c, parts=found[n]) for n, c in params.items()},
    )


def _read(module: Any) -> int:
    """Features that a layer reads, 0 where it does not say."""
    return int(getattr(module, "in_features", 0))


def width(module: Any) -> int:
    """Features that a layer writes."""
    return int(module.out_features if isinstance(module, nn.Linear) else module.nf)


def _real_value(value: LocalValue, sizes: RealSizes) -> LocalValue:
    """A number of heads that ranks share is that of the real model."""
    if value.times == 1:
        return replace(value, over=sizes.unit(value.over))
    return replace(value, times=sizes.unit(value.times))


def _refused(kind: Kind) -> dict[str, str]:
    """What stays whole, and why."""
    if not kind.problem.products:
        return {"": "stays whole: none of its matrices runs exactly once in a pass"}
    reasons: dict[str, str] = {}
    for name, choice in kind.solution.choices.items():
        if choice.whole:
            region = kind.problem.regions[kind.problem.region_before(name)]
            rule = "cutting it moves more than it saves" if region.is_residual else "what it reads cannot be cut"
            reasons[relative(name, kind.block)] = f"{choice.whole} parameters stay whole: {rule}"
    return reasons


def spread(
    model: nn.Module,
    structure: Structure,
    tables: Mapping[Signature, ShardingTable],
    degree: int,
    ends: Mapping[str, ModuleSplit],
) -> ShardingTable:
    """The table of the whole model from those of its kinds of blocks."""
    modules: dict[str, ModuleSplit] = dict(ends)
    params: dict[str, ParamCut] = {}
    values: dict[str, tuple[LocalValue, ...]] = {}
    refused: dict[str, str] = {}
    gathered: dict[str, tuple[str, ...]] = {}
    sliced = any(table.sequence for table in tables.values())
    for index, block in enumerate(model.get_submodule(structure.blocks)):
        prefix = f"{structure.blocks}.{index}"
        table = tables.get(signature(block))
        if table is None and sliced:
            raise PlanError(VALUE, f"{prefix} is of a kind that the small copy does not have", REMEDY)
        if table is None:
            if ends:
                refused[prefix] = "a kind of block that the small copy does not have"
            continue
        for name, split in table.modules.items():
            modules[_full(prefix, name)] = replace(split, group=_full(prefix, split.group) if split.group else "")
        params |= {_full(prefix, name): cut for name, cut in table.params.items()}
        values |= {_full(prefix, name): numbers for name, numbers in table.values.items()}
        refused |= {_full(prefix, name): reason for name, reason in table.refused.items()}
        if table.sequence is not None:
            gathered |= {_full(prefix, name): keys for name, keys in table.sequence.gathered.items()}
    sequence = SequenceSplit(structure.blocks, gathered) if sliced else None
    return ShardingTable(degree, modules, params, values, refused, sequence=sequence)


def _full(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if name else prefix


def moves(kind: Kind) -> tuple[float, float]:
    """Elements that a rank moves for each token of one block, forward and backward, in units of (p - 1) / p."""
    problem, chosen = kind.problem, kind.solution.choices
    paid = {problem.groups[name]: problem.sizes[name].inputs for name, c in chosen.items() if c.sums_input}
    # The sum of an input's gradient; or its gather, and the scatter of its gradient.
    forward = sum(choice.forward for choice in chosen.values()) + problem.sequence * 1.0 * sum(paid.values())
    backward = sum(choice.backward for choice in chosen.values()) + (2.0 - problem.sequence) * sum(paid.values())
    return forward, backward


def total_cost(
    model: nn.Module, structure: Structure, table: ShardingTable, kinds: Mapping[Signature, Kind]
) -> TableCost:
    """What the blocks leave whole and move, summed over the model."""
    forward, backward = 0.0, 0.0
    blocks = model.get_submodule(structure.blocks)
    for block in blocks:
        kind = kinds.get(signature(block))
        if kind is not None:
            own = moves(kind)
            forward, backward = forward + own[0], backward + own[1]
    sizes = {name: p.numel() for name, p in blocks.named_parameters(prefix=structure.blocks)}
    whole = sum(size for name, size in sizes.items() if not table.is_cut(name))
    ring = (table.degree - 1) / table.degree
    return TableCost(whole, sum(sizes.values()), ring * forward, ring * backward)
