"""Hugging Face folders: read a rank's slices from safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from shardwise.checkpoint.compose import boxes
from shardwise.checkpoint.naming import Naming
from shardwise.checkpoint.safetensors import TensorFolder
from shardwise.errors import CheckpointError
from shardwise.models.shard import Shard


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Dtype of a folder's first tensor, in which an export is written too; None without weights."""
    if not any(folder.glob("*.safetensors")):
        return None
    return next(iter(TensorFolder(folder).entries.values())).dtype


def load_slices(
    folder: Path,
    shards: Iterable[Shard],
    expected: Collection[str],
    aliases: Collection[str] = (),
    naming: Naming | None = None,
) -> None:
    """Fill ``shards`` with their slices of a folder's tensors, converted to each shard's dtype.

    Args:
        expected: names of all parameters of the whole model, on whatever rank.
        aliases: further names that a file may hold: those of tied copies.
        naming: how the parameters lie in the files; None where each is a tensor of its own name.

    Raises:
        CheckpointError: a parameter without a tensor, a tensor without a parameter, or another shape.
    """
    with TensorFolder(folder, naming.ignored if naming else ()) as stored:
        if naming is None:
            _check_names(folder, set(stored.entries), set(expected), set(aliases))
        for shard in shards:
            _load(stored, shard, naming)


def _load(stored: TensorFolder, shard: Shard, naming: Naming | None) -> None:
    layout = shard.layout
    if naming is not None:
        for box in boxes(naming.parts[layout.source], layout.ranges, first=True):
            stored.read_into(box.name, box.stored, box.turned(shard.data[box.local]))
        return
    entry = stored.entries[layout.source]
    if entry.shape != layout.shape:
        raise CheckpointError(
            f"{layout.source} in {entry.file}",
            f"has shape {entry.shape}, and the model of config.json {layout.shape}",
            "Use the config.json that belongs to the weights",
        )
    stored.read_into(layout.source, layout.ranges, shard.data)


def _check_names(folder: Path, found: set[str], expected: set[str], aliases: set[str]) -> None:
    missing = sorted(expected - found)
    # Old files carry rotary frequencies; they follow from the configuration and are recomputed.
    unknown = sorted(n for n in found - expected - aliases if not n.endswith(".rotary_emb.inv_freq"))
    remedy = "Use the config.json that belongs to the weights"
    if missing:
        raise CheckpointError(str(folder), f"no tensor for {len(missing)} parameters, such as {missing[0]}", remedy)
    if unknown:
        raise CheckpointError(str(folder), f"{len(unknown)} tensors have no parameter, such as {unknown[0]}", remedy)
