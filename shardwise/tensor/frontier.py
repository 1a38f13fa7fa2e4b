"""All tables of a block that are worth having: none leaves less whole and moves less at once.

:func:`shardwise.tensor.search.solve` weighs the weights that stay whole against the elements that are moved at one
fixed price. What is worth more depends on the links and on the memory, so here both are kept apart: the same dynamic
program, with the list of sums that no other beats (the Pareto frontier) in the place of the cheapest one.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

from shardwise.tensor.search import Choice, Mode, Problem, Solution, assignments, choices, last_uses, price

MOST_POINTS = 128  # of a block, and of a state on the way to it
_ROUNDING = 1e-9

T = TypeVar("T")
_Key = tuple[tuple[tuple[int, Mode], ...], frozenset[str]]  # modes of open regions, groups that have paid


class _Trail(NamedTuple):
    """The last step to a sum, and those before it."""

    before: _Trail | None
    modes: Mapping[int, Mode]
    product: str
    choice: Choice


class _Sum(NamedTuple):
    """Weights that stay whole, elements moved for a token, and what every rank computes whole (settles ties)."""

    whole: int
    moved: float
    redundancy: float
    trail: _Trail | None


def solve_frontier(problem: Problem, most: int = MOST_POINTS) -> list[Solution]:
    """The solutions that no other beats in both numbers, the one that leaves least whole first; at most ``most``."""
    last = last_uses(problem)
    states: dict[_Key, list[_Sum]] = {((), frozenset()): [_Sum(0, 0.0, 0.0, None)]}
    for position, product in enumerate(problem.products):
        group, grown = problem.groups[product], dict[_Key, list[_Sum]]()
        for (open_modes, paid), sums in states.items():
            for more, before, behind in assignments(problem, product, dict(open_modes)):
                opened = sum(problem.redundancy(r, m) for r, m in more.items())
                still = tuple(sorted((r, m) for r, m in (dict(open_modes) | more).items() if last[r] > position))
                for choice in choices(problem, product, before, behind):
                    moved, now_paid = choice.moved, paid
                    if choice.sums_input and group not in paid:
                        moved, now_paid = moved + 2.0 * problem.sizes[product].inputs, paid | {group}
                    key = still, frozenset(g for g in now_paid if last[g] > position)
                    grown.setdefault(key, []).extend(
                        _Sum(s.whole + choice.whole, s.moved + moved, s.redundancy + opened, trail)
                        for s in sums
                        for trail in [_Trail(s.trail, more, product, choice)]
                    )
        states = {key: thinned(unbeaten(sums, _numbers), most, _numbers) for key, sums in grown.items()}
    ended = [one for sums in states.values() for one in sums]
    return [_solution(problem, one) for one in thinned(unbeaten(ended, _numbers), most, _numbers)]


def _numbers(one: _Sum) -> tuple[float, float, float]:
    return one.whole, one.moved, one.redundancy


def _solution(problem: Problem, one: _Sum) -> Solution:
    modes: dict[int, Mode] = {}
    chosen: dict[str, Choice] = {}
    trail = one.trail
    while trail is not None:
        modes |= trail.modes
        chosen[trail.product] = trail.choice
        trail = trail.before
    ordered = {product: chosen[product] for product in problem.products}
    whole = sum(price(problem, choice) - choice.moved for choice in ordered.values())
    every = tuple(modes.get(index, Mode.WHOLE) for index in range(len(problem.regions)))
    return Solution(every, ordered, whole + one.moved + one.redundancy)


def unbeaten(points: Iterable[T], numbers: Callable[[T], tuple[float, ...]]) -> list[T]:
    """The points that no other beats in the first two of their numbers, in the order of the first.

    Of several alike in both the one that is least in what follows.
    """
    kept: list[T] = []
    least = float("inf")
    for (_, second, *_), point in sorted(((numbers(point), point) for point in points), key=itemgetter(0)):
        if second < least - _ROUNDING:
            kept.append(point)
            least = second
    return kept


def thinned(points: Sequence[T], most: int, numbers: Callable[[T], tuple[float, ...]]) -> list[T]:
    """At most ``most`` of the points of a frontier, the ends among them.

    One by one that point is left out whose next ones stand in for it best: it spares the smallest corner between them.
    A heap holds the corners; one that has changed since is met again, and passed over.
    """
    surplus = len(points) - max(most, 2)
    if surplus <= 0:
        return list(points)
    places = [numbers(point) for point in points]
    before, after = list(range(-1, len(points) - 1)), list(range(1, len(points) + 1))

    def corner(index: int) -> float:
        return (places[after[index]][0] - places[index][0]) * (places[before[index]][1] - places[index][1])

    corners = {index: corner(index) for index in range(1, len(points) - 1)}
    heap = [(size, index) for index, size in corners.items()]
    heapq.heapify(heap)
    while surplus:
        size, index = heapq.heappop(heap)
        if corners.get(index) != size:
            continue
        del corners[index]
        surplus -= 1
        before[after[index]], after[before[index]] = before[index], after[index]
        for other in (before[index], after[index]):
            if other in corners:
                corners[other] = corner(other)
                heapq.heappush(heap, (corners[other], other))
    return [point for index, point in enumerate(points) if index in corners or index in (0, len(points) - 1)]
