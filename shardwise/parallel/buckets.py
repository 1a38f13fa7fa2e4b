"""Sums of gradients over the replicas of the data axis, in buckets that start while the backward pass runs."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.models.shard import Shard

BUCKET_BYTES = 25 * 2**20
_ALIGNMENT = 16  # elements; a vector load of any width stays aligned


class ReplicaSums:
    """All-reduces the gradients of ``shards`` over ``group``, a bucket as soon as its last gradient is complete.

    A gradient is complete when each micro-batch of the step has added its part. Which one is the last does
    not matter, so nothing here knows of the pipeline's schedule. Buckets start in one fixed order on every
    rank; a parameter that a rank's rows did not reach in each micro-batch (an expert, say) is complete at the
    end of the pass, and so are the buckets behind it.

    Args:
        shards: what trains is summed, the rest left alone; the same list on every rank of ``group``.
        num_buckets: number of buckets (at most one a tensor), None for buckets of 25 MiB.
    """

    def __init__(self, shards: Sequence[Shard], group: dist.ProcessGroup, num_buckets: int | None) -> None:
        # The backward pass completes the last parameters first.
        trained = [shard for shard in reversed(shards) if shard.parameter.requires_grad]
        sizes = [shard.data.numel() * shard.data.element_size() for shard in trained]
        self.group = group
        self.buckets = [_Bucket([trained[i] for i in part]) for part in partition(sizes, num_buckets)]
        self._num_micro_batches = 0
        self._started = 0
        self._pending: list[dist.Work] = []
        for bucket in self.buckets:
            for index, shard in enumerate(bucket.shards):
                hook = functools.partial(self._collect, bucket, index)
                shard.parameter.register_post_accumulate_grad_hook(hook)

    def begin(self, num_micro_batches: int) -> None:
        """Expect a step of ``num_micro_batches`` backward passes; 0: an unknown number, all is summed at the end."""
        self._num_micro_batches = num_micro_batches
        self._started = 0
        for bucket in self.buckets:
            bucket.begin()

    def finish(self) -> None:
        """Sum what has not been started, and wait for all: every gradient is then that of all replicas."""
        for bucket in self.buckets[self._started :]:
            self._start(bucket)
        for work in self._pending:
            work.wait()
        self._pending = []
        self._num_micro_batches = 0

    def _collect(self, bucket: _Bucket, index: int, _: torch.Tensor) -> None:
        """A micro-batch has added its part to a gradient."""
        bucket.gather(index)
        bucket.passes[index] += 1
        bucket.num_incomplete -= bucket.passes[index] == self._num_micro_batches
        while self._started < len(self.buckets) and not self.buckets[self._started].num_incomplete:
            self._start(self.buckets[self._started])

    def _start(self, bucket: _Bucket) -> None:
        self._started += 1
        work = dist.all_reduce(bucket.summand(), group=self.group, async_op=True)
        assert work is not None
        self._pending.append(work)


class _Bucket:
    """Gradients that are summed in one all-reduce: parts of one flat tensor, or a single gradient as it is."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards
        self.passes = [0] * len(shards)
        self.num_incomplete = len(shards)
        self.flat: torch.Tensor | None = None
        self.parts: list[torch.Tensor] = []
        if len(shards) > 1:
            sizes = [-(-shard.data.numel() // _ALIGNMENT) * _ALIGNMENT for shard in shards]
            first = shards[0].data
            self.flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
            for shard, part in zip(shards, self.flat.split(sizes), strict=True):
                self.parts.append(part[: shard.data.numel()].view(shard.data.shape))
                if shard.master is not None:
                    shard.master.home = self.parts[-1]

    def begin(self) -> None:
        self.passes = [0] * len(self.shards)
        self.num_incomplete = len(self.shards)

    def gather(self, index: int) -> None:
        """Move a gradient into the flat tensor, where later micro-batches add to it in place."""
        shard = self.shards[index]
        if self.parts and shard.grad is not self.parts[index]:
            shard.set_grad(self.parts[index].copy_(shard.ensure_grad()))

    def summand(self) -> torch.Tensor:
        """The tensor to sum; gradients that no row of this rank reached count as zero in it."""
        for index in range(len(self.shards)):
            self.shards[index].ensure_grad()
            self.gather(index)
        return self.shards[0].ensure_grad() if self.flat is None else self.flat


def partition(sizes: Sequence[int], num_parts: int | None) -> list[list[int]]:
    """Indices of tensors of ``sizes`` bytes, in order, in buckets: ``num_parts`` of about one size, or by bytes."""
    if num_parts is not None:
        num_parts = min(num_parts, len(sizes))
    parts: list[list[int]] = []
    left = sum(sizes)
    room = 0.0
    for index, size in enumerate(sizes):
        if num_parts is None:
            full = not parts or size > room
        else:
            parts_left, tensors_left = num_parts - len(parts), len(sizes) - index
            # Closed when its share is reached, and in time to leave each bucket behind it a tensor.
            full = not parts or (parts_left > 0 and (room <= 0 or tensors_left == parts_left))
        if full:
            parts.append([])
            room = BUCKET_BYTES if num_parts is None else left / (num_parts - len(parts) + 1)
        parts[-1].append(index)
        room -= size
        left -= size
    return parts
