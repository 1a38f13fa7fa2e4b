"""Sharded data parallelism (ZeRO-2 and ZeRO-3) by FSDP2: parameters, gradients and optimizer state cut by rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shardwise.parallel.mesh import Mesh
from shardwise.parallel.precision import master_dtype
from shardwise.spec.layout import ParamLayout, chunk_range

# The logits of a head with a bias are a view of the matrix product. FSDP warns since a change of a view in place would
# lose its hook. What a stage returns goes to our loss or to the next stage, and neither changes it in place. What a
# block returns goes to the model's own code: there the warning stays.
_STAGE_RETURNS_VIEW = r"FSDP2-wrapped module \(FSDPStage\) returned a view tensor"


def apply_fsdp(
    stage: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: Mesh,
    layouts: dict[str, ParamLayout],
    compute_dtype: torch.dtype,
    whole: Mapping[str, nn.Parameter],
) -> dict[str, ParamLayout]:
    """Shard the blocks, then the rest of the stage, over ``dp_shard``; a no-op at degree 1.

    A unit of blocks is gathered and its gradients are reduced in one collective: each block by itself, or
    ``gradient_aggregation_group`` units a stage.

    With ``dp_replicate`` above 1 FSDP2 sums the gradients over the replicas too (HSDP). The gradients
    are summed, not averaged: the loss is already divided by the global number of tokens. They are summed
    in the dtype of the masters, whatever the dtype of the computation.

    Args:
        whole: parameters by name that every rank keeps whole.
    """
    strategy = mesh.strategy
    if strategy.dp_shard == 1:
        return layouts
    warnings.filterwarnings("ignore", message=_STAGE_RETURNS_VIEW)
    axes = ("dp_replicate", "dp_shard") if strategy.dp_replicate > 1 else ("dp_shard",)
    fsdp_mesh = mesh.device_mesh[axes]
    ignored = set(whole.values())
    # What enters a block stays as it is: some models keep their residual stream in fp32.
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype, reduce_dtype=master_dtype(compute_dtype), cast_forward_inputs=False
    )
    for unit in group_blocks(blocks, strategy.gradient_aggregation_group):
        fully_shard(
            unit, mesh=fsdp_mesh, reshard_after_forward=strategy.reshard, mp_policy=precision, ignored_params=ignored
        )
    # The root's weights (embedding, head, final norm) are needed at both ends of a pass: they stay gathered.
    fully_shard(stage, mesh=fsdp_mesh, reshard_after_forward=False, mp_policy=precision, ignored_params=ignored)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # Plain sums first: a factor alone asks gloo for a reduction that it does not have.
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    rank = mesh.coordinate("dp_shard")
    return {
        name: replace(layout, owned=layout.owned and rank == 0)
        if name in whole
        else _sharded(layout, strategy.dp_shard, rank)
        for name, layout in layouts.items()
    }


def group_blocks(blocks: Sequence[nn.Module], num_groups: int | None) -> list[list[nn.Module]]:
    """Neighbouring blocks in ``num_groups`` units as even as possible; None or too many: each by itself."""
    count = min(num_groups or len(blocks), len(blocks))
    ends = [len(blocks) * (i + 1) // count for i in range(count)]
    return [list(blocks[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _sharded(layout: ParamLayout, parts: int, rank: int) -> ParamLayout:
    rows = layout.local_shape[0]
    return replace(layout, shard_range=chunk_range(rows, parts, rank))


def set_last_micro_batch(stage: nn.Module, last: bool, reshard: bool) -> None:
    """Without a pipeline: gradients are reduced in the backward pass of the step's last micro-batch only.

    Unless weights are given back (``reshard``), those that were gathered stay so until then.
    """
    if isinstance(stage, FSDPModule):
        stage.set_reshard_after_backward(last or reshard)
        stage.set_is_last_backward(last)
        stage.set_requires_gradient_sync(last)


def settle_gradients(stage: nn.Module) -> None:
    """Sum gradients that were added outside of a backward pass in the dtype in which FSDP2 sums all others.

    It does so itself at the end of a backward pass only; what is added twice before the next one would be summed in
    the dtype of the computation. Written against torch 2.13.
    """
    if not isinstance(stage, FSDPModule):
        return
    for state in fully_shard.state(stage)._state_ctx.all_states:  # type: ignore[attr-defined]
        for parameter in (one for group in state._fsdp_param_groups for one in group.fsdp_params):
            unsharded = getattr(parameter, "_unsharded_param", None)
            if unsharded is None or unsharded.grad is None or parameter.reduce_dtype in (None, unsharded.grad.dtype):
                continue
            known, grad = parameter.unsharded_accumulated_grad, unsharded.grad
            unsharded.grad = None
            parameter.unsharded_accumulated_grad = (
                grad.to(parameter.reduce_dtype) if known is None else known.add_(grad)
            )
