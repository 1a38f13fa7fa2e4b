"""Random initial values that do not depend on the layout.

A parameter is drawn in chunks of 1,024 rows, each by its own counter-based generator (Philox), keyed by
(seed, name, chunk). A rank draws the chunks that its pieces touch and keeps its part, so every layout
starts from the same bits. The distribution is the one that the model's own ``_init_weights`` asks for:
it is run on meta tensors, and what it calls is recorded. Small parameters that it computes by a formula of its own
(the decay rates of Mamba) are computed so, whole, on every rank.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as hf_init

from shardwise.errors import PlanError
from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout, Piece

ROWS_PER_CHUNK = 1024
_MOST_COMPUTED = 2**24  # elements of a module's parameters that every rank computes whole


@dataclass(frozen=True)
class Distribution:
    """``normal(mean, std)``, ``uniform(mean - bound, mean + bound)`` or a constant.

    ``zero_row`` is the padding row of an embedding. ``values``: the whole parameter, in the place of a distribution.
    """

    mean: float
    std: float
    zero_row: int | None = None
    bound: float = 0.0
    values: np.ndarray | None = None


def distributions(model: PreTrainedModel, seed: int = 0) -> dict[str, Distribution]:
    """Parameter name -> distribution, as the model's ``_init_weights`` would draw it.

    Args:
        model: on the meta device, before any split. Its parameters are not changed.
        seed: of what the model draws by a formula of its own.

    Raises:
        PlanError: a parameter whose initialisation is neither normal nor constant nor small.
    """
    found: dict[int, Distribution] = {}
    with _recorded(found):
        for module in _children_first(model):
            model._init_weights(module)
    for name, module in model.named_modules():
        own = module.parameters(recurse=False)
        if any(id(parameter) not in found for parameter in own):
            found |= _computed(model, module, name, seed, found)
    result = {}
    for name, parameter in model.named_parameters():
        if id(parameter) not in found:
            raise PlanError(f"model_init = random, {name}", "its initial distribution is not known", "Use pretrained")
        result[name] = found[id(parameter)]
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            drawn = result[f"{name}.weight"]
            result[f"{name}.weight"] = Distribution(drawn.mean, drawn.std, module.padding_idx)
    return result


def _computed(
    model: PreTrainedModel, module: nn.Module, name: str, seed: int, found: Mapping[int, Distribution]
) -> dict[int, Distribution]:
    """The values of those parameters of ``module`` that its initialisation computes, from a copy of it on the CPU."""
    missing = {key: p for key, p in module.named_parameters(recurse=False) if id(p) not in found}
    if sum(parameter.numel() for parameter in missing.values()) > _MOST_COMPUTED:
        return {}
    real = copy.copy(module)
    real._parameters = {
        key: nn.Parameter(torch.full(p.shape, float("nan"))) if key in missing else p
        for key, p in module._parameters.items()
    }
    number = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(number, "little"))
        model._init_weights(real)
    values = {key: real._parameters[key].detach() for key in missing}
    return {
        id(missing[key]): Distribution(0.0, 0.0, values=value.float().numpy())
        for key, value in values.items()
        if bool(value.isfinite().all())
    }


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    """As transformers walks: a block may draw its children's weights anew (GPT-2 scales its projections)."""
    for child in module.children():
        yield from _children_first(child)
    yield module


@contextmanager
def _recorded(found: dict[int, Distribution]) -> Iterator[None]:
    """Within it, the functions of ``transformers.initialization`` note what they are asked and draw nothing."""

    def normal(tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> torch.Tensor:
        found[id(tensor)] = Distribution(mean, std)
        return tensor

    def constant(tensor: torch.Tensor, value: float) -> torch.Tensor:
        found[id(tensor)] = Distribution(value, 0.0)
        return tensor

    def unknown(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        found.pop(id(tensor), None)
        return tensor

    others = [name for name in dir(hf_init) if name.endswith("_") and not name.startswith("_")]
    replacements: dict[str, Callable[..., torch.Tensor]] = dict.fromkeys(others, unknown) | {
        "normal_": normal,
        "constant_": constant,
        "zeros_": lambda tensor: constant(tensor, 0.0),
        "ones_": lambda tensor: constant(tensor, 1.0),
        "copy_": lambda tensor, *_: tensor,
    }
    saved = {name: getattr(hf_init, name) for name in replacements}
    try:
        for name, function in replacements.items():
            setattr(hf_init, name, function)
        yield
    finally:
        for name, function in saved.items():
            setattr(hf_init, name, function)


def draw(shape: tuple[int, ...], rows: tuple[int, int], name: str, seed: int, dist: Distribution) -> np.ndarray:
    """Rows ``rows`` (half-open, of dim 0) of the parameter ``name``, float32 [rows, *shape[1:]]."""
    start, stop = rows
    out = np.full((stop - start, *shape[1:]), dist.mean, dtype=np.float32)
    if dist.std != 0.0 or dist.bound != 0.0:
        for chunk in range(start // ROWS_PER_CHUNK, -(-stop // ROWS_PER_CHUNK)):
            first = chunk * ROWS_PER_CHUNK
            last = min(first + ROWS_PER_CHUNK, shape[0])
            key = hashlib.sha256(f"{seed}/{name}/{chunk}".encode()).digest()[:16]
            generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
            values = _values(generator, (last - first, *shape[1:]), dist)
            low, high = max(start, first), min(stop, last)
            out[low - start : high - start] += values[low - first : high - first]
    if dist.zero_row is not None and start <= dist.zero_row % shape[0] < stop:
        out[dist.zero_row % shape[0] - start] = 0.0
    return out


def _values(generator: np.random.Generator, shape: tuple[int, ...], dist: Distribution) -> np.ndarray:
    """Float32 values around 0."""
    if dist.bound != 0.0:
        return (generator.random(shape, dtype=np.float32) * 2 - 1) * np.float32(dist.bound)
    return generator.standard_normal(shape, dtype=np.float32) * np.float32(dist.std)


@torch.no_grad()
def fill_random(shards: Iterable[Shard], dists: dict[str, Distribution], seed: int) -> None:
    """Fill every shard with its part of the random initial values."""
    for shard in shards:
        for piece in shard.layout.pieces:
            _fill(shard.data[piece.local_slices], piece, shard.layout, dists[shard.layout.source], seed)


def _fill(out: torch.Tensor, piece: Piece, layout: ParamLayout, dist: Distribution, seed: int) -> None:
    """Fill ``out``, the elements of ``piece``."""
    start, stop = piece.whole[0]
    if dist.values is not None:
        out.copy_(torch.from_numpy(np.ascontiguousarray(dist.values[piece.whole_slices])))
        return
    if len(layout.shape) > 2:  # stacked experts: each is drawn by itself
        for index in range(start, stop):
            part = draw(layout.shape[1:], piece.whole[1], f"{layout.source}/{index}", seed, dist)
            out[index - start].copy_(_cut(part, piece.whole_slices[2:]))
        return
    for first in range(start, stop, ROWS_PER_CHUNK):  # one chunk in memory at a time
        last = min(first + ROWS_PER_CHUNK, stop)
        values = draw(layout.shape, (first, last), layout.source, seed, dist)
        out[first - start : last - start].copy_(_cut(values, piece.whole_slices[1:]))


def _cut(values: np.ndarray, slices: tuple[slice, ...]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values[(slice(None), *slices)]))
