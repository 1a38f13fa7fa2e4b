"""Hugging Face folders: read a rank's slices from safetensors files."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from shardwise.checkpoint.safetensors import TensorFolder
from shardwise.errors import CheckpointError
from shardwise.models.shard import Shard


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Dtype of a folder's first tensor, in which an export is written too; None without weights."""
    if not any(folder.glob("*.safetensors")):
        return None
    return next(iter(TensorFolder(folder).entries.values())).dtype


def load_slices(
    folder: Path, shards: Iterable[Shard], expected: Collection[str], aliases: Collection[str] = ()
) -> None:
    """Fill ``shards`` with their slices of a folder's tensors, converted to each shard's dtype.

    Args:
        expected: names of all parameters of the whole model, on whatever rank.
        aliases: further names that a file may hold: those of tied copies.

    Raises:
        CheckpointError: a parameter without a tensor, a tensor without a parameter, or another shape.
    """
    with TensorFolder(folder) as stored:
        _check_names(folder, set(stored.entries), set(expected), set(aliases))
        for shard in shards:
            entry = stored.entries[shard.layout.source]
            if entry.shape != shard.layout.shape:
                raise CheckpointError(
                    f"{shard.layout.source} in {entry.file}",
                    f"has shape {entry.shape}, and the model of config.json {shard.layout.shape}",
                    "Use the config.json that belongs to the weights",
                )
            stored.read_into(shard.layout.source, shard.layout.ranges, shard.data)


def _check_names(folder: Path, found: set[str], expected: set[str], aliases: set[str]) -> None:
    missing = sorted(expected - found)
    # Old files carry rotary frequencies; they follow from the configuration and are recomputed.
    unknown = sorted(n for n in found - expected - aliases if not n.endswith(".rotary_emb.inv_freq"))
    remedy = "Use the config.json that belongs to the weights"
    if missing:
        raise CheckpointError(str(folder), f"no tensor for {len(missing)} parameters, such as {missing[0]}", remedy)
    if unknown:
        raise CheckpointError(str(folder), f"{len(unknown)} tensors have no parameter, such as {unknown[0]}", remedy)
