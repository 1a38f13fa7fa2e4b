"""What a plan would cost under the other sharding tables that its model offers, all else kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.planner.job import Job, Planned
from shardwise.planner.refine import refine


@dataclass(frozen=True)
class UnderTable:
    """A plan under the tables of one ``tp_whole`` (None: the first ones).

    Args:
        plan: None where it does not fit.
        need_bytes: of the fullest device, of the cut that needs least.
        sequence_parallel: whether the residual stream is cut along the sequence, as in the chosen plan where it can be.
    """

    tp_whole: float | None
    plan: Planned | None
    need_bytes: float
    sequence_parallel: bool


def under_other_tables(job: Job, chosen: Planned) -> list[UnderTable]:
    """The plan under each of the other tables at its tensor degree, cut and recomputed anew.

    Only the first tables are described with sequence parallel, so others are compared without.
    """
    candidate = chosen.candidate
    if candidate.tp == 1:
        return []
    found = []
    for whole, own in job.by_table.items():
        if whole == candidate.tp_whole or candidate.tp not in own.costs.legal_degrees():
            continue
        sequence = candidate.sequence_parallel and all(
            part.degree(candidate.tp).sequence is not None for part in own.costs.kinds
        )
        if candidate.sequence_parallel and not sequence and job.fixed.get("sequence_parallel"):
            continue
        other = replace(candidate, tp_whole=whole, sequence_parallel=sequence, stages=(), recomputed=-1)
        plan, need = refine(job, other)
        found.append(UnderTable(whole, plan, need, sequence))
    return found


def name_of(tp_whole: float | None) -> str:
    """How sentences call the table of one ``tp_whole``."""
    return "the table that leaves least whole" if tp_whole is None else f"the table of tp_whole={tp_whole:g}"
