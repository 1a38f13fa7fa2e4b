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
from shardwise.models.structure import Structure, find_structure
from shardwise.spec.tolerance import PROOF
from shardwise.tensor.alternatives import Alternative, find_alternatives, named, within
from shardwise.tensor.experts import find_expert_cuts
from shardwise.tensor.kind import Kind, Signature, relative, relative_table, signature, spread, total_cost
from shardwise.tensor.real_parts import real_sizes
from shardwise.tensor.regions import Region, find_regions
from shardwise.tensor.search import Mode, Problem, Sizes, solve
from shardwise.tensor.sequence import REMEDY, VALUE, gather_points, solve_sliced, uneven_length
from shardwise.tensor.simulate import Reference, compare, reference, reference_of, runs
from shardwise.tensor.table import LocalValue, ModuleSplit, ShardingTable, Style
from shardwise.tensor.trace import BlockTrace, Product, is_linear, trace_blocks
from shardwise.tensor.values import candidate_sets, read_numbers

_MOST_PROOFS = 4  # of tables within a bound, the one that moves least first; then the default, if it is within
Numbers = dict[str, tuple[LocalValue, ...]]  # module -> what it reads in place of the whole model's numbers


def find_table(
    model: nn.Module, small: nn.Module, degree: int, *, sequence: bool = False, whole: float | None = None
) -> ShardingTable:
    """The table of ``model`` (on meta) over ``degree`` ranks.

    Args:
        small: a copy with the same kinds of blocks and the same divisibility, in float64 on the CPU.
        sequence: whether the residual stream between blocks is cut along the sequence.
        whole: the share of the blocks' parameters that may stay whole: the table that moves least within it. None: the
            one that leaves as little whole as is worth its traffic.

    Raises:
        PlanError: no block can be split, the vocabulary cannot, or the residual stream cannot; no table leaves as
            little whole.
    """
    return find_tables(model, small, degree, sequence=sequence, whole=whole)[0]


def find_tables(
    model: nn.Module, small: nn.Module, degree: int, *, sequence: bool = False, whole: float | None = None
) -> tuple[ShardingTable, ShardingTable]:
    """The table of ``model``, and the same choices on ``small``, where they were proven."""
    if degree == 1:
        return ShardingTable(1), ShardingTable(1)
    return TableSearch(model, small, degree).tables(sequence=sequence, whole=whole)


class TableSearch:
    """The kinds of blocks of a model, and what in them can be split; tables are solved from it.

    Args:
        model, small, degree: as of :func:`find_table`.
    """

    def __init__(self, model: nn.Module, small: nn.Module, degree: int) -> None:
        self.model, self.small, self.degree = model, small, degree
        self._small_structure = find_structure(small)
        self._structure = find_structure(model, like=self._small_structure)
        self._want = reference(small)
        self._sizes = {signature(block): block for block in model.get_submodule(self._structure.blocks)}
        drafts: dict[Signature, _Draft] = {}
        trials = _Trials(small, self._small_structure, self._want)
        for trace in trace_blocks(small, self._small_structure.blocks):
            key = signature(trace.module)
            if key not in drafts and key in self._sizes:
                drafts[key] = _draft(trace, self._sizes[key], degree, trials)
        wrong = _wrong_in_model(list(drafts.values()), trials)
        self.kinds = {key: _solved(_corrected(one, trials) if one in wrong else one) for key, one in drafts.items()}

    def tables(self, *, sequence: bool = False, whole: float | None = None) -> tuple[ShardingTable, ShardingTable]:
        """The table of the model, and the same choices on the small copy, where they were proven.

        Args:
            sequence, whole: as of :func:`find_table`.

        Raises:
            PlanError: as :func:`find_table`.
        """
        first, others = self.offered(sequence=sequence)
        known = named(first.cost, others)
        if whole is None:
            table, proven = self.proven(first, sequence=sequence)
            return replace(table, alternatives=known), proven
        refusal: PlanError | None = None
        found = within(whole, first, others, self.degree)
        for one in [*found[:_MOST_PROOFS], *(one for one in found[_MOST_PROOFS:] if one is first)]:
            try:
                table, proven = self.proven(one, sequence=sequence)
            except PlanError as error:
                refusal = error
            else:
                return replace(table, alternatives=known), proven
        assert refusal is not None
        raise PlanError(f"strategy.tp_whole = {whole:g}", refusal.rule, "Leave it out") from None

    def offered(self, *, sequence: bool = False) -> tuple[Alternative, list[Alternative]]:
        """The first choice, and those that leave more whole and move less; none of them is proven yet.

        Raises:
            PlanError: the residual stream cannot be cut.
        """
        kinds = {key: self._solved(kind, sequence) for key, kind in self.kinds.items()}
        tables = {key: relative_table(kind, self.small, None) for key, kind in kinds.items()}
        table = spread(self.model, self._structure, tables, self.degree, {})
        cost = total_cost(self.model, self._structure, table, kinds)
        others = find_alternatives(self.model, self._structure, self.small, kinds, cost)
        return Alternative(cost, kinds), others

    def proven(self, chosen: Alternative, *, sequence: bool = False) -> tuple[ShardingTable, ShardingTable]:
        """The table of a choice, and that on the small copy, where it is right.

        Raises:
            PlanError: it is not.
        """
        want = reference(self.small, uneven_length(self.degree)) if sequence else self._want
        tables = {key: relative_table(kind, self.small, None) for key, kind in chosen.kinds.items()}
        proven = _proven_table(self.small, self._small_structure, tables, self.degree, want)
        sizes = real_sizes(self.small, self.model, self.degree)
        tables = {k: relative_table(kind, self.small, self._sizes[k], sizes) for k, kind in chosen.kinds.items()}
        with_ends = {self._small_structure.head, self._small_structure.embedding} & set(proven.modules)
        ends = _ends(self.model, self._structure) if with_ends else {}
        table = spread(self.model, self._structure, tables, self.degree, ends)
        return replace(table, cost=chosen.cost), proven

    def _solved(self, kind: Kind, sequence: bool) -> Kind:
        if not sequence:
            return kind
        problem, solution = solve_sliced(kind.trace, kind.problem)
        gathered = gather_points(self.small, self._small_structure.blocks, kind.trace, problem, _common)
        return replace(kind, problem=problem, solution=solution, gathered=gathered)


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
        table = spread(small, structure, tables, degree, ends)
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


