"""From a model to its table: traced and solved on a small copy, each split tried, the whole of it proven.

A region whose dependencies allow a split may still have a forward that insists on whole shapes; it is tried on
simulated ranks with the numbers that its modules read changed to this rank's. A region where nothing works is gathered
or stays whole, whatever is cheaper, and the table says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.structure import Structure, find_structure, text_config
from shardwise.spec.tolerance import PROOF
from shardwise.tensor.experts import find_expert_cuts
from shardwise.tensor.parts import Parts, scaled
from shardwise.tensor.regions import Region, find_regions
from shardwise.tensor.search import Mode, Problem, Sizes, Solution, solve
from shardwise.tensor.sequence import REMEDY, VALUE, gather_points, sliced_biases, solve_sliced, uneven_length
from shardwise.tensor.simulate import Reference, compare, reference
from shardwise.tensor.table import (
    LocalValue,
    ModuleSplit,
    ParamCut,
    SequenceSplit,
    ShardingTable,
    Style,
    TableCost,
)
from shardwise.tensor.trace import BlockTrace, Product, is_linear, trace_blocks
from shardwise.tensor.values import candidate_sets, read_numbers

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
class _Kind:
    """A kind of block on its way to a table; names are relative to the block."""

    block: str  # of the small model
    trace: BlockTrace
    problem: Problem
    cuts: dict[str, dict[str, ParamCut]]  # stack of experts -> its parameters
    values: dict[int, dict[str, tuple[LocalValue, ...]]]  # region -> module -> numbers
    solution: Solution
    gathered: dict[str, tuple[str, ...]] | None = None  # module -> arguments, where the residual stream is sliced


def find_table(model: nn.Module, small: nn.Module, degree: int, *, sequence: bool = False) -> ShardingTable:
    """The table of ``model`` (on meta) over ``degree`` ranks.

    Args:
        small: a copy with the same kinds of blocks and the same divisibility, in float64 on the CPU.
        sequence: whether the residual stream between blocks is cut along the sequence.

    Raises:
        PlanError: no block can be split, the vocabulary cannot, or the residual stream cannot.
    """
    return find_tables(model, small, degree, sequence=sequence)[0]


def find_tables(
    model: nn.Module, small: nn.Module, degree: int, *, sequence: bool = False
) -> tuple[ShardingTable, ShardingTable]:
    """The table of ``model``, and the same choices on ``small``, where they were proven."""
    if degree == 1:
        return ShardingTable(1), ShardingTable(1)
    structure, small_structure = find_structure(model), find_structure(small)
    want = reference(small)
    sizes = {signature(block): block for block in model.get_submodule(structure.blocks)}
    kinds: dict[Signature, _Kind] = {}
    for trace in trace_blocks(small, small_structure.blocks):
        key = signature(trace.module)
        if key not in kinds and key in sizes:
            kinds[key] = _find_kind(small, trace, sizes[key], degree, want)
    if sequence:
        for kind in kinds.values():
            _slice_kind(kind, small, small_structure.blocks)
        want = reference(small, uneven_length(degree))
    tables = {key: _relative_table(kind, small, None) for key, kind in kinds.items()}
    proven = _proven_table(small, small_structure, tables, degree, want)
    units = _shared_heads(small, model, degree)
    tables = {key: _relative_table(kind, small, sizes[key], units) for key, kind in kinds.items()}
    with_ends = small_structure.head in proven.modules or small_structure.embedding in proven.modules
    table = _spread(model, structure, tables, degree, _ends(model, structure) if with_ends else {})
    return replace(table, cost=_cost(model, structure, table, kinds)), proven


def _proven_table(
    small: nn.Module,
    structure: Structure,
    tables: Mapping[Signature, ShardingTable],
    degree: int,
    want: Reference,
) -> ShardingTable:
    """The table of the whole small model, with embedding and head split where that is right.

    Raises:
        PlanError: it differs from one process with and without them.
    """
    value, remedy = f"strategy.tp = {degree}", "Use tp=1, and pp or dp_shard in its place"
    if any(table.sequence for table in tables.values()):
        value, remedy = VALUE, REMEDY
    rule = ""
    for ends in (_ends(small, structure), {}):
        table = _spread(small, structure, tables, degree, ends)
        try:
            difference = compare(small, table, want)
        except Exception as error:  # whatever a foreign forward raises on its part
            rule = f"its split does not run on a small copy ({type(error).__name__}: {error})"
            continue
        if difference.error <= PROOF:
            return table
        rule = f"on a small copy the split differs from one process ({difference.where}: {difference.error:.1e})"
    raise PlanError(value, rule, remedy)


def _ends(model: nn.Module, structure: Structure) -> dict[str, ModuleSplit]:
    """Embedding and head split over the vocabulary, where both are what their classes promise."""
    embedding, head = model.get_submodule(structure.embedding), model.get_submodule(structure.head)
    ends = {}
    if isinstance(embedding, nn.Embedding):
        ends[structure.embedding] = ModuleSplit(Style.VOCAB_EMBEDDING)
    if is_linear(head) and {name for name, _ in head.named_parameters()} <= {"weight", "bias"}:
        ends[structure.head] = ModuleSplit(Style.VOCAB_HEAD, group=structure.head)
    return {} if structure.tied and len(ends) < 2 else ends


def _find_kind(small: nn.Module, trace: BlockTrace, real: nn.Module, degree: int, want: Reference) -> _Kind:
    """Solve a block, try what was found, and solve again without what did not run."""
    regions = find_regions(small, trace, degree)
    cuts = {
        p.name: found
        for p in trace.products
        if not p.is_linear and (found := find_expert_cuts(p.module, p.args, p.kwargs, degree)) is not None
    }
    problem = _problem(trace, regions, cuts, real, degree)
    values: dict[int, dict[str, tuple[LocalValue, ...]]] = {}
    for index, region in enumerate(regions):
        if region.splittable and not region.is_residual:
            numbers = _try_region(small, trace, problem, index, degree, want)
            if numbers is None:
                region.splittable = False
            else:
                values[index] = numbers
    return _Kind(trace.name, trace, problem, cuts, values, solve(problem))


def _slice_kind(kind: _Kind, small: nn.Module, blocks: str) -> None:
    """Solve a block again, with its residual stream cut along the sequence."""
    kind.problem, kind.solution = solve_sliced(kind.trace, kind.problem)
    kind.gathered = gather_points(small, blocks, kind.trace, kind.problem, _common)


def _problem(
    trace: BlockTrace, regions: list[Region], cuts: Mapping[str, Any], real: nn.Module, degree: int
) -> Problem:
    first: dict[int, str] = {}
    groups = {p.name: first.setdefault(id(p.inputs[0]), p.name) for p in trace.products}
    sizes = {p.name: _sizes(p, real.get_submodule(_relative(p.name, trace.name)), degree) for p in trace.products}
    width = int(trace.entry.shape[-1])
    return Problem(
        products=[p.name for p in trace.products],
        sizes=sizes,
        groups=groups,
        regions=regions,
        stacks={p.name: p.name in cuts for p in trace.products if not p.is_linear},
        degree=degree,
        # That of the real model, where a product reads it.
        hidden_size=next((sizes[p.name].inputs for p in trace.products if p.in_features == width), width),
    )


def _sizes(product: Product, real: nn.Module, degree: int) -> Sizes:
    weight = next(iter(real.parameters(recurse=False)))
    own = next(iter(product.module.parameters(recurse=False)))
    scale = [r / s for r, s in zip(weight.shape[-2:], own.shape[-2:], strict=True)]
    flip = product.is_linear and own.shape[0] != product.out_features
    by_out, by_in = reversed(scale) if flip else scale
    if not product.is_linear:
        by_out = by_in = max(scale)
    parameters = sum(p.numel() for p in real.parameters(recurse=False))
    inputs, outputs = round(product.in_features * by_in), round(product.out_features * by_out)
    even = (
        inputs % degree == product.in_features % degree == 0,
        outputs % degree == product.out_features % degree == 0,
    )
    return Sizes(inputs, outputs, parameters, even)


def _try_region(
    small: nn.Module, trace: BlockTrace, problem: Problem, index: int, degree: int, want: Reference
) -> dict[str, tuple[LocalValue, ...]] | None:
    """The numbers with which the split of one region runs and is right; None where there are none."""
    alone = [
        region if i == index or region.is_residual else replace(region, splittable=False)
        for i, region in enumerate(problem.regions)
    ]
    forced = replace(problem, regions=alone, forced={index: Mode.SPLIT}, stacks=dict.fromkeys(problem.stacks, False))
    try:
        solution = solve(forced)
    except ValueError:
        return None
    region = problem.regions[index]
    kind = _Kind(trace.name, trace, forced, {}, {}, solution)
    scope = _common([*region.chunked, *region.narrow])
    widths = {p.in_features for p in trace.products if p.name in region.narrow}
    for name, chunks in region.chunked.items():
        widths |= {part.size for part in chunks} | {p.out_features for p in trace.products if p.name == name}
    units = max((part.units for chunks in region.chunked.values() for part in chunks), default=0)
    same = signature(trace.module)
    structure = find_structure(small)

    def is_right(candidate: dict[str, tuple[LocalValue, ...]]) -> bool:
        kind.values = {index: candidate}
        table = _spread(small, structure, {same: _relative_table(kind, small, None)}, degree, {})
        try:
            return compare(small, table, want).error <= PROOF
        except Exception:  # a forward that insists on another shape
            return False

    sets = candidate_sets(read_numbers(small, scope), sorted(widths), degree, units)
    found = next((candidate for candidate in sets if is_right(candidate)), None)
    return None if found is None else _fewest(found, is_right)


def _fewest(
    found: dict[str, tuple[LocalValue, ...]], is_right: Callable[[dict[str, tuple[LocalValue, ...]]], bool]
) -> dict[str, tuple[LocalValue, ...]]:
    """``found`` without the numbers that need not change."""
    for module, value in [(module, value) for module, values in found.items() for value in values]:
        fewer = found | {module: tuple(v for v in found[module] if v != value)}
        if is_right(fewer):
            found = fewer
    return {module: values for module, values in found.items() if values}


def _common(names: Sequence[str]) -> str:
    """The innermost module that holds all of ``names``."""
    split = [name.split(".") for name in names]
    shared = 0
    while all(len(parts) > shared + 1 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    return ".".join(split[0][:shared])


def _relative(name: str, block: str) -> str:
    return "" if name == block else name.removeprefix(f"{block}.")


def _relative_table(
    kind: _Kind, small: nn.Module, real: nn.Module | None, units: Mapping[int, int] | None = None
) -> ShardingTable:
    """The table of one kind, names relative to the block, parts those of ``real`` (None: of the small block)."""
    units = units or {}
    modules: dict[str, ModuleSplit] = {}
    params: dict[str, ParamCut] = {}
    values: dict[str, tuple[LocalValue, ...]] = {}
    small_block = small.get_submodule(kind.block)
    for name, choice in kind.solution.choices.items():
        short = _relative(name, kind.block)
        if choice.split is not None:
            group = _relative(choice.split.group, kind.block) if choice.split.group else ""
            modules[short] = replace(choice.split, group=group)
            if choice.split.style is Style.EXPERTS:
                params |= {f"{short}.{p}": cut for p, cut in kind.cuts[name].items()}
        elif choice.partial:
            own = small_block.get_submodule(short).named_parameters(recurse=False)
            params |= {f"{short}.{p}": ParamCut() for p, _ in own}
    for index, mode in enumerate(kind.solution.modes):
        region = kind.problem.regions[index]
        if mode is Mode.SPLIT:
            params |= {_relative(p, kind.block): region.cuts.get(p, ParamCut()) for p in region.params}
            for module, numbers in kind.values.get(index, {}).items():
                short = _relative(module, kind.block)
                values[short] = (*values.get(short, ()), *numbers)
        elif mode in (Mode.SHARES, Mode.SLICED):
            params |= {_relative(p, kind.block): ParamCut() for p in region.params}
    params |= _bias_cuts(kind, small_block)
    if real is not None:
        modules = {n: replace(s, parts=_real_parts(n, s, real, units)) for n, s in modules.items()}
        params = {n: replace(c, parts=_real_cut(n, c, real, units)) for n, c in params.items()}
        values = {n: tuple(_real_value(v, units) for v in numbers) for n, numbers in values.items()}
    return ShardingTable(kind.problem.degree, modules, params, values, _refused(kind), sequence=_sequence(kind))


def _bias_cuts(kind: _Kind, small_block: nn.Module) -> dict[str, ParamCut]:
    """Biases that see this rank's positions alone."""
    own = {name for name, _ in small_block.named_parameters()}
    names = (_relative(name, kind.block) for name in sliced_biases(kind.solution))
    return {name: ParamCut() for name in names if name in own}


