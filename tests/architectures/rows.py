"""What is kept of an architecture's findings, and what it counts as."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tests.architectures.hybrid import ONE_LENGTH
from tests.architectures.survey import Finding
from tests.architectures.tensor import (
    CHEAPER,
    NONE_PUBLISHED,
    NOT_RIGHT,
    NOT_SPLIT,
    SAME,
    TRADE,
    WORSE,
    Count,
    TensorFinding,
    verdict,
)
from tests.architectures.true_sizes import FIRST, OFFERED, UNCOUNTED

EXACT, REPEATED = "exact", "do not run once each"
NOT_EXAMINED = "not examined"
_LONGEST = 160
_COUNTS = ("own", "published", "offered")


@dataclass
class Row:
    """One architecture.

    Args:
        model: class of the small copy; empty where none is built.
        builds: ``ok``, or why no small copy is built or run.
        causal: whether a token's logits are independent of what follows it: a decoder.
        tensor: one of the verdicts of :mod:`tests.architectures.tensor`; ``why`` it is not split.
        whole, moved: of the table, on two ranks; those of the published plan likewise, None where none is published.
        true_sizes: which table stands for the published plan at the sizes of the real model.
        offered: whether an alternative of the search leaves no more whole and moves no more than the published plan,
            where the table does not; ``offered_whole``, ``offered_moved``: of that.
        seconds: of CPU, for the search of one kind of block.
        pipeline, hybrid: ``exact``, a refusal or a difference.
    """

    model: str = ""
    builds: str = "ok"
    causal: bool = True
    tensor: str = SAME
    why: str = ""
    whole: float = 0.0
    moved: float = 0.0
    published: bool = True
    published_whole: float = 0.0
    published_moved: float = 0.0
    true_sizes: str = UNCOUNTED
    offered: bool = False
    offered_whole: float = 0.0
    offered_moved: float = 0.0
    seconds: float = 0.0
    pipeline: str = EXACT
    hybrid: str = EXACT

    @property
    def counts(self) -> bool:
        """Whether it is a decoder-only language model of which a small copy runs: of those are the bars."""
        return self.builds == "ok" and self.causal


def row_of(pipeline: dict[str, Any], split: dict[str, Any], both: dict[str, Any] | None) -> Row:
    """The row of three findings as plain data; the last may be missing."""
    cut = Finding(**pipeline)
    row = Row(
        model=cut.class_name,
        builds="ok" if cut.runs else short(cut.builds if cut.builds != "ok" else cut.forward),
        causal=cut.causal,
        pipeline=short(cut.pipeline if cut.structure == "ok" else cut.structure),
        hybrid=NOT_EXAMINED if both is None else short(both["result"]),
    )
    return with_split(row, split)


def with_split(row: Row, split: dict[str, Any]) -> Row:
    """A row with what the survey of the tensor split finds."""
    counts = {name: None if split.get(name) is None else Count(**split[name]) for name in _COUNTS}
    found = TensorFinding(**(split | counts))
    theirs, other = found.published or Count(0.0, 0.0), found.offered or Count(0.0, 0.0)
    reasons = [found.result] if found.result != "ok" else list(dict.fromkeys(found.refused.values()))
    return replace(
        row,
        tensor=verdict(found),
        why=short("; ".join(reasons)) if verdict(found) == NOT_SPLIT else "",
        whole=round(found.own.whole, 4),
        moved=found.own.moved,
        published=found.published is not None,
        published_whole=round(theirs.whole, 4),
        published_moved=theirs.moved,
        true_sizes=found.true_sizes,
        offered=found.offered is not None,
        offered_whole=round(other.whole, 4),
        offered_moved=other.moved,
        seconds=found.seconds,
    )


def short(text: str) -> str:
    """A reason in one line of a table."""
    text = " ".join(text.split()).replace("|", "/")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def bars(rows: Mapping[str, Row]) -> dict[str, tuple[int, int]]:
    """Bar -> how many of how many meet it."""
    counted = [row for row in rows.values() if row.counts]
    published = [row for row in counted if row.published]
    none = [row for row in counted if not row.published]
    repeated = [row for row in counted if REPEATED in row.pipeline]
    return {
        "builds": (sum(row.builds == "ok" for row in rows.values()), len(rows)),
        "published": (sum(row.tensor in (SAME, CHEAPER) for row in published), len(published)),
        "offered": (sum(row.offered or row.tensor in (SAME, CHEAPER) for row in published), len(published)),
        "true sizes": (sum(row.true_sizes in (FIRST, OFFERED) for row in published), len(published)),
        "first at true sizes": (sum(row.true_sizes == FIRST for row in published), len(published)),
        "no more whole": (sum(row.tensor in (SAME, CHEAPER, TRADE) for row in published), len(published)),
        "split without": (sum(row.tensor == NONE_PUBLISHED for row in none), len(none)),
        "pipeline": (sum(row.pipeline == EXACT for row in counted) + len(repeated), len(counted)),
        "hybrid": (sum(row.hybrid in (EXACT, ONE_LENGTH) or REPEATED in row.pipeline for row in counted), len(counted)),
    }


VERDICTS = (SAME, CHEAPER, TRADE, WORSE, NOT_RIGHT, NONE_PUBLISHED, NOT_SPLIT)
