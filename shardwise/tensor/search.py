"""The best table of a block: which of its regions are split, and what that makes of each product.

Every region between products has one *mode*: ``WHOLE`` (all ranks hold the same, and whole gradients), ``SHARES``
(the same values, but each rank's gradient is a share, since what follows takes a part), ``SPLIT`` (each rank holds
its part of the features), ``SLICED`` (its part of the sequence, all features). The block's own input and result are
whole, or sliced where the residual stream is cut along the sequence: what reads them is then gathered, with shares of
its gradient, and what writes to them is scattered. The modes before and behind a product leave it
a few styles; each has a price, in elements that a rank moves for each token, and in weights that stay whole. The sum
of the prices is minimised exactly, by dynamic programming over the products in the order in which they run: the state
is the modes of the regions that are still open, and the groups that have paid for their input's gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from shardwise.tensor.parts import Parts
from shardwise.tensor.regions import Region
from shardwise.tensor.table import ModuleSplit, Style

# A square matrix that stays whole counts as much as 6 elements moved for each of its rows and tokens: more than any way
# to cut it costs that shares the sum of an input's gradient with others, less than cutting a narrow matrix alone does
# (the latent projections of DeepSeek, routers).
_WHOLE_PRICE = 6.0


class Mode(IntEnum):
    """How ranks hold the tensors of a region."""

    WHOLE = 0
    SHARES = 1
    SPLIT = 2
    SLICED = 3


@dataclass(frozen=True)
class Sizes:
    """Of a product in the real model: features in and out, and its parameters.

    ``even``: whether the ranks divide its features in and out, here and in the small copy that proves the table.
    """

    inputs: int
    outputs: int
    parameters: int
    even: tuple[bool, bool] = (True, True)


@dataclass(frozen=True)
class Choice:
    """One way to run a product.

    Args:
        split: its entry in the table, None where it is replicated.
        partial: replicated, and each rank's gradient is a share.
        whole: parameters that stay whole.
        forward: elements that a rank moves for each token at ring cost, in units of (p - 1) / p.
        backward: the same of the backward pass, the sum of the input's gradient left out.
        sums_input: whether the gradient of its input is summed over the ranks, once for its group.
    """

    split: ModuleSplit | None
    partial: bool
    whole: int
    forward: float
    backward: float
    sums_input: bool

    @property
    def moved(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Problem:
    """A block to be split.

    Args:
        products: names in the order in which they run.
        sizes: of each, in the real model.
        groups: product -> name of the group of products that read the same tensor.
        regions: of the block.
        stacks: products that are stacks of experts, those of them that can be cut mapped to True.
        degree: of tensor parallel.
        hidden_size: features of the block's input.
        forced: region -> the mode that it must have.
        sequence: whether the residual stream is cut along the sequence.
    """

    products: Sequence[str]
    sizes: Mapping[str, Sizes]
    groups: Mapping[str, str]
    regions: Sequence[Region]
    stacks: Mapping[str, bool]
    degree: int
    hidden_size: int
    forced: Mapping[int, Mode] = field(default_factory=dict)
    sequence: bool = False

    def region_before(self, product: str) -> int:
        return next(i for i, region in enumerate(self.regions) if product in region.sinks)

    def region_behind(self, product: str) -> int | None:
        """None where nothing with a gradient reads its result."""
        return next((i for i, region in enumerate(self.regions) if product in region.sources), None)

    def redundancy(self, region: int, mode: Mode) -> float:
        """The price of a region that every rank computes whole, and keeps for the backward pass: twice its inputs."""
        if mode is Mode.SPLIT or self.regions[region].is_residual:
            return 0.0
        return 2.0 * sum(self.sizes[source].outputs for source in self.regions[region].sources if source in self.sizes)

    def modes(self, region: int) -> tuple[Mode, ...]:
        """The modes that a region can have."""
        if region in self.forced:
            return (self.forced[region],)
        if self.regions[region].is_residual:
            return (Mode.SLICED,) if self.sequence else (Mode.WHOLE,)
        if self.regions[region].reads_outside and not self.sequence:
            return (Mode.WHOLE,)
        # Of what was gathered along the sequence each rank's gradient is a share.
        whole = (Mode.SHARES,) if self.sequence else (Mode.WHOLE, Mode.SHARES)
        return (*whole, Mode.SPLIT) if self.regions[region].splittable else whole


@dataclass(frozen=True)
class Solution:
    """The modes of the regions and the choice for each product."""

    modes: tuple[Mode, ...]
    choices: Mapping[str, Choice]
    price: float


@dataclass(frozen=True)
class _Place:
    """How a product stands between its two regions.

    Args:
        narrow: it reads its part of the features.
        chunks: the parts of its result, where what follows is split by it.
        is_share: it reads whole features, of whose gradient each rank has a share.
        gives_share: of its result's gradient each rank has a share.
    """

    narrow: bool
    chunks: Parts | None
    is_share: bool
    gives_share: bool


def choices(problem: Problem, product: str, before: Mode, behind: Mode) -> Iterator[Choice]:
    """The ways to run ``product`` between two regions of these modes; none where they cannot meet."""
    index = problem.region_behind(product)
    chunked = {} if index is None or behind is not Mode.SPLIT else problem.regions[index].chunked
    narrow = before is Mode.SPLIT and product in problem.regions[problem.region_before(product)].narrow
    chunks = chunked.get(product)
    if problem.sequence:
        is_stack = product in problem.stacks
        pick = _sliced_stack_choices if is_stack else _sliced_choices
        return pick(problem, product, _Sliced(before is Mode.SLICED, behind is Mode.SLICED, narrow, chunks))
    place = _Place(
        narrow=narrow,
        chunks=chunks,
        is_share=before is not Mode.WHOLE and not narrow,
        gives_share=behind is not Mode.WHOLE and chunks is None,
    )
    if product in problem.stacks:
        return _stack_choices(problem, product, place)
    return _linear_choices(problem, product, place)


def _stack_choices(problem: Problem, product: str, place: _Place) -> Iterator[Choice]:
    sizes = problem.sizes[product]
    if place.narrow or place.chunks is not None or place.is_share is not place.gives_share:
        return
    yield Choice(None, place.is_share, sizes.parameters, 0.0, 0.0, False)
    if problem.stacks[product] and not place.is_share:
        yield Choice(ModuleSplit(Style.EXPERTS), False, 0, 2.0 * sizes.outputs, 2.0 * sizes.inputs, False)


def _linear_choices(problem: Problem, product: str, place: _Place) -> Iterator[Choice]:
    sizes, key = problem.sizes[product], "" if place.is_share else problem.groups[product]
    outs, own, degree = sizes.outputs, sizes.parameters, problem.degree
    sums_input = not place.is_share
    if place.narrow:
        if place.chunks is None and not place.gives_share:
            yield Choice(ModuleSplit(Style.ROW), False, 0, 2.0 * outs, 0.0, False)
    elif place.chunks is not None:
        parts, whole = _cut(place.chunks, sizes, degree)
        yield Choice(ModuleSplit(Style.COLUMN, parts, key), False, whole, 0.0, 0.0, sums_input)
    elif place.is_share and not place.gives_share:
        if sizes.even[0]:
            yield Choice(ModuleSplit(Style.ROW_SPLIT), False, 0, 2.0 * outs, 0.0, False)
    else:
        if place.is_share is place.gives_share:
            yield Choice(None, place.is_share, own, 0.0, 0.0, False)
        else:
            yield Choice(ModuleSplit(Style.SUM_OUTPUT), False, own, 0.0, 2.0 * outs, False)
        if sizes.even[1]:
            gathered = ModuleSplit(Style.COLUMN_GATHER, group=key, shares=place.gives_share)
            back = 1.0 * outs if place.gives_share else 0.0
            yield Choice(gathered, False, 0, 1.0 * outs, back, sums_input)


def _cut(chunks: Parts, sizes: Sizes, degree: int) -> tuple[Parts, int]:
    """The parts of a table's entry, and the parameters that a rank holds beyond its share: others hold them too."""
    extra = sum(part.size - part.size * part.units // degree for part in chunks if part.units)
    total = sum(part.size for part in chunks)
    return chunks if len(chunks) > 1 or chunks[0].units else (), sizes.parameters * extra // max(total, 1)


@dataclass(frozen=True)
class _Sliced:
    """How a product stands where the residual stream is cut along the sequence.

    Args:
        reads: it reads the residual stream; ``writes``: its result enters it.
        narrow: it reads its part of the features.
        chunks: how its result is chunked, where what follows is split by it.
    """

    reads: bool
    writes: bool
    narrow: bool
    chunks: Parts | None


def _sliced_stack_choices(problem: Problem, product: str, place: _Sliced) -> Iterator[Choice]:
    sizes = problem.sizes[product]
    if place.reads and place.writes:
        yield Choice(None, True, sizes.parameters, 0.0, 0.0, False)
        if problem.stacks[product]:
            moved = 1.0 * (sizes.inputs + sizes.outputs)
            yield Choice(ModuleSplit(Style.EXPERTS, sequence=True), False, 0, moved, moved, False)


def _sliced_choices(problem: Problem, product: str, place: _Sliced) -> Iterator[Choice]:
    sizes, gathers = problem.sizes[product], place.reads and not place.writes
    outs, own = sizes.outputs, sizes.parameters
    if place.writes and place.reads:
        yield Choice(None, True, own, 0.0, 0.0, False)  # token by token, on this rank's positions
    elif place.narrow:
        if place.writes:
            yield Choice(ModuleSplit(Style.ROW, sequence=True), False, 0, 1.0 * outs, 1.0 * outs, False)
    elif place.writes:
        yield Choice(ModuleSplit(Style.SLICE), False, own, 0.0, 0.0, False)
        if sizes.even[0]:
            yield Choice(ModuleSplit(Style.ROW_SPLIT, sequence=True), False, 0, 1.0 * outs, 1.0 * outs, False)
    elif place.chunks is not None:
        parts, whole = _cut(place.chunks, sizes, problem.degree)
        yield Choice(ModuleSplit(Style.COLUMN, parts), False, whole, 0.0, 0.0, gathers)
    else:
        yield Choice(None, True, own, 0.0, 0.0, gathers)
        if sizes.even[1]:
            gathered = ModuleSplit(Style.COLUMN_GATHER, shares=True)
            yield Choice(gathered, False, 0, 1.0 * outs, 1.0 * outs, gathers)


def price(problem: Problem, choice: Choice) -> float:
    """The price of a choice, the sum of its group's input gradient left out."""
    return choice.moved + _WHOLE_PRICE * choice.whole / problem.hidden_size


_State = tuple[tuple[tuple[int, Mode], ...], frozenset[str]]  # modes of open regions, groups that have paid
_Best = tuple[float, dict[int, Mode], dict[str, Choice]]  # price, modes and choices so far


def solve(problem: Problem) -> Solution:
    """The cheapest modes and choices, by dynamic programming.

    Raises:
        ValueError: forced modes that no choice fits.
    """
    last = last_uses(problem)
    states: dict[_State, _Best] = {((), frozenset()): (0.0, {}, {})}
    for position, product in enumerate(problem.products):
        grown: dict[_State, _Best] = {}
        for (open_modes, paid), (so_far, modes, chosen) in states.items():
            for more, before, behind in assignments(problem, product, dict(open_modes)):
                opened = so_far + sum(problem.redundancy(r, m) for r, m in more.items())
                for choice in choices(problem, product, before, behind):
                    group = problem.groups[product]
                    cost, now_paid = opened + price(problem, choice), paid
                    if choice.sums_input and group not in paid:
                        cost, now_paid = cost + 2.0 * problem.sizes[product].inputs, paid | {group}
                    known = dict(open_modes) | more
                    still = tuple(sorted((r, m) for r, m in known.items() if last[r] > position))
                    key = still, frozenset(g for g in now_paid if last[g] > position)
                    if key not in grown or cost < grown[key][0]:
                        grown[key] = cost, modes | more, chosen | {product: choice}
        states = grown
    cost, modes, chosen = min(states.values(), key=lambda value: value[0])
    return Solution(tuple(modes.get(i, Mode.WHOLE) for i in range(len(problem.regions))), chosen, cost)


def enumerate_all(problem: Problem) -> Solution:
    """The same by trying every combination; for a few regions, as the oracle of :func:`solve`."""
    best: Solution | None = None
    for modes, picked in combinations(problem):
        paid = {problem.groups[p]: problem.sizes[p].inputs for p, choice in picked.items() if choice.sums_input}
        cost = sum(price(problem, choice) for choice in picked.values()) + 2.0 * sum(paid.values())
        cost += sum(problem.redundancy(r, m) for r, m in enumerate(modes))
        if best is None or cost < best.price:
            best = Solution(modes, picked, cost)
    assert best is not None
    return best


def combinations(problem: Problem) -> Iterator[tuple[tuple[Mode, ...], dict[str, Choice]]]:
    """Every mode of all regions, with every choice of all products that goes with it."""
    for modes in itertools.product(*(problem.modes(i) for i in range(len(problem.regions)))):
        options = []
        for product in problem.products:
            behind = problem.region_behind(product)
            mode_behind = Mode.WHOLE if behind is None else modes[behind]
            options.append(list(choices(problem, product, modes[problem.region_before(product)], mode_behind)))
        for picked in itertools.product(*options):
            yield modes, dict(zip(problem.products, picked, strict=True))


def last_uses(problem: Problem) -> dict[int | str, int]:
    """The position of the last product that a region, or a group, has to do with."""
    last: dict[int | str, int] = dict.fromkeys(range(len(problem.regions)), -1)
    for position, product in enumerate(problem.products):
        last[problem.region_before(product)] = position
        last[problem.groups[product]] = position
        behind = problem.region_behind(product)
        if behind is not None:
            last[behind] = position
    return last


def assignments(
    problem: Problem, product: str, known: Mapping[int, Mode]
) -> Iterator[tuple[dict[int, Mode], Mode, Mode]]:
    """Modes for the two regions of ``product``: those that it opens, the one before it, the one behind it."""
    before, behind = problem.region_before(product), problem.region_behind(product)
    regions = [r for r in dict.fromkeys((before, behind)) if r is not None and r not in known]
    for modes in itertools.product(*(problem.modes(r) for r in regions)):
        more = dict(zip(regions, modes, strict=True))
        every = {**known, **more}
        yield more, every[before], Mode.WHOLE if behind is None else every[behind]
