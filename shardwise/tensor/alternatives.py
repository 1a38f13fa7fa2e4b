"""Tables of a model that leave more whole than the first one and move less: what ``strategy.tp_whole`` chooses among.

A block of each kind has its frontier; those of all kinds together make the model's, weighed by how many blocks there
are of each. Only what moves less than the first table counts as an alternative to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.structure import Structure
from shardwise.tensor.frontier import solve_frontier, thinned, unbeaten
from shardwise.tensor.kind import Kind, Signature, moves, relative_table, signature
from shardwise.tensor.search import Solution
from shardwise.tensor.table import ShardingTable, TableCost

MOST_OFFERED = 64  # alternatives of a model that a bound chooses among
MOST_NAMED = 6  # of them that a plan names
_MOST_JOINED = 512  # on the way to the model's frontier
_DIGITS = 4  # of a share that is named: rounded up, so that the bound holds the table it is named after
_ROUNDING = 1e-6
_SLACK = 1 + 1e-12  # a share that was rounded up may be rounded down again as a float


@dataclass(frozen=True)
class Alternative:
    """A choice for each kind of block, and what it costs in the whole model."""

    cost: TableCost
    kinds: Mapping[Signature, Kind]


class _Point(NamedTuple):
    whole: int
    moved: float
    forward: float
    backward: float
    chosen: tuple[Kind, ...]


def find_alternatives(
    model: nn.Module, structure: Structure, small: nn.Module, kinds: Mapping[Signature, Kind], first: TableCost
) -> list[Alternative]:
    """The frontier of the model's tables beyond the first one, the least whole first; at most ``MOST_OFFERED``.

    Args:
        model: the whole one, on meta; ``small`` its small copy.
        kinds: with the first table's choices.
        first: the cost of the first table.
    """
    if not kinds:
        return []
    blocks = list(model.get_submodule(structure.blocks).children())
    signatures = [signature(block) for block in blocks]
    alike = {key: [b for b, own in zip(blocks, signatures, strict=True) if own == key] for key in kinds}
    degree = next(iter(kinds.values())).problem.degree
    unknown = [block for block, key in zip(blocks, signatures, strict=True) if key not in kinds]
    fixed = sum(parameter.numel() for block in unknown for parameter in block.parameters())
    points = [_Point(fixed, 0.0, 0.0, 0.0, ())]
    for key, kind in kinds.items():
        own = _of_kind(kind, small, alike[key])
        points = thinned(unbeaten(_sums(points, own), _numbers), _MOST_JOINED, _numbers)
    ring = (degree - 1) / degree
    most = (first.forward + first.backward) / ring - _ROUNDING
    offered = [point for point in points if point.moved < most and point.whole < first.total]
    return [
        Alternative(
            TableCost(point.whole, first.total, ring * point.forward, ring * point.backward),
            dict(zip(kinds, point.chosen, strict=True)),
        )
        for point in thinned(offered, MOST_OFFERED, _numbers)
    ]


def _of_kind(kind: Kind, small: nn.Module, blocks: Sequence[nn.Module]) -> list[_Point]:
    """The frontier of one kind, for its ``blocks``: alike in their modules' names and classes, not in all widths."""
    sizes = [(name, parameter.numel()) for block in blocks for name, parameter in block.named_parameters()]
    found = []
    for solution in _solutions(kind):
        own = replace(kind, solution=solution)
        table = relative_table(own, small, None)
        whole = sum(size for name, size in sizes if not table.is_cut(name))
        forward, backward = (len(blocks) * moved for moved in moves(own))
        found.append(_Point(whole, forward + backward, forward, backward, (own,)))
    return unbeaten(found, _numbers)


def _solutions(kind: Kind) -> list[Solution]:
    """Of its frontier and the first table, which may be better for what the frontier does not weigh."""
    return [kind.solution, *solve_frontier(kind.problem)]


def _sums(points: Sequence[_Point], own: Sequence[_Point]) -> Iterator[_Point]:
    for one in points:
        for other in own:
            numbers = (one.whole + other.whole, one.moved + other.moved)
            yield _Point(
                *numbers, one.forward + other.forward, one.backward + other.backward, (*one.chosen, *other.chosen)
            )


def _numbers(point: _Point) -> tuple[float, float]:
    return point.whole, point.moved


def named(first: TableCost, alternatives: Sequence[Alternative]) -> tuple[TableCost, ...]:
    """What a plan names: the first table and some of the alternatives; empty where there are none."""

    costs = thinned([one.cost for one in alternatives], MOST_NAMED, _whole_and_moved)
    return (first, *costs) if costs else ()


def offered_shares(first: ShardingTable, most: int) -> list[float]:
    """Bounds that lead to some of the tables that a first table names beside itself, the least whole first."""
    return [share_of(cost) for cost in thinned(first.alternatives[1:], most, _whole_and_moved)]


def _whole_and_moved(cost: TableCost) -> tuple[float, float]:
    return cost.whole, cost.moved


def within(share: float, first: Alternative, alternatives: Sequence[Alternative], degree: int) -> list[Alternative]:
    """The tables that leave no more than a share of the blocks' parameters whole, the one that moves least first.

    Raises:
        PlanError: there is none.
    """
    every = [first, *alternatives]
    found = [one for one in every if one.cost.whole <= share * one.cost.total * _SLACK]
    if not found:
        least = share_of(min((one.cost for one in every), key=lambda cost: cost.whole))
        rule = f"{100 * least:.1f} % of the blocks' weights stay whole on each of {degree} tensor ranks at the least"
        raise PlanError(f"strategy.tp_whole = {share:g}", rule, f"Use strategy.tp_whole={least:g}, or leave it out")
    return sorted(found, key=lambda one: (one.cost.moved, one.cost.whole))


def share_of(cost: TableCost) -> float:
    """The least bound, with a few digits, within which a table of this cost is."""
    scale = 10**_DIGITS
    return math.ceil(scale * cost.whole / max(cost.total, 1)) / scale
