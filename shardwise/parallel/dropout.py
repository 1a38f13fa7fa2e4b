"""Dropout under every strategy: masks differ where tensors differ, and agree where tensors are replicated.

Two streams. Attention draws from torch's default generator, on this rank's heads and rows; it is seeded for
each micro-batch by place, so masks differ between data ranks, tensor ranks and stages. ``nn.Dropout`` modules
(those of adapters, and of residual paths) draw by name: the mask of the whole tensor follows from (seed,
step, micro-batch, data rank, module), and a rank takes its part of it. Such a mask is the same on all
tensor ranks of a replicated tensor, and independent of tensor and pipeline degree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from shardwise.models.lora import ADAPTER, has_adapter
from shardwise.models.sharding import ShardingTable, Style
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import chunk_range


class DropoutStreams:
    """The place of a stage in a run's random numbers: which step and micro-batch it computes on this rank."""

    def __init__(self, seed: int, mesh: Mesh, stage: int) -> None:
        self._rows = f"{seed}/{mesh.data_rank}"
        self._rank = f"{mesh.coordinate('tp')}/{stage}"
        self._step, self._micro_batch = 0, -1

    def begin_step(self, step: int) -> None:
        """Micro-batches count from here."""
        self._step, self._micro_batch = step, -1

    def next_micro_batch(self) -> None:
        """A forward pass of the next micro-batch begins."""
        self._micro_batch += 1
        torch.manual_seed(_number(f"{self._place}/{self._rank}"))

    def mask(self, shape: torch.Size, keep: float, name: str, device: torch.device) -> torch.Tensor:
        """Bool tensor of ``shape``, True with probability ``keep``, that the tensor ranks agree on."""
        generator = torch.Generator(device).manual_seed(_number(f"{self._place}/{name}"))
        return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(keep, generator=generator)

    def recompute_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For ``torch.utils.checkpoint``: contexts of the first pass and of its repetition."""
        return nullcontext(), self._again(self._step, self._micro_batch)

    @contextmanager
    def _again(self, step: int, micro_batch: int) -> Iterator[None]:
        saved = self._step, self._micro_batch
        self._step, self._micro_batch = step, micro_batch
        try:
            yield
        finally:
            self._step, self._micro_batch = saved

    @property
    def _place(self) -> str:
        return f"{self._rows}/{self._step}/{self._micro_batch}"


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class SeededDropout(nn.Module):
    """``nn.Dropout`` with masks from :class:`DropoutStreams`.

    Args:
        part: (size, start, stop) of the last dim of the whole tensor where this rank computes a part of it.
    """

    def __init__(self, p: float, name: str, streams: DropoutStreams, part: tuple[int, int, int] | None) -> None:
        super().__init__()
        self.p, self._name, self._streams, self._part = p, name, streams, part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        size, start, stop = self._part or (x.shape[-1], 0, x.shape[-1])
        shape = torch.Size((*x.shape[:-1], size))
        mask = self._streams.mask(shape, 1.0 - self.p, self._name, x.device)[..., start:stop]
        return x * mask * (1.0 / (1.0 - self.p))


def install_dropout(model: nn.Module, table: ShardingTable, mesh: Mesh, streams: DropoutStreams) -> None:
    """Let every ``nn.Dropout`` of ``model`` draw from ``streams``; without any it is a no-op.

    Those on a replicated tensor keep every tensor rank in step; the adapter of a row layer sees a split one.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Dropout and module.p > 0]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        layer_name = name.removesuffix(f".lora_dropout.{ADAPTER}")
        layer = model.get_submodule(layer_name)
        part = None
        if has_adapter(layer) and table.styles.get(layer_name) in (Style.ROW, Style.ROW_SPLIT):
            size = layer.base_layer.in_features
            part = (size, *chunk_range(size, table.degree, mesh.coordinate("tp")))
        setattr(model.get_submodule(parent), child, SeededDropout(module.p, layer_name, streams, part))
