"""When each pass of a plan's pipeline runs, to be drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.planner.compute import part_passes, total
from shardwise.planner.halves import stage_waiting_seconds
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
    seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
    for parts in stage_parts(job.of(candidate).costs, layout):
        forward = backward = 0.0
        for part, times, level in parts:
            one = part_passes(part, replace(layout, recompute=level), job.work, job.cluster)
            forward += times * float(total(one.forward))
            backward += times * float(total(one.backward) + total(one.again))
        seconds[0].append(forward)
        seconds[1].append(backward)
        halves = candidate.schedule == "zero_bubble"
        seconds[2].append(stage_waiting_seconds(parts, layout, job.work, job.cluster) if halves else 0.0)
    lists = action_lists(candidate.schedule, candidate.pp, number, candidate.virtual_stages)
    forwards, backwards, waiting = seconds
    ends = simulate(lists, forwards, backwards, lambda first, second: 0.0, waiting).ends
    passes = []
    for rank, actions in lists.items():
        for stage, kind, micro_batch in actions:
            row = {"forward": 0, "backward_weight": 2}.get(kind, 1)
            length = seconds[row][stage] - (waiting[stage] if kind == "backward_input" else 0.0)
            end = ends[row][stage][micro_batch]
            passes.append(Pass(rank, stage, kind, micro_batch, end - length, end))
    return passes
