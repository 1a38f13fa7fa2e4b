"""Hugging Face folders: read a rank's slices from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from shardwise.errors import CheckpointError
from shardwise.models.shard import Shard

INDEX_FILE = "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, for a folder with one or many safetensors files.

    Raises:
        CheckpointError: no such file, one that the index names and that is missing, or one that is broken.
    """
    index = folder / INDEX_FILE
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        missing = sorted({file for file in names.values() if not (folder / file).exists()})
        if missing:
            raise CheckpointError(str(folder), f"{INDEX_FILE} names {missing[0]}, which is missing", "Copy it there")
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(str(folder), "it holds no .safetensors file", "Use a folder with safetensors weights")
    found: dict[str, Path] = {}
    for file in files:
        with _opened(file) as handle:
            found |= dict.fromkeys(handle.keys(), file)
    return found


def _opened(file: Path) -> safe_open:
    try:
        # pread: a mapped file counts whole against memory where column slices touch all its pages.
        return safe_open(file, framework="pt", backend="pread")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(str(file), f"not a readable safetensors file ({error})", "Copy it again") from error


def stored_dtype(folder: Path) -> torch.dtype | None:
    """Dtype of a folder's first tensor, in which an export is written too; None without weights."""
    if not any(folder.glob("*.safetensors")):
        return None
    name, file = next(iter(tensor_files(folder).items()))
    with _opened(file) as handle:
        return handle.get_slice(name)[:0].dtype  # type: ignore[no-any-return]


@torch.no_grad()
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
    files = tensor_files(folder)
    _check_names(folder, set(files), set(expected), set(aliases))
    by_file: dict[Path, list[Shard]] = {}
    for shard in shards:
        by_file.setdefault(files[shard.layout.source], []).append(shard)
    for file, held in by_file.items():
        with _opened(file) as handle:
            for shard in held:
                view = handle.get_slice(shard.layout.source)
                shape = tuple(view.get_shape())
                if shape != shard.layout.shape:
                    raise CheckpointError(
                        f"{shard.layout.source} in {file}",
                        f"has shape {shape}, and the model of config.json {shard.layout.shape}",
                        "Use the config.json that belongs to the weights",
                    )
                if shard.data.numel():
                    shard.data.copy_(view[shard.layout.slices])


def _check_names(folder: Path, found: set[str], expected: set[str], aliases: set[str]) -> None:
    missing = sorted(expected - found)
    # Old files carry rotary frequencies; they follow from the configuration and are recomputed.
    unknown = sorted(n for n in found - expected - aliases if not n.endswith(".rotary_emb.inv_freq"))
    remedy = "Use the config.json that belongs to the weights"
    if missing:
        raise CheckpointError(str(folder), f"no tensor for {len(missing)} parameters, such as {missing[0]}", remedy)
    if unknown:
        raise CheckpointError(str(folder), f"{len(unknown)} tensors have no parameter, such as {unknown[0]}", remedy)
