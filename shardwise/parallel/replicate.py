"""Sums of gradients that the backward pass leaves as shares of this rank: partial sums, tied copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwise.models.shard import Shard
from shardwise.parallel.buckets import partition
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout, overlaps


def sum_gradients(shards: Sequence[Shard], mesh: Mesh, tied_group: dist.ProcessGroup | None) -> None:
    """Make every gradient the gradient of the whole step, in place.

    Each sum is over the ranks that hold a share: tensor ranks of a replicated weight that sees only its heads,
    those of rows that some of them hold (one key head for several), and the two ends of a tied embedding. The
    data axis has been summed before, but for what FSDP2 has left whole.

    Args:
        tied_group: the ranks of the two copies of a tied weight, None where this rank holds none.
    """
    if mesh.size("dp_shard") > 1:
        whole = _gradients([shard for shard in shards if shard.layout.shard_range is None])
        for axis in ("dp_shard", "dp_replicate"):
            if mesh.size(axis) > 1:
                _sum_in_buckets(whole, mesh.group(axis))
    partial = [shard for shard in shards if shard.layout.tp_partial]
    if partial:
        _sum_in_buckets(_gradients([s for s in partial if s.layout.tp_dim is None]), mesh.group("tp"))
        _sum_shared([s for s in partial if s.layout.tp_dim is not None], mesh)
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


def _sum_shared(shards: Sequence[Shard], mesh: Mesh) -> None:
    """Sum the gradients of what some tensor ranks share, in place.

    Each rank lays its shares at their place into zeros that stand for all that is shared of the parameter; those are
    summed over the tensor axis, and each rank takes back what it holds. So ranks need no groups of their own, and
    the bytes are those of the shared rows.
    """
    # Tensor ranks may hold a row at different places among their rows, and so in different shards of the data axis:
    # then the sum goes over that axis too.
    _sum_placed([s for s in shards if not _cut_apart(s.layout)], [mesh.group("tp")])
    _sum_placed([s for s in shards if _cut_apart(s.layout)], [mesh.group("tp"), mesh.group("dp_shard")])


def _cut_apart(layout: ParamLayout) -> bool:
    """Whether the data axis may have cut a row off to different shards on different tensor ranks."""
    return layout.tp_dim == 0 and layout.shard_range is not None


def _sum_placed(shards: Sequence[Shard], groups: Sequence[dist.ProcessGroup]) -> None:
    gradients = _gradients(shards)
    layouts = [shard.layout for shard in shards if shard.parameter.requires_grad]
    shared = [_shared_part(layout) for layout in layouts]
    counts = [math.prod(layout.local_shape) for layout in shared]
    sizes = [count * gradient.element_size() for count, gradient in zip(counts, gradients, strict=True)]
    for indices in partition(sizes, None):  # one after the other: the zeros take the memory of one bucket
        flat = gradients[indices[0]].new_zeros(sum(counts[i] for i in indices))
        pairs = []
        for i, part in zip(indices, flat.split([counts[i] for i in indices]), strict=True):
            zeros = part.view(shared[i].local_shape)
            pairs += [(gradients[i][mine], zeros[there]) for mine, there in overlaps(layouts[i], shared[i])]
        for gradient, place in pairs:
            place.copy_(gradient)
        for group in groups:
            dist.all_reduce(flat, group=group)
        for gradient, place in pairs:
            gradient.copy_(place)


def _shared_part(layout: ParamLayout) -> ParamLayout:
    """What is shared of a parameter, the same on every rank of the sum, as the layout of the zeros."""
    shard_range = None if _cut_apart(layout) else layout.shard_range
    return ParamLayout(layout.name, layout.shape, layout.tp_dim, layout.tp_shared, shard_range=shard_range)