@dataclass(frozen=True, eq=False)
class _Draft:
    """A kind of block before it is solved: ``values`` are the numbers of its regions that are right when split."""

    trace: BlockTrace
    problem: Problem
    cuts: dict[str, Any]
    values: dict[int, Numbers]

    @property
    def forced(self) -> Kind | None:
        """The kind in which just these regions are split; None where that cannot be."""
        return _forced(self.trace, self.problem, self.values)


def _draft(trace: BlockTrace, real: nn.Module, degree: int, trials: _Trials) -> _Draft:
    """What can be split in a block, each region tried by itself in the block alone."""
    regions = find_regions(trials.small, trace, degree)
    cuts = {
        p.name: found
        for p in trace.products
        if not p.is_linear and (found := find_expert_cuts(p.module, p.args, p.kwargs, degree)) is not None
    }
    problem = _problem(trace, regions, cuts, real, degree)
    return _Draft(trace, problem, cuts, _numbers_of_regions(trace, problem, trials))


def _wrong_in_model(drafts: Sequence[_Draft], trials: _Trials) -> list[_Draft]:
    """Those whose split regions, right in the block alone, are wrong in the model: most often none."""
    split = [draft for draft in drafts if draft.values]
    if trials.are_right([draft.forced for draft in split]):
        return []
    *others, last = split
    wrong = [draft for draft in others if not trials.are_right([draft.forced])]
    return wrong if wrong and trials.are_right([last.forced]) else [*wrong, last]


def _corrected(draft: _Draft, trials: _Trials) -> _Draft:
    """With those of its regions that are right in the model, each tried there by itself."""
    one_by_one = replace(trials, one_by_one=True)
    return replace(draft, values=_numbers_of_regions(draft.trace, draft.problem, one_by_one, draft.values))


def _solved(draft: _Draft) -> Kind:
    """Solved without the regions that are not right when split."""
    for index, region in enumerate(draft.problem.regions):
        if region.splittable and not region.is_residual:
            region.splittable = index in draft.values
    return Kind(draft.trace.name, draft.trace, draft.problem, draft.cuts, draft.values, solve(draft.problem))


def _numbers_of_regions(
    trace: BlockTrace, problem: Problem, trials: _Trials, known: Mapping[int, Numbers] | None = None
) -> dict[int, Numbers]:
    """The numbers of each region whose split was right when it was tried, by its place among the regions.

    Args:
        known: of the regions that were right in the block alone; the others are in no model.
    """
    tried = {}
    for index, region in enumerate(problem.regions):
        if not region.splittable or region.is_residual or (known is not None and index not in known):
            continue
        is_right = known is not None and trials.are_right([_forced(trace, problem, {index: known[index]})])
        numbers = known[index] if known and is_right else _try_region(trace, problem, index, trials.of_block(trace))
        if numbers is not None:
            tried[index] = numbers
    return tried


