"""One candidate stage by stage: where to cut the model, how many blocks to compute again, and what it then costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from shardwise.planner.boundaries import Fits, fastest_cut
from shardwise.planner.compute import part_passes, total
from shardwise.planner.cost import estimate
from shardwise.planner.halves import waiting_bytes
from shardwise.planner.job import Candidate, Job, Planned
from shardwise.planner.layout import Layout
from shardwise.planner.memory import block_heap_bytes, other_heap_bytes, rank_memory, saved_bytes, slack_share
from shardwise.planner.parts import stage_parts, tied_copy
from shardwise.planner.simulate import short_lists
from shardwise.planner.state import state_terms
from shardwise.spec.block import PartCosts
from shardwise.spec.strategy import default_stages


def refine(job: Job, candidate: Candidate) -> tuple[Planned | None, float]:
    """The fastest of the candidate's cuts that fits, and the least bytes that one of its cuts needs."""
    job = job.of(candidate)
    best: Planned | None = None
    least = float("inf")
    tried: set[tuple[int, ...]] = set()
    for limited in (False, True):
        for stages in _cuts(job, candidate, limited):
            if stages in tried:
                continue
            tried.add(stages)
            made, need = _with_recompute(job, replace(candidate, stages=stages))
            least = min(least, need)
            if made is None:
                continue
            cost = estimate(job.costs, job.cluster, made.layout(job.rows), job.work)
            if best is None or cost.step_seconds < best.step_seconds:
                best = Planned(made, cost)
        if best is not None:
            break  # cuts that spare memory are looked at only where they are needed
    return best, least


def memory_need(job: Job, candidate: Candidate) -> float:
    """Bytes of the fullest device."""
    return max(_needs(job.of(candidate), candidate))


def _needs(job: Job, candidate: Candidate) -> Iterator[float]:
    """Bytes of a device of each pipeline rank, the first, which holds most micro-batches, first."""
    layout = candidate.layout(job.rows)
    stages = stage_parts(job.costs, layout)
    lists = short_lists(layout.schedule, layout.pp, int(layout.num_micro_batches), layout.virtual_stages)
    for rank, actions in lists.items():
        own = [stages[stage] for stage in layout.stages_of(rank)]
        yield sum(rank_memory(own, actions, layout, job.work, job.cluster).values())


def _with_recompute(job: Job, candidate: Candidate) -> tuple[Candidate | None, float]:
    """The candidate with as few blocks of a stage computed again as memory allows; None if it does not fit."""
    given = job.fixed.get("recompute")
    if isinstance(given, int) and given > 0:
        candidate = replace(candidate, level="full", recomputed=given)
        need = memory_need(job, candidate)
        if given > max(candidate.stages):  # this cut has no stage of so many blocks
            return None, float("inf")
        return (candidate if need <= job.limit_bytes else None), need
    least = memory_need(job, candidate)
    if least > job.limit_bytes:
        return None, least
    if candidate.level != "full" or given is not None:
        return candidate, least
    low, high = 0, max(candidate.stages)  # the smallest number that fits lies in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        fits = all(need <= job.limit_bytes for need in _needs(job, replace(candidate, recomputed=middle)))
        low, high = (low, middle) if fits else (middle, high)
    if high == max(candidate.stages):
        return candidate, least
    return replace(candidate, recomputed=high), least


def _cuts(job: Job, candidate: Candidate, limited: bool) -> list[tuple[int, ...]]:
    given = job.fixed.get("stages")
    if given:
        return [tuple(given)]
    num_blocks, num_stages = job.costs.num_blocks, candidate.pp * candidate.virtual_stages
    if num_stages == 1:
        return [(num_blocks,)]
    layout = replace(candidate, stages=(num_blocks,)).layout(job.rows)
    seconds, first, last = _times(job, replace(layout, recomputed=()))
    if not limited:
        cut = fastest_cut(seconds, first, last, num_stages)
        return [cut, default_stages(num_blocks, num_stages)] if cut else []
    if candidate.virtual_stages > 1:
        return []
    cut = fastest_cut(seconds, first, last, num_stages, _fits(job, candidate, layout))
    return [cut] if cut else []


