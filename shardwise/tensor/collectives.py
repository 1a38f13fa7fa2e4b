"""The differentiable collectives of tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053, f and g, and gathers).

Two kinds of gradient meet here. A gradient is *whole* where every rank holds all of it, and a *share* where the
ranks' gradients sum to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._functional_collectives import all_reduce

from shardwise.tensor.group import ProcessTensorGroup, TensorGroup


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        partial = partial.contiguous()
        group.all_reduce(partial)  # in place: the partial sum has no other reader
        ctx.mark_dirty(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _TracedSumForward(torch.autograd.Function):
    """The same for the compiler, which cannot follow an output that is its own input everywhere."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: ProcessTensorGroup) -> torch.Tensor:
        return all_reduce(partial, "sum", group.process_group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].contiguous()
        if grad is grads[0]:
            grad = grad.clone()  # autograd may hand the same tensor to another reader
        ctx.group.all_reduce(grad)
        return grad, None


class _GatherForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: TensorGroup, shares: bool) -> torch.Tensor:
        ctx.group, ctx.shares = group, shares
        return group.all_gather(part.contiguous()).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        parts = grads[0].unflatten(-1, (ctx.group.size, -1)).movedim(-2, 0)
        grad = ctx.group.reduce_scatter(parts.contiguous()) if ctx.shares else parts[ctx.group.rank].contiguous()
        return grad, None, None


class _Cut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorGroup, dim: int, summed: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.length = group, dim, x.shape[dim]
        parts = _parts(x, group.size, dim)
        return group.reduce_scatter(parts) if summed else parts[group.rank].clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _joined(grads[0], ctx.group, ctx.dim, ctx.length), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: TensorGroup, dim: int, length: int, shares: bool) -> torch.Tensor:
        ctx.group, ctx.dim, ctx.shares = group, dim, shares
        return _joined(part, group, dim, length)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        parts = _parts(grads[0], ctx.group.size, ctx.dim)
        grad = ctx.group.reduce_scatter(parts) if ctx.shares else parts[ctx.group.rank].clone()
        return grad, None, None, None, None


def _parts(x: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """[size, ...]: ``dim`` in equal parts, the last ones filled up with zeros."""
    own = -(-x.shape[dim] // size)
    missing = own * size - x.shape[dim]
    if missing:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim=dim)
    return x.unflatten(dim, (size, own)).movedim(dim, 0).contiguous()


def _joined(part: torch.Tensor, group: TensorGroup, dim: int, length: int) -> torch.Tensor:
    """The ranks' parts of ``dim`` one after the other, the first ``length`` of them."""
    whole = group.all_gather(part.contiguous()).movedim(0, dim).flatten(dim, dim + 1)
    return whole.narrow(dim, 0, length)


def sum_forward(partial: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """Sum of the ranks' partial results (overwrites ``partial``); the gradient passes through."""
    if torch.compiler.is_compiling():
        return _TracedSumForward.apply(partial, group)
    return _SumForward.apply(partial, group)


def sum_backward(x: torch.Tensor, group: TensorGroup) -> torch.Tensor:
    """``x`` unchanged; its gradient, of which each rank has its share, is summed over the ranks."""
    return _SumBackward.apply(x, group)


def gather_forward(part: torch.Tensor, group: TensorGroup, *, shares: bool) -> torch.Tensor:
    """The ranks' equal parts of the last dim side by side.

    Args:
        shares: whether of the result's gradient each rank has a share (they are summed), or all of it.
    """
    return _GatherForward.apply(part, group, shares)


def cut(x: torch.Tensor, group: TensorGroup, dim: int, *, summed: bool) -> torch.Tensor:
    """This rank's equal part of ``dim`` (behind its end: zeros); the gradient is that of the whole dim on every rank.

    Args:
        summed: whether the ranks hold partial results, which are summed (a reduce-scatter), or the same.
    """
    return _Cut.apply(x, group, dim, summed)


def join(part: torch.Tensor, group: TensorGroup, dim: int, length: int, *, shares: bool) -> torch.Tensor:
    """The ranks' parts of ``dim``, ``length`` of it in all, as :func:`cut` gave them.

    Args:
        shares: whether of the result's gradient each rank has a share (they are summed), or all of it.
    """
    return _Join.apply(part, group, dim, length, shares)