def _sequence(kind: _Kind) -> SequenceSplit | None:
    if kind.gathered is None:
        return None
    return SequenceSplit("", {_relative(name, kind.block): keys for name, keys in kind.gathered.items()})


def _real_parts(name: str, split: ModuleSplit, real: nn.Module, units: Mapping[int, int]) -> Parts:
    if not split.parts:
        return ()
    module: Any = real.get_submodule(name)
    size = module.out_features if isinstance(module, nn.Linear) else module.nf
    return _scaled(name, split.parts, int(size), units)


def _real_cut(name: str, cut: ParamCut, real: nn.Module, units: Mapping[int, int]) -> Parts:
    return () if cut.dim is None else _scaled(name, cut.parts, real.get_parameter(name).shape[cut.dim], units)


def _scaled(name: str, parts: Parts, size: int, units: Mapping[int, int]) -> Parts:
    found = scaled(parts, size)
    if found is None:
        rule = f"are {[part.size for part in parts]} in a small copy, and {size} has no such parts"
        raise PlanError(f"the parts of {name}", rule, "Use tp=1")
    return tuple(part._replace(units=units.get(part.units, part.units)) for part in found)


def _real_value(value: LocalValue, units: Mapping[int, int]) -> LocalValue:
    """A number of heads that ranks share is that of the real model."""
    if value.times == 1:
        return replace(value, over=units.get(value.over, value.over))
    return replace(value, times=units.get(value.times, value.times))