def _times(job: Job, layout: Layout) -> tuple[list[float], float, float]:
    """Seconds of each block for a micro-batch, of all before the first one, of all behind the last one."""

    def of(part: PartCosts, one: Layout) -> float:
        passes = part_passes(part, one, job.work, job.cluster)
        return float(total(passes.forward) + total(passes.backward) + total(passes.again))

    plain = replace(layout, recompute="none")
    kinds = [of(kind, layout) for kind in job.costs.kinds]
    last = sum(of(part, plain) for part in (job.costs.head, *job.costs.more))
    return [kinds[kind] for kind in job.costs.order], of(job.costs.embedding, plain), last


def _fits(job: Job, candidate: Candidate, layout: Layout) -> Fits:
    """Whether a stage can hold a range of blocks, from sums over blocks; 1F1B and GPipe."""
    costs, work, slack = job.costs, job.work, 1 + slack_share(job.work)

    def state(part: PartCosts) -> float:
        heap = block_heap_bytes(part, layout.recompute, layout, work)
        return float(sum(state_terms([(part, 1, layout.recompute)], layout, work).values()) + heap)

    def saved(part: PartCosts, one: Layout) -> float:
        kept = float(saved_bytes(part, one.recompute, one, work))
        if part.name != "head":
            return kept * slack
        # In proportion to the logits alone: what tensor ranks send is among what is there whatever the cut.
        return kept * slack + float(other_heap_bytes(kept, one, work) - other_heap_bytes(0.0, one, work))

    plain = replace(layout, recompute="none")
    states = [0.0, *accumulate(state(costs.kinds[kind]) for kind in costs.order)]
    keeps = [0.0, *accumulate(saved(costs.kinds[kind], layout) for kind in costs.order)]
    waits = [0.0, *accumulate(slack * waiting_bytes(costs.kinds[kind], layout, work) for kind in costs.order)]
    first = (state(costs.embedding), saved(costs.embedding, plain))
    behind = [costs.head, *costs.more, *([tied_copy(costs)] if costs.tied else [])]
    last = (sum(map(state, behind)), sum(saved(part, plain) for part in behind))
    one_block = replace(candidate, stages=(1,) * (candidate.pp - 1) + (costs.num_blocks - candidate.pp + 1,))
    # What is there whatever the number of blocks: base, workspace, gathered weights.
    number = candidate.num_micro_batches(job.rows)
    rank = _constant(job, one_block)

    def fits(stage: int, start: int, end: int) -> bool:
        ahead = number if candidate.schedule == "gpipe" else min(candidate.pp - stage, number)
        need = rank + states[end] - states[start] + ahead * (keeps[end] - keeps[start])
        if candidate.schedule == "zero_bubble":
            need += min(stage, number) * (waits[end] - waits[start])
        if stage == 0:
            need += first[0] + ahead * first[1]
        if stage == candidate.pp - 1:
            need += last[0] + ahead * last[1]
        return need <= job.limit_bytes

    return fits


def _constant(job: Job, candidate: Candidate) -> float:
    """Bytes of a device that hold neither state nor activations of blocks, the same on each stage."""
    layout = candidate.layout(job.rows)
    stages = stage_parts(job.costs, layout)
    lists = short_lists(layout.schedule, layout.pp, int(layout.num_micro_batches), layout.virtual_stages)
    middle = min(1, candidate.pp - 1)
    terms = rank_memory([stages[middle]], lists[middle], layout, job.work, job.cluster)
    named = {"weights", "gradients", "optimizer", "activations", "logits", "masks", "slack", "heap"}
    beside = slack_share(job.work) * terms["workspace"] + other_heap_bytes(terms["workspace"], layout, job.work)
    return float(sum(size for name, size in terms.items() if name not in named) + beside)
