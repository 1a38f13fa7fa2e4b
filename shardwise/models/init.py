"""Random initial values that do not depend on the layout.

A parameter is drawn in chunks of 1,024 rows, each by its own counter-based generator (Philox), keyed by
(seed, name, chunk). A rank draws the chunks that its pieces touch and keeps its part, so every layout
starts from the same bits. The distribution is the one that the model's own ``_init_weights`` asks for:
it is run on meta tensors, and what it calls is recorded. What it computes in another way, and what it leaves as a
constructor made it, is made whole (:mod:`shardwise.models.own_init`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as hf_init

from shardwise.errors import PlanError
from shardwise.models.build import initialised_modules
from shardwise.models.own_init import OwnInit, constructed
from shardwise.models.shard import Shard, take
from shardwise.spec.layout import ParamLayout, Piece

ROWS_PER_CHUNK = 1024


@dataclass(frozen=True)
class Distribution:
    """``normal(mean, std)``, ``uniform(mean - bound, mean + bound)`` or a constant.

    Args:
        zero_row: the padding row of an embedding.
        cut: the interval outside of which normal values are drawn again.
    """

    mean: float
    std: float
    zero_row: int | None = None
    bound: float = 0.0
    cut: tuple[float, float] | None = None


@dataclass(frozen=True)
class Given:
    """All values of a parameter, known before."""

    tensor: torch.Tensor

    def values(self, seed: int, name: str) -> torch.Tensor:
        """The values; they depend on nothing."""
        return self.tensor


Initial = Distribution | OwnInit | Given


def distributions(model: PreTrainedModel) -> dict[str, Initial]:
    """Parameter name -> initial values, as the model's ``_init_weights`` and its constructors would make them.

    Args:
        model: on the meta device, before any split. Its parameters are not changed.

    Raises:
        PlanError: a parameter that the model leaves as it is constructed, with values that depend on chance or size.
    """
    record = _Record()
    with record.recording():
        for owner, _, module in initialised_modules(model):
            record.current = owner, module
            owner._init_weights(module)
    result: dict[str, Initial] = {}
    unknown = []
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in record.found:
            result[name] = record.found[key]
        elif key in record.computed:
            result[name] = OwnInit.of(*record.computed[key], parameter)
        else:
            unknown.append(name)
    for name, value in (constructed(model, unknown) if unknown else {}).items():
        result[name] = Distribution(float(value), 0.0) if value.dim() == 0 else Given(value)
    missing = next((name for name in unknown if name not in result), None)
    if missing is not None:
        raise PlanError(f"model_init = random, {missing}", "its initial distribution is not known", "Use pretrained")
    for name, module in model.named_modules():
        drawn = result.get(f"{name}.weight")
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and isinstance(drawn, Distribution):
            result[f"{name}.weight"] = replace(drawn, zero_row=module.padding_idx)
    return result


class _Record:
    """What the functions of ``transformers.initialization`` are asked; within ``recording`` they draw nothing.

    ``found`` are distributions by the identity of their parameter. ``computed`` are the model and the module that gave
    a parameter its values, where they follow no distribution that is known here.
    """

    def __init__(self) -> None:
        self.found: dict[int, Distribution] = {}
        self.computed: dict[int, tuple[PreTrainedModel, nn.Module]] = {}
        self.current: tuple[PreTrainedModel, nn.Module] | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replaces the functions, and puts them back."""
        others = [name for name in dir(hf_init) if name.endswith("_") and not name.startswith("_")]
        replacements: dict[str, Callable[..., torch.Tensor]] = dict.fromkeys(others, self._other) | {
            "normal_": self._normal,
            "uniform_": self._uniform,
            "trunc_normal_": self._trunc_normal,
            "constant_": self._constant,
            "zeros_": lambda tensor: self._constant(tensor, 0.0),
            "ones_": lambda tensor: self._constant(tensor, 1.0),
        }
        saved = {name: getattr(hf_init, name) for name in replacements}
        try:
            for name, function in replacements.items():
                setattr(hf_init, name, function)
            yield
        finally:
            for name, function in saved.items():
                setattr(hf_init, name, function)

    def _keep(self, tensor: torch.Tensor, distribution: Distribution) -> torch.Tensor:
        self.found[id(tensor)] = distribution
        self.computed.pop(id(tensor), None)
        return tensor

    def _normal(self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: object) -> torch.Tensor:
        return self._keep(tensor, Distribution(mean, std))

    def _uniform(self, tensor: torch.Tensor, a: float = 0.0, b: float = 1.0, **_: object) -> torch.Tensor:
        return self._keep(tensor, Distribution((a + b) / 2, 0.0, bound=(b - a) / 2))

    def _trunc_normal(
        self, tensor: torch.Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, **_: object
    ) -> torch.Tensor:
        return self._keep(tensor, Distribution(mean, std, cut=(a, b)))

    def _constant(self, tensor: torch.Tensor, val: float) -> torch.Tensor:
        return self._keep(tensor, Distribution(val, 0.0))

    def _other(self, tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        assert self.current is not None
        self.found.pop(id(tensor), None)
        self.computed[id(tensor)] = self.current
        return tensor


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
    values = generator.standard_normal(shape, dtype=np.float32) * np.float32(dist.std)
    if dist.cut is not None:
        low, high = (np.float32(end - dist.mean) for end in dist.cut)
        outside = (values < low) | (values > high)
        while outside.any():
            values[outside] = generator.standard_normal(int(outside.sum()), dtype=np.float32) * np.float32(dist.std)
            outside = (values < low) | (values > high)
    return values


@torch.no_grad()
def fill_random(shards: Iterable[Shard], dists: Mapping[str, Initial], seed: int) -> None:
    """Fill every shard with its part of the random initial values."""
    for shard in shards:
        initial = dists[shard.layout.source]
        if not isinstance(initial, Distribution):
            shard.data.copy_(take(initial.values(seed, shard.layout.source), shard.layout))
            continue
        for piece in shard.layout.pieces:
            _fill(shard.data[piece.local_slices], piece, shard.layout, initial, seed)


def _fill(out: torch.Tensor, piece: Piece, layout: ParamLayout, dist: Distribution, seed: int) -> None:
    """Fill ``out``, the elements of ``piece``."""
    if not layout.shape:  # one number, without rows
        out.copy_(torch.from_numpy(draw((1,), (0, 1), layout.source, seed, dist))[0])
        return
    start, stop = piece.whole[0]
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
