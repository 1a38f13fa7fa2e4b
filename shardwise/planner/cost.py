"""Time and memory of one configuration, by named terms that sum to the total."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.planner.collectives import send_seconds
from shardwise.planner.compute import Passes, Terms, add_terms, part_passes, rank_tokens, scale_terms, total
from shardwise.planner.data import data_seconds, exposed, optimizer_seconds, sharded_terms, tied_seconds
from shardwise.planner.halves import deferred_seconds, stage_waiting_seconds
from shardwise.planner.layout import Layout, Work
from shardwise.planner.memory import rank_memory
from shardwise.planner.parts import Placed, stage_parts
from shardwise.planner.simulate import Timeline, short_lists, simulate_schedule
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.schedule import splits_backward


@dataclass(frozen=True)
class Estimate:
    """What a configuration costs.

    Args:
        time_terms: seconds of an optimizer step on the pipeline rank that ends it, by what they are spent on.
        memory_terms: bytes of the fullest rank of each pipeline rank, by what they hold.
        bubble: share of the pipeline ranks' time in which they wait for each other.
    """

    time_terms: dict[str, float]
    memory_terms: tuple[dict[str, float], ...]
    bubble: float

    @property
    def step_seconds(self) -> float:
        return float(sum(self.time_terms.values()))

    @property
    def memory_bytes(self) -> float:
        """Of the fullest device."""
        return max(float(sum(terms.values())) for terms in self.memory_terms)


def estimate(costs: ModelCosts, cluster: ClusterSpec, layout: Layout, work: Work) -> Estimate:
    """Seconds and bytes of one optimizer step.

    Args:
        layout: one configuration (no arrays).

    Raises:
        KeyError: a tensor degree that the costs do not describe.
    """
    stages = stage_parts(costs, layout)
    known: dict[tuple[int, str], Passes] = {}
    passes = [
        _stage_passes(parts, known, layout, (work, cluster), splits_backward(layout.schedule, stage))
        for stage, parts in enumerate(stages)
    ]
    lists = short_lists(layout.schedule, layout.pp, int(layout.num_micro_batches), layout.virtual_stages)
    memory = tuple(
        rank_memory([stages[s] for s in layout.stages_of(rank)], actions, layout, work, cluster)
        for rank, actions in lists.items()
    )
    halves = layout.schedule == "zero_bubble"
    waiting = [stage_waiting_seconds(parts, layout, work, cluster) for parts in stages] if halves else []
    timeline = _timeline(costs, (passes, waiting), layout, work, cluster)
    tied = float(tied_seconds(costs, layout, work, cluster))
    rank, data, optimizer = _deciding_rank(timeline, stages, passes, (layout, work, cluster), tied)
    own = [passes[stage] for stage in layout.stages_of(rank)]
    computed = [scale_terms(add_terms(p.forward, p.backward), layout.num_micro_batches) for p in own]
    again = sum(total(p.again) for p in own) * layout.num_micro_batches
    terms = {**add_terms(*computed), "recompute": again}
    terms, bubble = _with_waiting(terms, timeline, rank, cluster.chip.shared)
    terms["data"] = terms.get("data", 0.0) + data
    terms["optimizer"] = optimizer
    return Estimate({name: float(value) for name, value in terms.items()}, memory, bubble)


def _with_waiting(terms: Terms, timeline: Timeline, rank: int, shared: float) -> tuple[Terms, float]:
    """The terms of a rank with its ``bubble``, and the share of all ranks' time in which they wait.

    Ranks that share cores (``shared`` > 1) leave theirs to the others while they wait. The step then lasts as long as
    all work together, or as long as its longest chain does with a core for each rank, whichever is more; a rank with
    more work than the others is not slower by it.
    """
    finish, busy = timeline.finish[rank], timeline.busy[rank]
    if shared <= 1:
        return {**terms, "bubble": finish - busy}, timeline.bubble
    average = sum(timeline.busy) / len(timeline.busy)
    seconds = max(timeline.seconds / shared, average)
    if seconds < busy:
        terms = scale_terms(terms, seconds / busy)
    return {**terms, "bubble": max(seconds - busy, 0.0)}, 1 - average / seconds if seconds else 0.0


def _stage_passes(
    parts: Sequence[Placed],
    known: dict[tuple[int, str], Passes],
    layout: Layout,
    on: tuple[Work, ClusterSpec],
    in_halves: bool,
) -> Passes:
    """Seconds of one micro-batch through a stage; ``known`` keeps those of parts that other stages hold too."""
    work, cluster = on
    sums: tuple[list[Terms], list[Terms], list[Terms]] = ([], [], [])
    for placed in parts:
        part, times, level = placed
        one = known.get((id(part), level))
        if one is None:
            one = known[id(part), level] = _placed_passes(placed, layout, work, cluster)
        for terms, own in zip(sums, (one.forward, one.backward, one.again), strict=True):
            terms.append(scale_terms(own, times))
    if layout.pp > 1:
        host = {"pipeline": work.host.stage_pass * cluster.chip.kernel_seconds}
        for terms in sums[:2]:
            terms.append(host)
    if in_halves:
        sums[1].append({"pipeline": sum(times * deferred_seconds(part, work, cluster) for part, times, _ in parts)})
    return Passes(*(add_terms(*terms) for terms in sums))


def _placed_passes(placed: Placed, layout: Layout, work: Work, cluster: ClusterSpec) -> Passes:
    """Seconds of one part; under ZeRO-3 with what of its traffic compute does not hide."""
    part, _, level = placed
    one = part_passes(part, replace(layout, recompute=level), work, cluster)
    if layout.zero != 3:
        return one
    gather, gather_and_sum = sharded_terms((part, 1, level), layout, work, cluster)
    forward = exposed(gather, total(one.forward), work.overlap_data)
    backward = exposed(gather_and_sum, total(one.backward) + total(one.again), work.overlap_data)
    return Passes({**one.forward, "data": forward}, {**one.backward, "data": backward}, one.again)


def _timeline(
    costs: ModelCosts,
    stages: tuple[Sequence[Passes], Sequence[float]],
    layout: Layout,
    work: Work,
    cluster: ClusterSpec,
) -> Timeline:
    passes, waiting = stages
    size = rank_tokens(layout, work) * costs.hidden_size * work.compute_bytes
    if layout.sequence_parallel:
        size = size / layout.tp
    stride = layout.tp * layout.cp * layout.dp

    def send(first: int, second: int) -> float:
        return send_seconds(size, first * stride, second * stride, cluster)

    forward = [float(total(p.forward)) for p in passes]
    backward = [float(total(p.backward) + total(p.again)) for p in passes]
    return simulate_schedule(
        layout.schedule, int(layout.num_micro_batches), layout.virtual_stages, (forward, backward, waiting), send
    )


def _deciding_rank(
    timeline: Timeline,
    stages: Sequence[Sequence[Placed]],
    passes: Sequence[Passes],
    on: tuple[Layout, Work, ClusterSpec],
    tied: float,
) -> tuple[int, float, float]:
    """The pipeline rank that ends the step, and its seconds of data traffic and of the optimizer.

    Args:
        tied: seconds in which the first and the last rank sum the gradient of a weight that both hold.
    """
    layout, work, cluster = on
    found = (-1.0, 0, 0.0, 0.0)
    for rank in range(layout.pp):
        parts = [placed for stage in layout.stages_of(rank) for placed in stages[stage]]
        own = [passes[stage] for stage in layout.stages_of(rank)]
        data = tied if rank in (0, layout.pp - 1) else 0.0
        if layout.zero != 3 or work.ours:
            sums, gathers = data_seconds(parts, layout, work, cluster)
            beside = sum(total(p.backward) + total(p.again) for p in own)
            # Replicas' gradients are summed at the end where backward passes run in halves.
            beside_backward = work.overlap_data and not (layout.zero == 0 and splits_backward(layout.schedule, rank))
            data += exposed(sums, beside, beside_backward)
            if layout.zero != 3:
                data += exposed(gathers, sum(total(p.forward) for p in own), work.overlap_data)
        optimizer = optimizer_seconds(parts, layout, work, cluster)
        found = max(found, (timeline.finish[rank] + data + optimizer, rank, data, optimizer))
    return found[1], float(found[2]), float(found[3])
