"""The two differentiable collectives of tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, f and g)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        partial = partial.contiguous()
        dist.all_reduce(partial, group=group)  # in place: the partial sum has no other reader
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _TracedSumForward(torch.autograd.Function):
    """The same for the compiler, which cannot follow an output that is its own input everywhere."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        return all_reduce(partial, "sum", group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        if grad is grads[0]:
            grad = grad.clone()  # autograd may hand the same tensor to another reader
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        size = dist.get_world_size(group)
        parts = part.new_empty((size * part.shape[0], *part.shape[1:]))
        dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
        return parts.unflatten(0, (size, -1)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        size = dist.get_world_size(ctx.group)
        shares = grads[0].unflatten(-1, (size, -1)).movedim(-2, 0).contiguous()
        grad = torch.empty_like(shares[0])
        dist.reduce_scatter_tensor(grad, shares.flatten(0, 1), group=ctx.group)
        return grad, None


def gather_forward(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The ranks' parts of the last dim side by side; of its gradient each rank has a share, and they are summed."""
    return _GatherForward.apply(part, group)


def sum_forward(partial: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum of the ranks' partial results (overwrites ``partial``); the gradient passes through."""
    if torch.compiler.is_compiling():
        return _TracedSumForward.apply(partial, group)
    return _SumForward.apply(partial, group)


def sum_backward(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """``x`` unchanged; its gradient, of which each rank has its share, is summed over the ranks."""
    return _SumBackward.apply(x, group)
