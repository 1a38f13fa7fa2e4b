"""The norm of the whole gradient, each element counted once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout


def owned_squared_norm(shards: Iterable[Shard]) -> torch.Tensor:
    """Sum of squares, in float64, of the gradient elements that this rank owns; a scalar on the CPU.

    The sum over all ranks is the squared norm of the whole gradient: replicated, tied and sharded
    elements have exactly one owner (:class:`shardwise.spec.layout.ParamLayout`).
    """
    gradients = [part for shard in shards if shard.grad is not None for part in _owned(shard.grad, shard.layout)]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # Each tensor's norm in its own precision, their sum in float64: a float64 copy of every gradient costs
    # more than the rest of the norm together.
    return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)]).square().sum().cpu()


def _owned(grad: torch.Tensor, layout: ParamLayout) -> list[torch.Tensor]:
    """The owned parts of a gradient, the gradient itself where it is owned whole."""
    owned = [piece for piece in layout.pieces if piece.owned]
    if owned and len(owned) == len(layout.pieces):
        return [grad]
    return [grad[piece.local_slices] for piece in owned]


@torch.no_grad()
def clip_gradients(shards: Iterable[Shard], norm: float, max_norm: float | None) -> None:
    """Scale all local gradients so that the whole norm is at most ``max_norm``.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``, its 1e-6 included.
    """
    factor = max_norm / (norm + 1e-6) if max_norm else 1.0
    gradients = [shard.grad for shard in shards if shard.grad is not None] if factor < 1.0 else []
    if gradients:
        torch._foreach_mul_(gradients, factor)
