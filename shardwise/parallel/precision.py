"""Which dtype holds which values: bf16 computes, fp32 remembers.

A model whose parameters are bf16 trains with fp32 masters. Under FSDP2 the sharded parameters are the
masters, and gathering rounds them; without it each trainable parameter has a :class:`Master` beside it.
A frozen parameter stays bf16 alone. The numbers are the same either way. What the model keeps in fp32 itself is its own
master, and whole under FSDP2, whose gathering rounds all parameters of a unit alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise.models.shard import Master, Shard
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout


def set_stored_dtypes(model: nn.Module, compute_dtype: torch.dtype, mesh: Mesh) -> dict[str, nn.Parameter]:
    """Give every parameter of ``model`` (on meta) the dtype in which it lies in memory.

    A parameter that the model itself made finer than the rest (a router's weight, Mamba's decay) computes as it is.

    Returns:
        By name what FSDP2 cannot hold: these finer parameters and whole numbers, which it would round as their unit,
        and single numbers.
    """
    sharded = mesh.size("dp_shard") > 1
    whole = {}
    for name, parameter in model.named_parameters():
        whole_numbers = not parameter.is_floating_point()
        dtype = parameter.dtype if whole_numbers else torch.promote_types(parameter.dtype, compute_dtype)
        if dtype != compute_dtype or parameter.dim() == 0:
            whole[name] = parameter
        elif sharded and parameter.requires_grad:
            dtype = master_dtype(compute_dtype)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)  # in place: ties stay ties
    return whole


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
