"""A published plan beside the tables of the search at the sizes of the real model, where no rank is executed.

What a table moves follows from its styles and from the widths of its modules. That this counts right is checked on the
small copy, where both tables are executed: what one moves beyond the other must be what the styles say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What stands for the published plan: the first table, one that is offered beside it, none of them; or not known.
FIRST, OFFERED, NO_TABLE, UNCOUNTED = "first", "offered", "none", "not counted"
Widths = Mapping[str, tuple[int, int]]  # module -> features in, features out


@dataclass(frozen=True)
class TrueCount:
    """Parameters of the blocks that stay whole, and elements that a rank moves for a token of a pass, in rings."""

    whole: int
    moved: float

    def no_more_than(self, other: TrueCount) -> bool:
        """Of neither more."""
        return self.whole <= other.whole and self.moved <= other.moved * (1 + 1e-9)


@dataclass(frozen=True)
class Judgement:
    """Both at true sizes.

    Args:
        own: of the first table; ``offered``: of a table that is offered, proven, and neither leaves nor moves more
            than the published plan, None where there is none or where the first does.
    """

    own: TrueCount
    published: TrueCount
    offered: TrueCount | None = None

    @property
    def table(self) -> str:
        """Which table neither leaves nor moves more."""
        if self.own.no_more_than(self.published):
            return FIRST
        return NO_TABLE if self.offered is None else OFFERED


def at_true_sizes(search: Any, own: Any, published: Any, beyond: float, tokens: int) -> str:
    """Which table of ``search`` stands for the ``published`` plan in the real model.

    Args:
        own, published: the tables on the small copy.
        beyond: elements that the published one moved there beyond the other, in a pass of ``tokens`` tokens.
    """
    if not counted_alike(search, published, own, beyond, tokens):
        return UNCOUNTED
    return judge(search, published).table


def moved_by_styles(table: Any, block: str, widths: Widths) -> float:
    """Elements for each token of one pass of a block, forward and backward, in units of (p - 1) / p."""
    from shardwise.tensor.table import Style

    groups: dict[str, int] = {}
    moved = 0.0
    for name, split in table.modules.items():
        if not name.startswith(f"{block}."):
            continue
        inputs, outputs = widths[name]
        if split.style in (Style.ROW, Style.ROW_SPLIT, Style.SUM_OUTPUT):
            moved += 2.0 * outputs
        elif split.style is Style.EXPERTS:
            moved += 2.0 * (inputs + outputs)
        elif split.style is Style.COLUMN_GATHER:
            moved += (1.0 + split.shares) * outputs
        if split.style in (Style.COLUMN, Style.COLUMN_GATHER) and split.group:
            groups[split.group] = inputs
    return moved + 2.0 * sum(groups.values())


def counted_alike(search: Any, first: Any, second: Any, beyond: float, tokens: int) -> bool:
    """Whether what ``first`` moves beyond ``second`` on the executed ranks is what their styles say.

    Args:
        search: the search of both; the tables are of its small copy.
        beyond: elements, of a pass of ``tokens`` tokens.
    """
    from shardwise.tensor.trace import trace_blocks

    said = 0.0
    for trace in trace_blocks(search.small, search._small_structure.blocks):
        widths = {p.name: (p.in_features, p.out_features) for p in trace.products}
        try:
            said += moved_by_styles(first, trace.name, widths) - moved_by_styles(second, trace.name, widths)
        except KeyError:  # a module that is no product
            return False
    ring = (search.degree - 1) / search.degree
    return abs(tokens * ring * said - beyond) <= 1e-6 * max(abs(beyond), 1.0)


def judge(search: Any, published: Any) -> Judgement:
    """The published plan of a model beside the tables of its search, all at the sizes of ``search.model``."""
    from shardwise.errors import PlanError

    first, others = search.offered()
    theirs = _published(search, published)
    own = TrueCount(first.cost.whole, first.cost.forward + first.cost.backward)
    if own.no_more_than(theirs):
        return Judgement(own, theirs)
    for other in others:
        count = TrueCount(other.cost.whole, other.cost.forward + other.cost.backward)
        if not count.no_more_than(theirs):
            continue
        try:
            search.proven(other)
        except PlanError:
            continue
        return Judgement(own, theirs, count)
    return Judgement(own, theirs)


def _published(search: Any, table: Any) -> TrueCount:
    from shardwise.models.structure import find_structure
    from shardwise.tensor.kind import relative, signature

    whole, moved = 0, 0.0
    for block in search.model.get_submodule(find_structure(search.model).blocks):
        kind = search.kinds.get(signature(block))
        if kind is None:
            whole += sum(parameter.numel() for parameter in block.parameters())
            continue
        cut = {
            relative(name, kind.block)
            for name, _ in search.small.get_submodule(kind.block).named_parameters(prefix=kind.block)
            if table.is_cut(name)
        }
        whole += sum(parameter.numel() for name, parameter in block.named_parameters() if name not in cut)
        sizes = kind.problem.sizes
        moved += moved_by_styles(table, kind.block, {name: (s.inputs, s.outputs) for name, s in sizes.items()})
    return TrueCount(whole, moved * (search.degree - 1) / search.degree)