def _shared_heads(small: nn.Module, model: nn.Module, degree: int) -> dict[int, int]:
    """Key/value heads of the small copy -> those of the real model, where there are fewer than ranks."""
    few, many = (getattr(text_config(m), "num_key_value_heads", None) for m in (small, model))
    return {few: many} if few is not None and many is not None and 1 < few < degree else {}


def _refused(kind: _Kind) -> dict[str, str]:
    """What stays whole, and why."""
    reasons: dict[str, str] = {}
    for name, choice in kind.solution.choices.items():
        if choice.whole:
            region = kind.problem.regions[kind.problem.region_before(name)]
            rule = "cutting it moves more than it saves" if region.is_residual else "what it reads cannot be cut"
            reasons[_relative(name, kind.block)] = f"{choice.whole} parameters stay whole: {rule}"
    return reasons


def _spread(
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


def _cost(model: nn.Module, structure: Structure, table: ShardingTable, kinds: Mapping[Signature, _Kind]) -> TableCost:
    """What the blocks leave whole and move, summed over the model."""
    forward, backward = 0.0, 0.0
    blocks = model.get_submodule(structure.blocks)
    for block in blocks:
        kind = kinds.get(signature(block))
        if kind is not None:
            problem, chosen = kind.problem, kind.solution.choices
            forward += sum(choice.forward for choice in chosen.values())
            paid = {problem.groups[name]: problem.sizes[name].inputs for name, c in chosen.items() if c.sums_input}
            backward += sum(choice.backward for choice in chosen.values())
            # The sum of an input's gradient; or its gather, and the scatter of its gradient.
            forward += problem.sequence * 1.0 * sum(paid.values())
            backward += (2.0 - problem.sequence) * sum(paid.values())
    sizes = {name: p.numel() for name, p in blocks.named_parameters(prefix=structure.blocks)}
    whole = sum(size for name, size in sizes.items() if not table.is_cut(name))
    ring = (table.degree - 1) / table.degree
    return TableCost(whole, sum(sizes.values()), ring * forward, ring * backward)