def _forced(trace: BlockTrace, problem: Problem, values: Mapping[int, Numbers]) -> Kind | None:
    """A kind in which just these regions are split; None where that cannot be."""
    regions = [
        region if index in values or region.is_residual else replace(region, splittable=False)
        for index, region in enumerate(problem.regions)
    ]
    stacks = dict.fromkeys(problem.stacks, False)
    forced = replace(problem, regions=regions, forced=dict.fromkeys(values, Mode.SPLIT), stacks=stacks)
    try:
        return Kind(trace.name, trace, forced, {}, dict(values), solve(forced))
    except ValueError:
        return None


def _problem(
    trace: BlockTrace, regions: list[Region], cuts: Mapping[str, Any], real: nn.Module, degree: int
) -> Problem:
    first: dict[int, str] = {}
    groups = {p.name: first.setdefault(id(p.inputs[0]), p.name) for p in trace.products}
    sizes = {p.name: _sizes(p, real.get_submodule(relative(p.name, trace.name)), degree) for p in trace.products}
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
    weight = next(p for p in real.parameters(recurse=False) if p.dim() > 1)
    own = next(p for p in product.module.parameters(recurse=False) if p.dim() > 1)
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


def _try_region(trace: BlockTrace, problem: Problem, index: int, trials: _Trials) -> Numbers | None:
    """The numbers with which the split of one region runs and is right; None where there are none."""
    kind = _forced(trace, problem, {index: {}})
    if kind is None:
        return None
    region = problem.regions[index]
    scope = _common([*region.chunked, *region.narrow])
    widths = {p.in_features for p in trace.products if p.name in region.narrow}
    for name, chunks in region.chunked.items():
        widths |= {part.size for part in chunks} | {p.out_features for p in trace.products if p.name == name}
    units = max((part.units for chunks in region.chunked.values() for part in chunks), default=0)

    def with_numbers(numbers: Numbers) -> Kind:
        return replace(kind, values={index: numbers})

    def is_right_alone(numbers: Numbers) -> bool:
        return trials.is_right_alone(with_numbers(numbers))

    for candidate in candidate_sets(read_numbers(trials.small, scope), sorted(widths), problem.degree, units):
        if is_right_alone(candidate) and trials.may_be_right(with_numbers(candidate)):
            fewest = _fewest(candidate, is_right_alone)
            return fewest if fewest == candidate or trials.may_be_right(with_numbers(fewest)) else candidate
    return None


def _alone(trace: BlockTrace) -> Reference | None:
    """What a block does by itself; None where it does something else then than in the model."""
    try:
        found = reference_of(trace.module, trace.call)
    except Exception:  # whatever a foreign forward raises
        return None
    return found if found.logits.shape[:1] == trace.exit.shape[:1] else None


@dataclass(frozen=True)
class _Trials:
    """A kind of block with some of it split, tried on the block alone and in the small model.

    The block alone costs a fraction of the model, and most candidates fail in it already. What is right in it is right
    in the model but for a few: regions are tried there all together, and one by one only where that fails.

    Attributes:
        alone: what the block does by itself; None where that is another thing than in the model, or not asked for.
        one_by_one: try each region in the model, too.
    """

    small: nn.Module
    structure: Structure
    want: Reference
    alone: Reference | None = None
    one_by_one: bool = False

    def of_block(self, trace: BlockTrace) -> _Trials:
        """With what the block does by itself now: one that keeps what its last run left does another thing later."""
        return replace(self, alone=_alone(trace))

    def is_right_alone(self, kind: Kind) -> bool:
        if self.alone is None:
            return self.are_right([kind])
        table = self._table(kind)
        return runs(kind.trace.module, table, self.alone.call) and self._holds(kind.trace.module, table, self.alone)

    def may_be_right(self, kind: Kind) -> bool:
        """Of one that is right alone: whether it is in the model, unless that is found out later."""
        return (not self.one_by_one and self.alone is not None) or self.are_right([kind])

    def are_right(self, kinds: Sequence[Kind | None]) -> bool:
        """Whether the model with all of these split at once is that of one process; with None among them it is not."""
        tables: dict[Signature, ShardingTable] = {}
        for kind in kinds:
            if kind is None:
                return False
            tables[signature(kind.trace.module)] = self._table(kind)
        if not tables:
            return True
        table = spread(self.small, self.structure, tables, next(iter(tables.values())).degree, {})
        return runs(self.small, table, self.want.call) and self._holds(self.small, table, self.want)

    def _table(self, kind: Kind) -> ShardingTable:
        return relative_table(kind, self.small, None)

    @staticmethod
    def _holds(module: nn.Module, table: ShardingTable, want: Reference) -> bool:
        try:
            return compare(module, table, want).error <= PROOF
        except Exception:  # a forward that insists on another shape
            return False


def _fewest(found: Numbers, is_right: Callable[[Numbers], bool]) -> Numbers:
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
