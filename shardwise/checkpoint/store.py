"""Training checkpoints on torch's distributed checkpoint (DCP), by parameter name.

Every rank writes the slices that it owns and reads the slices that it holds, so a checkpoint of one
layout loads under any other. A checkpoint is a folder ``checkpoints/step-00000010`` with DCP's files and
``state.json``; it is written beside and renamed when it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import save_error, writing
from shardwise.checkpoint.listing import STATE_FILE, checkpoint_name, complete_checkpoints, step_of
from shardwise.errors import CheckpointError
from shardwise.spec.layout import ParamLayout, Piece

SUPERSEDED = "superseded"


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


def tensor_state(values: Iterable[tuple[ParamLayout, torch.Tensor]], prefix: str) -> dict[str, SlicedTensor]:
    """``{prefix.name: slice}``; the copy of a tied weight goes by its owner's name."""
    return {f"{prefix}.{layout.source}": SlicedTensor.of(data, layout) for layout, data in values}


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: Mapping[str, SlicedTensor],
    state: Mapping[str, Any],
    source: Companions,
    write_more: Callable[[Path], None] | None = None,
) -> Path:
    """Write a checkpoint from all ranks together; on return it is complete under its name.

    Args:
        source: configuration and tokenizer, so that a checkpoint says by itself which model it is of.
        write_more: called by all ranks with the folder before it gets its name; writes what else belongs in it.

    Raises:
        SaveError: it could not be written. What was there before is untouched.
    """
    final = folder / checkpoint_name(step)
    draft = folder / f".{final.name}.draft"
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        with writing(final):
            draft.mkdir(parents=True)
            source.copy_to(draft)
    dist.barrier()
    try:
        dcp.save(dict(tensors), checkpoint_id=draft)
    except dcp.api.CheckpointException as error:
        # A failure is an error of a rank with its stack.
        first = next((failure[0] for failure in error.failures.values()), error)
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
        raise save_error(final, first) from error
    if write_more is not None:
        write_more(draft)
    if dist.get_rank() == 0:
        with writing(final):
            (draft / STATE_FILE).write_text(json.dumps(dict(state), indent=2) + "\n", encoding="utf-8")
            draft.rename(final)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, tensors: Mapping[str, SlicedTensor]) -> None:
    """Fill ``tensors`` in place with their slices; each rank reads only what it holds.

    Raises:
        CheckpointError: a tensor that the checkpoint lacks or has with another shape.
    """
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    for name, tensor in tensors.items():
        if name not in saved:
            raise CheckpointError(str(checkpoint), f"it holds no {name}", "Resume with the same model and optimizer")
        shape = tuple(saved[name].size)
        if shape != tensor.place.shape:
            raise CheckpointError(f"{name} in {checkpoint}", f"has shape {shape}, the model {tensor.place.shape}")
    dcp.load(dict(tensors), checkpoint_id=checkpoint)


def supersede(folder: Path, step: int) -> list[Path]:
    """Move the checkpoints beyond ``step`` into ``superseded/``: a run that goes on from an older one makes these
    steps anew, and neither rotation nor ``resume: auto`` may take the abandoned ones for its own.

    Returns:
        Where they are now. Called by one rank before the first step.
    """
    moved = []
    for path in complete_checkpoints(folder):
        if (step_of(path) or 0) > step:
            target = folder / SUPERSEDED / path.name
            number = 1
            while target.exists():
                number += 1
                target = folder / SUPERSEDED / f"{path.name}.{number}"
            target.parent.mkdir(exist_ok=True)
            moved.append(path.rename(target))
    return moved


def rotate(folder: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints; called by one rank after a new one is complete."""
    for path in complete_checkpoints(folder)[:-keep]:
        shutil.rmtree(path)
