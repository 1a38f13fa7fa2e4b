"""Which dtype holds which values: bf16 computes, fp32 remembers.

A model whose parameters are bf16 trains with fp32 masters. Under FSDP2 the sharded parameters are the
masters, and gathering rounds them; without it each trainable parameter has a :class:`Master` beside it.
A frozen parameter stays bf16 alone. The numbers are the same either way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.models.shard import Master, Shard
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout


def set_stored_dtypes(model: nn.Module, compute_dtype: torch.dtype, mesh: Mesh) -> None:
    """Give every parameter of ``model`` (on meta) the dtype in which it lies in memory."""
    sharded = mesh.size("dp_shard") > 1
    for parameter in model.parameters():
        dtype = master_dtype(compute_dtype) if sharded and parameter.requires_grad else compute_dtype
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)  # in place: ties stay ties


def master_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    """The dtype of what trains: fp32 behind bf16, else the dtype of the computation."""
    return torch.float32 if compute_dtype is torch.bfloat16 else compute_dtype


def make_shards(model: nn.Module, layouts: Mapping[str, ParamLayout], compute_dtype: torch.dtype) -> list[Shard]:
    """The shards of a model that lies on its device, with masters where the stored dtype is too coarse."""
    shards = []
    for name, parameter in model.named_parameters():
        coarse = parameter.requires_grad and parameter.dtype != master_dtype(compute_dtype)
        shards.append(Shard(layouts[name], parameter, Master(parameter) if coarse else None))
    return shards
