"""Hugging Face folders: read a rank's slices from safetensors files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.checkpoint.compose import boxes
from shardwise.checkpoint.naming import Naming
from shardwise.checkpoint.safetensors import TensorFolder
from shardwise.models.shard import Shard


def load_slices(folder: Path, shards: Iterable[Shard], naming: Naming) -> None:
    """Fill ``shards`` with their slices of a folder's tensors, converted to each shard's dtype.

    Args:
        naming: how the parameters lie in the files; that every one has its tensors has been seen to there.

    Raises:
        CheckpointError: a file that is broken or becomes shorter.
    """
    with TensorFolder(folder, naming.ignored) as stored:
        for shard in shards:
            for box in boxes(naming.parts[shard.layout.source], shard.layout.pieces, first=True):
                stored.read_into(box.name, box.stored, box.turned(shard.data[box.local]))
