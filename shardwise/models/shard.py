"""A parameter's local part together with its place in the whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.spec.layout import ParamLayout


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a DTensor (FSDP2 registers DTensors), sharing its storage."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Shard:
    """One parameter as this rank holds it: ``data`` is the slice ``layout.slices`` of the whole."""

    layout: ParamLayout
    parameter: nn.Parameter

    @property
    def data(self) -> torch.Tensor:
        """The values, a plain tensor of shape ``layout.local_shape`` that shares the parameter's storage."""
        return local(self.parameter.detach())

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the values, or None where the parameter has none."""
        return None if self.parameter.grad is None else local(self.parameter.grad)
