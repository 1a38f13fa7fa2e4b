"""Training checkpoints on torch's distributed checkpoint (DCP), by parameter name.

Every rank writes the slices that it owns and reads the slices that it holds, so a checkpoint of one
layout loads under any other. A checkpoint is a folder ``checkpoints/step-00000010`` with DCP's files,
``state.json`` and ``files.json``, the list of all; :mod:`shardwise.checkpoint.save_job` writes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.checkpoint.reader import IndexReader
from shardwise.errors import CheckpointError
from shardwise.spec.layout import ParamLayout, Piece


class SlicedTensor(torch.Tensor):
    """A rank's part of a whole tensor, in the terms of DCP's protocol for tensors (``_Checkpointable``).

    Each piece of it is one of DCP's chunks, known by its first element in the whole.
    """

    place: ParamLayout

    @staticmethod
    def of(data: torch.Tensor, layout: ParamLayout) -> SlicedTensor:
        """``data`` (shares its storage) as the pieces ``layout.pieces`` of a tensor of shape ``layout.shape``."""
        sliced = data.detach().as_subclass(SlicedTensor)
        sliced.place = layout
        return sliced

    def size(self, dim: int | None = None) -> Any:
        """The whole tensor's shape, which DCP compares with what was saved (as a DTensor's ``size`` is)."""
        return torch.Size(self.place.shape) if dim is None else self.place.shape[dim]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.as_subclass(torch.Tensor))
        size = torch.Size(self.place.shape)
        return [
            WriteItem(
                MetadataIndex(fqn, _chunk(piece).offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk(piece), properties, size),
            )
            for piece in self.place.pieces
            if piece.owned
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk(piece) for piece in self.place.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (piece,) = (piece for piece in self.place.pieces if _chunk(piece).offsets == index.offset)
        return self.as_subclass(torch.Tensor)[piece.local_slices]


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    offsets = torch.Size(start for start, _ in piece.whole)
    return ChunkStorageMetadata(offsets, torch.Size(stop - start for start, stop in piece.whole))


def owned_bytes(tensors: Mapping[str, SlicedTensor]) -> int:
    """Bytes that this rank writes of ``tensors``."""
    return sum(
        piece.num_elements * tensor.element_size()
        for tensor in tensors.values()
        for piece in tensor.place.pieces
        if piece.owned
    )


def snapshot(tensors: Mapping[str, SlicedTensor]) -> dict[str, SlicedTensor]:
    """A copy, in the memory of the host, of those tensors of which this rank owns something."""
    return {
        name: SlicedTensor.of(tensor.as_subclass(torch.Tensor).detach().to("cpu", copy=True), tensor.place)
        for name, tensor in tensors.items()
        if any(piece.owned for piece in tensor.place.pieces)
    }


def tensor_state(values: Iterable[tuple[ParamLayout, torch.Tensor]], prefix: str) -> dict[str, SlicedTensor]:
    """``{prefix.name: slice}``; the copy of a tied weight goes by its owner's name."""
    return {f"{prefix}.{layout.source}": SlicedTensor.of(data, layout) for layout, data in values}


def load_checkpoint(checkpoint: Path, tensors: Mapping[str, SlicedTensor], *, alone: bool = False) -> None:
    """Fill ``tensors`` in place with their slices; each rank reads only what it holds.

    Args:
        alone: one process reads, without a process group.

    Raises:
        CheckpointError: a tensor that the checkpoint lacks or has with another shape, or an index that would run code.
    """
    saved = IndexReader(checkpoint).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(str(checkpoint), f"it holds no {name}", "Resume with the same model and optimizer")
        shape = tuple(saved[name].size)
        if shape != tensor.place.shape:
            raise CheckpointError(f"{name} in {checkpoint}", f"has shape {shape}, the model {tensor.place.shape}")
    with warnings.catch_warnings():
        if alone:  # that it is, torch thinks worth a warning
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=IndexReader(checkpoint), no_dist=alone)
