"""Initial values that no distribution describes: what a module's own code computes, and what its constructor leaves.

They are made whole, one parameter at a time, on every rank alike, so a rank takes its part of the same values.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.models.build import causal_model, freeze_stored_buffers
from shardwise.models.shrink import shrink


@dataclass(frozen=True)
class OwnInit:
    """The values that ``_init_weights`` of ``owner`` gives the parameter ``name`` of ``module``.

    ``module`` is a copy of its own, on meta: nothing splits it or fills it.
    """

    owner: PreTrainedModel
    module: nn.Module
    name: str

    @classmethod
    def of(cls, owner: PreTrainedModel, module: nn.Module, parameter: nn.Parameter) -> OwnInit:
        """For a ``parameter`` that lies in ``module`` or below."""
        name = next(name for name, other in module.named_parameters() if other is parameter)
        return cls(owner, copy.deepcopy(module), name)

    @torch.no_grad()
    def values(self, seed: int, name: str) -> torch.Tensor:
        """All of the parameter, float32; random numbers depend on ``seed`` and on ``name`` alone."""
        module = copy.deepcopy(self.module)
        holder, _, key = self.name.rpartition(".")
        parameter = module.get_parameter(self.name)
        whole = nn.Parameter(torch.full(parameter.shape, float("nan")), requires_grad=False)
        module.get_submodule(holder)._parameters[key] = whole
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int.from_bytes(digest[:7], "little"))
            self.owner._init_weights(module)
        return whole.detach()


def constructed(model: PreTrainedModel, names: list[str]) -> dict[str, torch.Tensor]:
    """What constructors leave in the parameters ``names``, where that does not depend on chance or on sizes.

    Seen on two small copies of unlike widths; where no wider one can be built, on two alike, of which only values of
    the parameter's own shape count. A value stands for the whole parameter, or is all of it.

    Returns:
        Name -> a tensor of no dims, or of the parameter's shape, for those that are known.
    """
    pair, alike = _pair(model, (1, 2)), False
    if not pair:
        pair, alike = _pair(model, (1, 1)), True
    seen: dict[tuple[str, str], list[torch.Tensor]] = {}
    for copied in pair:
        for name, parameter in copied.named_parameters():
            seen.setdefault(_kind(copied, name), []).append(parameter.detach())
    found = {}
    for name in names:
        shape = model.get_parameter(name).shape
        copies = seen.get(_kind(model, name), [])
        if alike and any(copied.shape != shape for copied in copies):  # what depends on sizes would not show
            continue
        value = _agreed(copies, shape)
        if value is not None:
            found[name] = value
    return found


def _kind(model: nn.Module, name: str) -> tuple[str, str]:
    holder, _, key = name.rpartition(".")
    return type(model.get_submodule(holder)).__qualname__, key


def _pair(model: PreTrainedModel, scales: tuple[int, int]) -> list[PreTrainedModel]:
    """Small copies of other random numbers; empty where they cannot be built."""
    try:
        return [_small(shrink(model.config, scale=s), model.dtype, seed) for seed, s in enumerate(scales)]
    except Exception:  # whatever a foreign class raises: then nothing is known
        return []


def _small(config: object, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), _nan_where_unset():
        torch.manual_seed(seed)
        model = causal_model(config, dtype=dtype)
    freeze_stored_buffers(model)
    return model


def _agreed(values: list[torch.Tensor], shape: torch.Size) -> torch.Tensor | None:
    if not values or not all(value.isfinite().all() for value in values):
        return None
    first = values[0].float()
    if all(bool((value.float() == first.flatten()[0]).all()) for value in values if first.numel()):
        return first.flatten()[0] if first.numel() else None
    same = all(value.shape == shape and torch.equal(value.float(), first) for value in values)
    return first if same else None


@contextmanager
def _nan_where_unset() -> Iterator[None]:
    """Memory that a constructor asks for and does not fill holds NaN."""
    saved = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(saved[0], warn_only=saved[1])
