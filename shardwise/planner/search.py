"""The best splits of a job: all legal candidates by quick formulas, the best of them by simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.errors import PlanError
from shardwise.planner.balance import balanced_stages
from shardwise.planner.compute import amount_bytes, part_passes, total
from shardwise.planner.cost import Estimate, estimate
from shardwise.planner.data import data_seconds, dense_and_expert, exposed, optimizer_seconds, sharded_terms
from shardwise.planner.layout import Layout
from shardwise.planner.space import Array, Group, Job, Rejected, groups, tensor_degrees
from shardwise.spec.block import PartCosts, RecomputeLevel
from shardwise.units import format_bytes

_SIMULATED = 48  # best candidates by formula that are simulated


@dataclass(frozen=True)
class Ranked:
    """A configuration and what it costs."""

    layout: Layout
    estimate: Estimate


@dataclass(frozen=True)
class Found:
    """The answer: plans from the fastest on, how many candidates there were, and why others are out."""

    plans: tuple[Ranked, ...]
    considered: int
    rejected: tuple[Rejected, ...]


@dataclass(frozen=True)
class _Judged:
    group: Group
    seconds: Array
    memory: Array


def search(job: Job, top: int = 10) -> Found:
    """The fastest configurations that fit the memory.

    Raises:
        PlanError: no candidate is legal, or none fits; the message names the smallest need.
    """
    degrees, rejected = tensor_degrees(job)
    judged = [_judge(group, job) for group in groups(job, degrees)]
    if not judged:
        value = f"{job.devices} devices, {job.global_batch_size} rows a step, fixed {dict(job.fixed)}"
        rule = rejected[0].rule if rejected else "no split divides the devices, the blocks and the rows"
        raise PlanError(value, rule, "Leave a degree open, or change devices or rows")
    order = sorted((float(one.seconds[i]), g, i) for g, one in enumerate(judged) for i in _fitting(one, job))
    refused = [
        Rejected(_name(one.group), "needs more memory than a device has", _least(one), int(out))
        for one in judged
        if (out := np.count_nonzero(one.memory > job.memory_bytes))
    ]
    plans: list[Ranked] = []
    for _, g, i in order[:_SIMULATED]:
        ranked = _simulated(judged[g].group, i, job)
        if ranked.estimate.memory_bytes <= job.memory_bytes:
            plans.append(ranked)
    if not plans:
        raise _nothing_fits(judged, job)
    plans.sort(key=lambda one: one.estimate.step_seconds)
    return Found(tuple(plans[:top]), sum(len(one.group) for one in judged), (*rejected, *refused))


def _fitting(one: _Judged, job: Job) -> list[int]:
    """The best candidates of a group that fit."""
    fits = np.flatnonzero(one.memory <= job.memory_bytes)
    return [int(index) for index in fits[np.argsort(one.seconds[fits])][:_SIMULATED]]


def _judge(group: Group, job: Job) -> _Judged:
    """Step time and memory of each candidate, with stages as even as they can be."""
    costs, layout, work = job.costs, group.layout(), job.work
    times = [_part_seconds(part, layout, group, job) for part in costs.kinds]
    ends = [_part_seconds(part, layout, group, job) for part in (costs.embedding, costs.head, *costs.more)]
    counts = np.bincount(costs.order, minlength=len(costs.kinds))
    blocks = sum(count * seconds for count, seconds in zip(counts, times, strict=True))
    everything = blocks + sum(ends)
    most = np.ceil(costs.num_blocks / (group.pp * group.virtual)) * group.virtual
    slowest = np.maximum(everything / group.pp, most * blocks / costs.num_blocks)
    step = group.num_micro_batches * slowest + (group.pp - 1) / group.virtual * everything / group.pp
    parts = [(part, int(count), group.level) for part, count in zip(costs.kinds, counts, strict=True)]
    held = [*parts, (costs.head, 1, group.level)]
    if group.zero != 3:
        sums, gathers = data_seconds(held, layout, work, job.cluster)
        step = step + exposed((sums + gathers) / group.pp, slowest, work.overlap_data)
    step = step + optimizer_seconds(held, layout, work, job.cluster) / group.pp
    return _Judged(group, np.asarray(step, dtype=float), _memory(group, layout, job, most))


def _part_seconds(part: PartCosts, layout: Layout, group: Group, job: Job) -> Any:
    """Forward, backward and what is computed again, for one micro-batch."""
    level = group.level if part in job.costs.kinds else "none"
    passes = part_passes(part, replace(group.kinds_layout(), recompute=level), job.work, job.cluster)
    forward = _each(group, total(passes.forward))
    backward = _each(group, total(passes.backward) + total(passes.again))
    if group.zero == 3:
        gather, both = sharded_terms((part, 1, level), layout, job.work, job.cluster)
        forward = forward + exposed(gather, forward, job.work.overlap_data)
        backward = backward + exposed(both, backward, job.work.overlap_data)
    return forward + backward


def _each(group: Group, of_kinds: Any) -> Array:
    """A value of each kind of candidate, for every candidate."""
    _, kind = group.kinds
    return np.broadcast_to(np.asarray(of_kinds, dtype=float), (int(kind.max()) + 1,))[kind]


def _memory(group: Group, layout: Layout, job: Job, most: Array) -> Array:
    """Bytes of the first or the last pipeline rank, whichever holds more."""
    costs, work = job.costs, job.work
    largest = max(costs.kinds, key=lambda part: part.parameters.total)
    kinds = group.kinds_layout()

    def amounts(parts: Sequence[PartCosts], level: RecomputeLevel) -> Array:
        every = [np.asarray(amount_bytes(part.saved[level], kinds, work), dtype=float) for part in parts]
        return _each(group, np.maximum.reduce(every))

    saved, whole = amounts(costs.kinds, group.level), amounts(costs.kinds, "none")
    alive = np.minimum(group.num_micro_batches, group.pp * (1 + (group.pp - 1) / (group.pp * group.virtual)))
    first = _state_bytes(largest, layout, group, job) * most + _state_bytes(costs.embedding, layout, group, job)
    last = _state_bytes(largest, layout, group, job) * most + _state_bytes(costs.head, layout, group, job)
    logits = amounts([costs.head], "none")
    working = 1.5 * whole - saved
    memory = np.maximum(first + alive * most * saved, last + most * saved + logits) + working
    if group.zero == 3:
        size = sum(dense_and_expert([(largest, 1, group.level)], layout, trainable=False))
        memory = memory + size * (2 * work.sent_weight_bytes + work.sent_gradient_bytes)
    return np.asarray(memory + 1.5 * 2**30, dtype=float)


def _state_bytes(part: PartCosts, layout: Layout, group: Group, job: Job) -> Any:
    held = dense_and_expert([(part, 1, group.level)], layout, trainable=False)
    shares = (layout.shard, np.minimum(layout.shard, layout.expert_data_ranks))
    bytes_of = ((job.work.weight_bytes, 3), (job.work.gradient_bytes, 2), (job.work.optimizer_bytes, 1))
    return sum(
        size * amount / (share if group.zero >= level else 1)
        for size, level in bytes_of
        for amount, share in zip(held, shares, strict=True)
    )


def _simulated(group: Group, index: int, job: Job) -> Ranked:
    """One candidate with the best boundaries, and no more recomputed than the memory asks for."""
    pp, virtual = int(group.pp[index]), int(group.virtual[index])
    plain = Layout(
        tp=group.tp,
        pp=pp,
        dp=int(group.dp[index]),
        cp=int(group.cp[index]),
        ep=int(group.ep[index]),
        shard=int(group.dp[index] * group.cp[index]),
        zero=group.zero,
        micro_batch=int(group.micro_batch[index]),
        num_micro_batches=int(group.num_micro_batches[index]),
        sequence_parallel=group.sequence_parallel,
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
        recompute=group.level,
    )
    layout = replace(plain, stages=_stages(plain, job))
    made = estimate(job.costs, job.cluster, layout, job.work)
    if group.level == "none":
        return Ranked(layout, made)
    for spared in _spared(layout):
        less = replace(layout, recomputed=tuple(max(0, size - spared) for size in layout.stages))
        better = estimate(job.costs, job.cluster, less, job.work)
        if better.memory_bytes <= job.memory_bytes and better.step_seconds < made.step_seconds:
            return Ranked(less, better)
    return Ranked(layout, made)


def _spared(layout: Layout) -> list[int]:
    """How many blocks of a stage are not recomputed, the most first."""
    most = max(layout.stages) - 1
    return sorted({most, most * 3 // 4, most // 2, most // 4, 1} - {0}, reverse=True) if most else []


def _stages(layout: Layout, job: Job) -> tuple[int, ...]:
    def seconds(part: PartCosts) -> float:
        passes = part_passes(part, layout, job.work, job.cluster)
        return float(total(passes.forward) + total(passes.backward) + total(passes.again))

    kinds = [seconds(part) for part in job.costs.kinds]
    ends = replace(layout, recompute="none")
    before, after = (
        float(sum(total(side) for side in (p.forward, p.backward)))
        for p in (part_passes(part, ends, job.work, job.cluster) for part in (job.costs.embedding, job.costs.head))
    )
    each = [kinds[kind] for kind in job.costs.order]
    return balanced_stages(each, layout.pp * layout.virtual_stages, before, after)


def _name(group: Group) -> str:
    sequence = ", sequence parallel" if group.sequence_parallel else ""
    return f"tp {group.tp}, zero {group.zero}, recompute {group.level}{sequence}"


def _least(one: _Judged) -> str:
    return f"the smallest of them needs {format_bytes(float(one.memory.min()))}"


def _nothing_fits(judged: Sequence[_Judged], job: Job) -> PlanError:
    """The smallest need, and where it is."""
    one = min(judged, key=lambda each: float(each.memory.min()))
    index = int(one.memory.argmin())
    need = format_bytes(float(one.memory[index]))
    group = one.group
    where = f"{_name(group)}, pp {int(group.pp[index])}, dp {int(group.dp[index])}, cp {int(group.cp[index])}"
    where += f", {int(group.micro_batch[index])} rows a micro-batch"
    return PlanError(
        f"{format_bytes(job.memory_bytes)} a device on {job.devices} devices",
        f"no split fits; the smallest need is {need} ({where})",
        "Use more devices, or devices with more memory",
    )
