"""Sums of gradients that the backward pass leaves as shares of this rank: partial sums, tied copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwise.models.shard import Shard
from shardwise.parallel.buckets import partition
from shardwise.parallel.mesh import Mesh


def sum_gradients(shards: Sequence[Shard], mesh: Mesh, tied_group: dist.ProcessGroup | None) -> None:
    """Make every gradient the gradient of the whole step, in place.

    Two sums, each over the ranks that hold a share: tensor ranks of a replicated weight that sees only
    its heads, and the two ends of a tied embedding. The data axis has been summed before.

    Args:
        tied_group: the ranks of the two copies of a tied weight, None where this rank holds none.
    """
    partial = [shard for shard in shards if shard.layout.tp_partial]
    if partial:
        _sum_in_buckets(_gradients(partial), mesh.group("tp"))
    if tied_group is not None:
        _sum_in_buckets(_gradients(tied_shards(shards)), tied_group)


def tied_shards(shards: Iterable[Shard]) -> list[Shard]:
    """The shards that have a copy on another stage: the embedding there, the head here."""
    return [shard for shard in shards if shard.layout.tied_to is not None or shard.layout.has_copy]


def _gradients(shards: Iterable[Shard]) -> list[torch.Tensor]:
    """The local gradients; one that no row of this rank reached counts as zero, so that all ranks agree."""
    return [shard.ensure_grad() for shard in shards if shard.parameter.requires_grad]


def _sum_in_buckets(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce in place, small tensors together; the buckets are in flight at the same time."""
    pending = []
    for indices in partition([t.numel() * t.element_size() for t in tensors], None):
        bucket = [tensors[i] for i in indices]
        flat = bucket[0].view(-1) if len(bucket) == 1 else torch.cat([t.reshape(-1) for t in bucket])
        pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    for bucket, flat, work in pending:
        work.wait()
        if len(bucket) > 1:
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))
