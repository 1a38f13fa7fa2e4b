"""Dropout under every strategy: masks differ where tensors differ, and agree where tensors are replicated.

Two streams. Attention draws from torch's default generator, on this rank's heads and rows. It is seeded before each
block by (seed, step, micro-batch, data rank, block), so masks do not depend on the pipeline; and by the tensor rank
where each has heads of its own, so they differ there, and agree where attention stays whole on every tensor rank.
``nn.Dropout`` modules (those of adapters, of residual paths, of some attentions) draw by name: the mask of the whole
tensor follows from (seed, step, micro-batch, data rank, module), and a rank takes its part of it. Such a mask is the
same on all tensor ranks of a replicated tensor, and independent of tensor and pipeline degree.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.models.lora import ADAPTER, has_adapter
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import chunk_range
from shardwise.tensor.positions import Positions
from shardwise.tensor.table import ShardingTable, Style

_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)  # in the names of transformers' classes
_ATTENTION_DIMS = 4  # of attention weights


class DropoutStreams:
    """The place of a stage in a run's random numbers: which step and micro-batch it computes on this rank."""

    def __init__(self, seed: int, mesh: Mesh, stage: int) -> None:
        self._rows = f"{seed}/{mesh.data_rank}"
        self._tensor_rank, self._stage = mesh.coordinate("tp"), stage
        self._step, self._micro_batch = 0, -1

    def begin_step(self, step: int) -> None:
        """Micro-batches count from here."""
        self._step, self._micro_batch = step, -1

    def next_micro_batch(self) -> None:
        """A forward pass of the next micro-batch begins."""
        self._micro_batch += 1
        torch.manual_seed(_number(f"{self._place}/{self._tensor_rank}/{self._stage}"))

    def enter_block(self, name: str, own_heads: bool) -> None:
        """What the block ``name`` draws from torch's default generator begins; ``own_heads``: on heads of this rank."""
        torch.manual_seed(_number(f"{self._place}/{name}/{self._tensor_rank if own_heads else 'all'}"))

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
        heads: (rank, ranks) where attention weights [rows, heads, queries, keys] are those of this rank's heads.
        positions: of this rank in the sequence, where the residual stream is cut along it.
    """

    def __init__(
        self,
        p: float,
        name: str,
        streams: DropoutStreams,
        part: tuple[int, int, int] | None,
        positions: Positions | None = None,
        heads: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.p, self._name, self._streams, self._part, self._positions = p, name, streams, part, positions
        self._heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        if x.dim() == _ATTENTION_DIMS:
            return self._dropped(x, self._attention_mask(x))
        size, start, stop = self._part or (x.shape[-1], 0, x.shape[-1])
        shape = torch.Size((*x.shape[:-1], size))
        whole = shape if self._positions is None else self._positions.whole_shape(shape)
        mask = self._streams.mask(whole, 1.0 - self.p, self._name, x.device)[..., start:stop]
        mask = mask if self._positions is None else self._positions.own_mask(mask, x.shape)
        return self._dropped(x, mask)

    def _attention_mask(self, x: torch.Tensor) -> torch.Tensor:
        rank, ranks = self._heads or (0, 1)
        rows, heads, queries, keys = x.shape
        whole = torch.Size((rows, heads * ranks, queries, keys))
        mask = self._streams.mask(whole, 1.0 - self.p, self._name, x.device)
        return mask[:, rank * heads : (rank + 1) * heads]

    def _dropped(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask * (1.0 / (1.0 - self.p))


def install_dropout(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    table: ShardingTable,
    mesh: Mesh,
    streams: DropoutStreams,
    positions: Positions | None = None,
) -> None:
    """Let every ``nn.Dropout`` of ``model`` draw from ``streams``, and what else its ``blocks`` draw begin there.

    Modules on a replicated tensor keep every tensor rank in step; the adapter of a row layer sees a split one, and so
    does dropout of attention weights. Where the residual stream is cut along the sequence a rank takes its
    ``positions`` of the mask of all of them.
    """
    names = {id(module): name for name, module in model.named_modules()}
    own_heads = {names[id(block)]: _has_own_heads(names[id(block)], block, table) for block in blocks}
    for block in blocks:
        name = names[id(block)]
        block.register_forward_pre_hook(partial(_enter, streams, name, own_heads[name]))
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Dropout and module.p > 0]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        layer_name = name.removesuffix(f".lora_dropout.{ADAPTER}")
        layer = model.get_submodule(layer_name)
        part = None
        if has_adapter(layer) and table.style(layer_name) in (Style.ROW, Style.ROW_SPLIT):
            size = layer.base_layer.in_features
            part = (size, *chunk_range(size, table.degree, mesh.coordinate("tp")))
        is_split = any(own and name.startswith(f"{block}.") for block, own in own_heads.items())
        heads = (mesh.coordinate("tp"), table.degree) if is_split else None
        seeded = SeededDropout(module.p, layer_name, streams, part, positions, heads)
        setattr(model.get_submodule(parent), child, seeded)


def _enter(streams: DropoutStreams, name: str, own_heads: bool, block: nn.Module, *_: Any) -> None:
    if block.training:
        streams.enter_block(name, own_heads)


def _has_own_heads(name: str, block: nn.Module, table: ShardingTable) -> bool:
    """Whether attention in ``block`` sees this rank's heads alone: then the layer behind it is split by its inputs.

    False where the tensor axis leaves attention whole; True for a block that is split and has none.
    """
    inside = [part for part, module in block.named_modules() if part and _ATTENTION.search(type(module).__name__)]
    if table.degree == 1:
        return False
    if not inside:
        return True
    attention = tuple(f"{name}.{part}." for part in inside)
    return any(split.style is Style.ROW and key.startswith(attention) for key, split in table.modules.items())
