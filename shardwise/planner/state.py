"""Bytes of weights, gradients and optimizer state: the one place that says what data ranks share out, and when.

All functions take numbers or numpy arrays of candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.planner.arrays import choose, largest, smallest
from shardwise.planner.data import dense_and_expert
from shardwise.planner.layout import Layout, Work
from shardwise.planner.parts import ENDS, Placed

STATE = ("weights", "gradients", "optimizer")
_ACTIVE_STAGES = 3  # of a pipeline rank, whose weights FSDP2 keeps gathered at the same time


def state_terms(parts: Sequence[Placed], layout: Layout, work: Work) -> dict[str, Any]:
    """Bytes of one rank that stay from step to step, and of a step's gradients at their most.

    Published software shares out optimizer state (ZeRO-1), gradients too (2), weights too (3). Our runtime shares out
    by FSDP2: the shards are the masters, beside which weights are gathered in the compute precision; and gradients
    stay whole as long as a step has a micro-batch to come, whatever ``reshard`` says.
    """
    held = dense_and_expert(parts, layout, trainable=False)
    trained = dense_and_expert(parts, layout, trainable=True)
    shares = (layout.shard, smallest(layout.shard, layout.expert_data_ranks))
    every, some = sum(held), sum(trained)
    every_share, some_share = (
        sum(amount / share for amount, share in zip(amounts, shares, strict=True)) for amounts in (held, trained)
    )
    optimizer = (some_share if layout.zero >= 1 else some) * work.optimizer_bytes
    if not work.ours:
        weights = (every_share if layout.zero >= 3 else every) * work.weight_bytes
        gradients = (some_share if layout.zero >= 2 else some) * work.gradient_bytes
        return dict(zip(STATE, (weights, gradients, optimizer), strict=True))
    weights, gradients = every * work.weight_bytes, some * work.gradient_bytes
    if layout.zero:
        # In fp32 a trained weight is its own master: its shard is not among the optimizer's bytes.
        own = work.weight_bytes if work.compute_bytes == 4.0 else 0.0
        shards = (every_share - some_share) * work.weight_bytes + some_share * own
        weights = weights * _gathered_share(layout) + shards
        # What stands around the blocks is one unit, whose gradients are summed when the last of them is there.
        ends = [placed for placed in parts if placed[0].name in ENDS]
        whole = sum(dense_and_expert(ends, layout, trainable=True))
        shared = (some_share + whole - whole / layout.shard) * work.gradient_bytes
        gradients = choose(layout.num_micro_batches > 1, gradients, shared)
    return dict(zip(STATE, (weights, gradients, optimizer), strict=True))


def gradients_apart(layout: Layout, work: Work) -> Any:
    """Whether gradients come only as activations go, so that the larger of both decides and not their sum.

    So it is in the one backward pass of a step on our runtime, where no bucket for the sums of replicas holds them.
    The heap of a CPU process keeps what activations leave, and little of it fits gradients: there both count.
    """
    if not work.ours or work.counted == "process":
        return False
    once = (layout.pp == 1) & (layout.num_micro_batches == 1)
    return once if layout.zero else once & (layout.dp == 1)


def gathered_bytes(blocks: Sequence[Any], trained: Sequence[Any], ends: Any, layout: Layout, work: Work) -> Any:
    """Bytes of what comes and goes with the traffic of data ranks that share out.

    Args:
        blocks: weights of each block of the rank on one rank, before anything is shared out; ``trained``: those of
            them that have gradients; ``ends``: of all else.
    """
    if not layout.zero or (not work.ours and layout.zero < 3):
        return 0.0
    block: Any = 0.0
    for size in blocks:
        block = largest(block, size)
    summed: Any = 0.0
    for size in trained:
        summed = largest(summed, size)
    if not work.ours:
        return largest(block, ends) * (2 * work.sent_weight_bytes + work.sent_gradient_bytes)
    # What enters the sum of a block's gradients is a copy in fp32; that of the ends comes when activations are gone.
    sums = summed * summed_bytes(work)
    if layout.zero < 3:
        return sums
    # The ends stay gathered through a pass; of the blocks this one and the next are, and this one's fresh gradient.
    passing = ends * work.sent_weight_bytes + block * 2 * work.sent_weight_bytes + summed * work.compute_bytes
    return sums + choose(layout.pp > 1, 0.0, passing)


def summed_bytes(work: Work) -> float:
    """Of an element of a gradient while FSDP2 sums it: its copy in fp32, and gloo's, which sums to all and cuts."""
    return work.sent_gradient_bytes * (2 if work.counted == "process" else 1)


def _gathered_share(layout: Layout) -> Any:
    """Of a rank's weights, how much is gathered all through a step.

    Under a pipeline a backward pass leaves its stage gathered for the passes to come.
    """
    if layout.zero < 3:
        return 1.0
    return choose(layout.pp > 1, smallest(1.0, _ACTIVE_STAGES / layout.virtual_stages), 0.0)
