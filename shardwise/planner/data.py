"""Traffic over the data ranks, and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardwise.planner.arrays import choose, largest, smallest
from shardwise.planner.collectives import collective_seconds
from shardwise.planner.compute import expert_parameters, rank_parameters
from shardwise.planner.host import KEPT_BESIDE_GATHERS
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import ENDS, Placed, tied_copy
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import ClusterSpec

_HOST_BANDWIDTH = 12e9  # bytes/s to the host's memory, of a device that shares the way with its neighbours
_COPIES = 2.0  # of what FSDP2 gathers or sums: read and written once more, out of one buffer or into it
# Of a unit whose gradients are summed, and of one that is gathered: fresh buffers of its size. Fitted with the rest of
# shardwise.planner.host; seen are the gradients, their copy, gloo's, and what it receives.
_SUM_BUFFERS, _GATHER_BUFFERS = 5.0, 1.25
_NEVER_HIDDEN = 0.08  # of traffic beside compute: what starts it, ends it, and what both take from each other


def dense_and_expert(parts: Sequence[Placed], layout: Layout, trainable: bool) -> tuple[Any, Any]:
    """Weights of a stage on one rank: those summed over all data ranks, and those of routed experts."""
    dense: Any = 0.0
    expert: Any = 0.0
    for part, times, _ in parts:
        parameters = part.trainable if trainable else part.parameters
        own = expert_parameters(parameters, layout)
        dense = dense + times * (rank_parameters(parameters, part, layout) - own)
        expert = expert + times * own
    return dense, expert


def data_seconds(parts: Sequence[Placed], layout: Layout, work: Work, cluster: ClusterSpec) -> tuple[Any, Any]:
    """Seconds of gradient sums, and of gathers of weights, once over all weights of a rank; nothing hidden yet."""
    trained = dense_and_expert(parts, layout, trainable=True)
    held = dense_and_expert(parts, layout, trainable=False)
    more = _units(parts) - 1 if work.ours and layout.zero else 0
    has_experts = any(part.parameters.expert for part, _, _ in parts)
    sums: Any = 0.0
    gathers: Any = 0.0
    strides = (layout.tp, layout.tp * layout.ep if layout.expert_tensor else layout.ep)
    for index, (ranks, stride) in enumerate(zip((layout.data_ranks, layout.expert_data_ranks), strides, strict=True)):
        if index == 1 and not has_experts:
            continue
        gradients = trained[index] * work.sent_gradient_bytes
        # FSDP2 gathers frozen weights with the others, in each step anew; others' ZeRO-1 and 2 what was updated.
        weights = (held if layout.zero == 3 or work.ours else trained)[index] * work.sent_weight_bytes
        if layout.zero == 0:
            sums = sums + collective_seconds("all_reduce", gradients, ranks, stride, cluster)
            continue
        shard = smallest(layout.shard, ranks)
        sums = sums + collective_seconds("reduce_scatter", gradients, shard, stride, cluster)
        sums = sums + collective_seconds("all_reduce", gradients / shard, ranks / shard, stride * shard, cluster)
        gathers = gathers + collective_seconds("all_gather", weights, shard, stride, cluster)
        if work.ours and index == 0:
            step = cluster.chip.kernel_seconds * (more + 1)
            rate = cluster.chip.memory_bandwidth * cluster.chip.bandwidth_efficiency
            sums = sums + more * collective_seconds("reduce_scatter", 0.0, shard, stride, cluster)
            sums = sums + _COPIES * gradients / rate + work.host.reduction * step
            sums = sums + _SUM_BUFFERS * _mapped_bytes(parts, layout, work, trainable=True) * work.host.mapped / rate
            gathers = gathers + more * collective_seconds("all_gather", 0.0, shard, stride, cluster)
            gathers = gathers + _COPIES * weights / rate + work.host.gather * step
            mapped = _mapped_bytes(parts, layout, work, trainable=False) * work.host.mapped
            gathers = gathers + _GATHER_BUFFERS * mapped / rate
    return sums, gathers


def _mapped_bytes(parts: Sequence[Placed], layout: Layout, work: Work, trainable: bool) -> Any:
    """Weights of units that are too large for a heap of freed memory: each buffer of theirs is mapped anew.

    Args:
        trainable: only those that are summed, else all that are gathered.
    """
    if work.counted != "process":
        return 0.0
    found: Any = 0.0
    ends: Any = 0.0
    for part, times, level in parts:
        size = sum(dense_and_expert([(part, 1, level)], layout, trainable)) * work.sent_weight_bytes
        if part.name in ENDS:
            ends = ends + times * size
        else:
            found = found + times * choose(size < KEPT_BESIDE_GATHERS, 0.0, size)
    return found + choose(ends < KEPT_BESIDE_GATHERS, 0.0, ends)


def _units(parts: Sequence[Placed]) -> Any:
    """Collectives that move the weights of a rank once: FSDP2 has one for each block, and one for all else."""
    number: Any = sum((times for part, times, _ in parts if part.name not in ENDS), start=0)
    ends: Any = sum((times for part, times, _ in parts if part.name in ENDS), start=0)
    return largest(number + smallest(ends, 1), 1)


def exposed(traffic: Any, compute: Any, overlap: bool) -> Any:
    """What remains of traffic that runs beside ``compute``."""
    return largest(traffic - compute, _NEVER_HIDDEN * traffic) if overlap else traffic


def optimizer_seconds(parts: Sequence[Placed], layout: Layout, work: Work, cluster: ClusterSpec) -> Any:
    """The update reads and writes every weight's state once; what is shared out is updated by its owner."""
    dense, expert = dense_and_expert(parts, layout, trainable=True)
    if layout.zero:
        dense = dense / layout.shard
        expert = expert / smallest(layout.shard, layout.expert_data_ranks)
    chip = cluster.chip
    seconds = (dense + expert) * work.traffic_bytes / (chip.memory_bandwidth * chip.bandwidth_efficiency)
    return seconds + (dense + expert) * work.host_bytes / _HOST_BANDWIDTH


def sharded_terms(block: Placed, layout: Layout, work: Work, cluster: ClusterSpec) -> tuple[Any, Any]:
    """ZeRO-3: traffic of one block in a forward pass, and in a backward pass, before anything is hidden.

    On our runtime gradients are summed once a step, and under a pipeline a backward pass leaves weights gathered for
    the forward pass that follows it.
    """
    sums, gathers = data_seconds([block], replace(layout, zero=3), work, cluster)
    if work.ours:
        return choose(layout.pp > 1, 0.0, gathers), gathers
    return gathers, gathers + sums


def tied_seconds(costs: ModelCosts, layout: Layout, work: Work, cluster: ClusterSpec) -> Any:
    """The sum of a tied weight's gradient over the first and the last stage, once a step; 0 where there is no copy."""
    trained = tied_copy(costs).trainable
    if not costs.tied or not trained.total:
        return 0.0
    size = rank_parameters(trained, tied_copy(costs), layout) * work.sent_gradient_bytes
    size = size / (layout.shard if layout.zero >= 2 or (work.ours and layout.zero) else 1)
    stride = layout.tp * layout.cp * layout.dp * largest(layout.pp - 1, 1)
    seconds = collective_seconds("all_reduce", size, 2, stride, cluster)
    return choose(layout.pp > 1, seconds, 0.0)
