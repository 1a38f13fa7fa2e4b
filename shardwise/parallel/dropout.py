"""Dropout under every strategy: masks differ where tensors differ, and agree where tensors are replicated.

Two streams. Attention draws from torch's default generator, on this rank's heads and rows; it is seeded for
each micro-batch by place, so masks differ between data ranks, tensor ranks and stages. ``nn.Dropout`` modules
(those of adapters, and of residual paths) draw by name: the mask of the whole tensor follows from (seed,
step, micro-batch, data rank, module), and a rank takes its part of it. Such a mask is the same on all
tensor ranks of a replicated tensor, and independent of tensor and pipeline degree.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.lora import ADAPTER, has_adapter
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import chunk_range
from shardwise.tensor.positions import Positions
from shardwise.tensor.table import ShardingTable, Style


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
        positions: of this rank in the sequence, where the residual stream is cut along it.
    """

    def __init__(
        self,
        p: float,
        name: str,
        streams: DropoutStreams,
        part: tuple[int, int, int] | None,
        positions: Positions | None = None,
    ) -> None:
        super().__init__()
        self.p, self._name, self._streams, self._part, self._positions = p, name, streams, part, positions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        size, start, stop = self._part or (x.shape[-1], 0, x.shape[-1])
        shape = torch.Size((*x.shape[:-1], size))
        whole = shape if self._positions is None else self._positions.whole_shape(shape)
        mask = self._streams.mask(whole, 1.0 - self.p, self._name, x.device)[..., start:stop]
        mask = mask if self._positions is None else self._positions.own_mask(mask, x.shape)
        return x * mask * (1.0 / (1.0 - self.p))


def install_dropout(
    model: nn.Module,
    table: ShardingTable,
    mesh: Mesh,
    streams: DropoutStreams,
    positions: Positions | None = None,
) -> None:
    """Let every ``nn.Dropout`` of ``model`` draw from ``streams``; without any it is a no-op.

    Those on a replicated tensor keep every tensor rank in step; the adapter of a row layer sees a split one. Where the
    residual stream is cut along the sequence a rank takes its ``positions`` of the mask of all of them.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Dropout and module.p > 0]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        layer_name = name.removesuffix(f".lora_dropout.{ADAPTER}")
        layer = model.get_submodule(layer_name)
        part = None
        if has_adapter(layer) and table.style(layer_name) in (Style.ROW, Style.ROW_SPLIT):
            size = layer.base_layer.in_features
            part = (size, *chunk_range(size, table.degree, mesh.coordinate("tp")))
        setattr(model.get_submodule(parent), child, SeededDropout(module.p, layer_name, streams, part, positions))


class _Dropouts(TorchFunctionMode):
    """Notes whether ``F.dropout`` draws on a tensor of the residual stream, which all tensor ranks hold alike."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
            # Attention weights have a dim of heads, and their masks may differ between tensor ranks.
            replicated = given["input"].dim() <= 3
            self.found |= replicated and given.get("training", True) and given.get("p", 0.5) > 0.0
        return func(*args, **(kwargs or {}))


def refuse_dropout_by_function(small: PreTrainedModel, degree: int) -> None:
    """Dropout modules draw by name, the same on all tensor ranks; a function called in a forward cannot be followed.

    Raises:
        PlanError: the model draws dropout on replicated tensors by a function.
    """
    trained = copy.deepcopy(small).train()
    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(trained.parameters()).device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Dropouts() as seen:
        trained(input_ids=ids, use_cache=False)
    if seen.found:
        rule = f"{type(small).__name__} drops out of tensors that all tensor ranks hold, and their masks would differ"
        raise PlanError(
            f"strategy.tp = {degree}",
            rule,
            "Use tp=1, or set the residual and embedding dropout in its config.json to 0",
        )
