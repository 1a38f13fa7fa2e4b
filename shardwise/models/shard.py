"""A parameter's local part together with its place in the whole, and its fp32 master where it has one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.spec.layout import ParamLayout


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor (FSDP2 registers DTensors), sharing its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class Master:
    """The fp32 values of a parameter that computes in a lower precision, and their fp32 gradient.

    In bf16 a weight of 1.0 does not move by steps of 1e-3; so the optimizer steps the master, and the
    parameter is the master rounded. Each backward pass hands its gradient over as soon as it is complete.

    Args:
        parameter: a leaf on its final device; a hook is registered on it.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        self.grad: torch.Tensor | None = None
        self.home: torch.Tensor | None = None  # where a step's gradient begins, None for memory of its own
        self.rounded_version = -1  # the version of the values that the parameter holds
        parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter: torch.Tensor) -> None:
        """Add the gradient of one micro-batch in fp32 and let go of it."""
        assert parameter.grad is not None
        if self.grad is None:
            self.grad = parameter.grad.float() if self.home is None else self.home.copy_(parameter.grad)
        else:
            self.grad.add_(parameter.grad)
        parameter.grad = None


def take(whole: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """What ``layout`` holds of ``whole``, of shape ``layout.local_shape``; a view where it is one piece."""
    pieces = layout.pieces
    if len(pieces) == 1:
        return whole[pieces[0].whole_slices]
    values = whole.new_empty(layout.local_shape)
    for piece in pieces:
        values[piece.local_slices] = whole[piece.whole_slices]
    return values


@dataclass(frozen=True)
class Shard:
    """One parameter as this rank holds it: ``data`` are the pieces ``layout.pieces`` of the whole.

    ``data`` is what the optimizer steps, checkpoints save and exports write: the master where there is
    one (bf16 compute without FSDP2, which keeps fp32 shards itself), else the parameter.
    """

    layout: ParamLayout
    parameter: nn.Parameter
    master: Master | None = None

    @property
    def data(self) -> torch.Tensor:
        """The values, a plain tensor of shape ``layout.local_shape``: writing to it changes them."""
        return local(self.parameter.detach()) if self.master is None else self.master.values

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the values, in their dtype, or None where there is none."""
        if self.master is not None:
            return self.master.grad
        return None if self.parameter.grad is None else local(self.parameter.grad)

    def ensure_grad(self) -> torch.Tensor:
        """The gradient; zeros where no row of this rank reached the parameter."""
        if self.grad is None:
            self.set_grad(torch.zeros_like(self.parameter if self.master is None else self.master.values))
        assert self.grad is not None
        return self.grad

    def set_grad(self, grad: torch.Tensor | None) -> None:
        """Put ``grad``, of the parameter's own kind (a DTensor under FSDP2), in place of the gradient."""
        if self.master is not None:
            self.master.grad = grad
        else:
            self.parameter.grad = grad


@torch.no_grad()
def follow_masters(shards: Iterable[Shard]) -> None:
    """Round each master that has changed since the last call into its parameter.

    Called before every pass, so that whoever fills masters (files, checkpoints, the optimizer) need not
    think of it. A change shows in the tensor's version counter.
    """
    parameters, values = [], []
    for shard in shards:
        master = shard.master
        if master is not None and master.rounded_version != master.values._version:
            parameters.append(shard.parameter.detach())
            values.append(master.values)
            master.rounded_version = master.values._version
    if parameters:
        torch._foreach_copy_(parameters, values)
