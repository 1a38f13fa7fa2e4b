"""Hugging Face folders: read a rank's slices from safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
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


@torch.no_grad()
def load_slices(folder: Path, shards: Iterable[Shard], expected: Iterable[str]) -> None:
    """Fill ``shards`` with their slices of a folder's tensors, converted to each shard's dtype.

    Args:
        expected: names of all parameters of the whole model, on whatever rank: a tensor that is none of
            them, and a parameter without a tensor, is refused.

    Raises:
        CheckpointError: names or shapes that do not match.
    """
    files = tensor_files(folder)
    _check_names(folder, set(files), set(expected))
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
                        f"{shard.layout.source} in {file}", f"has shape {shape}, the model {shard.layout.shape}"
                    )
                if shard.data.numel():
                    shard.data.copy_(view[shard.layout.slices])


def _check_names(folder: Path, found: set[str], expected: set[str]) -> None:
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing:
        raise CheckpointError(str(folder), f"no tensor for {len(missing)} parameters, such as {missing[0]}")
    if unknown:
        raise CheckpointError(str(folder), f"{len(unknown)} tensors have no parameter, such as {unknown[0]}")
