"""A Hugging Face model on the meta device: its modules and shapes without a byte of weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import PlanError


def build_on_meta(model_dir: Path, attn_implementation: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a folder's ``config.json``, all parameters and buffers on ``meta``, in training mode."""
    config = AutoConfig.from_pretrained(model_dir)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attn_implementation
        )
    return model.train()


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer of ``module`` memory on ``device``, uninitialised; ties stay ties."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            places.setdefault(id(parameter), []).append((child, name))
    module.to_empty(device=device)  # gives each place of a shared parameter a tensor of its own
    for (owner, owner_name), *copies in places.values():
        for child, name in copies:
            child._parameters[name] = owner._parameters[owner_name]


@torch.no_grad()
def recompute_buffers(model: PreTrainedModel) -> None:
    """Fill the buffers that no file holds (rotary frequencies) by the model's own initialisation.

    ``to_empty`` leaves them as garbage. They are set to NaN first, so that one that the model does
    not fill is found here and not in the loss.

    Raises:
        PlanError: a buffer that the model's initialisation leaves unset.
    """
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if not buffers:
            continue
        _require_no_parameters(name, module)
        for buffer in buffers.values():
            buffer.fill_(float("nan")) if buffer.is_floating_point() else buffer.zero_()
        model._init_weights(module)
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and bool(buffer.isnan().any()):
                raise PlanError(
                    f"buffer {name}.{buffer_name}",
                    "no file holds it and the model's own initialisation does not fill it",
                    "This architecture is not available in this version",
                )


def _require_no_parameters(name: str, module: nn.Module) -> None:
    # Re-running a module's initialisation would also overwrite its parameters.
    if next(module.parameters(recurse=False), None) is not None:
        raise PlanError(
            f"module {name}",
            "it holds buffers next to parameters, and they cannot be recomputed apart",
            "This architecture is not available in this version",
        )
