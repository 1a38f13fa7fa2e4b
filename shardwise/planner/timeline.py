"""When each pass of a plan's pipeline runs, to be drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.planner.compute import part_passes, total
from shardwise.planner.job import Candidate, Job
from shardwise.planner.parts import stage_parts
from shardwise.planner.simulate import simulate
from shardwise.spec.schedule import action_lists

_MOST_ROUNDS = 3  # of as many micro-batches as pipeline ranks: enough to see the rhythm


class Pass(NamedTuple):
    """One pass of a micro-batch through a stage, in seconds from the start of the step."""

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


def timeline(job: Job, candidate: Candidate) -> list[Pass]:
    """The passes of a step's first micro-batches, without what is sent between stages."""
    number = min(candidate.num_micro_batches(job.rows), _MOST_ROUNDS * candidate.pp)
    layout = candidate.layout(job.rows)
    seconds: tuple[list[float], list[float]] = ([], [])
    for parts in stage_parts(job.costs, layout):
        forward = backward = 0.0
        for part, times, level in parts:
            one = part_passes(part, replace(layout, recompute=level), job.work, job.cluster)
            forward += times * float(total(one.forward))
            backward += times * float(total(one.backward) + total(one.again))
        seconds[0].append(forward)
        seconds[1].append(backward)
    lists = action_lists(candidate.schedule, candidate.pp, number, candidate.virtual_stages)
    ends = simulate(lists, *seconds, lambda first, second: 0.0).ends
    passes = []
    for rank, actions in lists.items():
        for stage, kind, micro_batch in actions:
            backward_pass = int(kind == "backward")
            end = ends[backward_pass][stage][micro_batch]
            passes.append(Pass(rank, stage, kind, micro_batch, end - seconds[backward_pass][stage], end))
    return passes
