"""Export to a Hugging Face folder: every rank writes its own slices into the safetensors files.

No tensor is gathered. A safetensors file is a JSON header and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format), so rank 0 writes headers and sizes, and each owner
then writes its slices in place.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwise.checkpoint.safetensors import INDEX_FILE
from shardwise.models.shard import Shard

MAX_FILE_BYTES = 5 * 10**9
WEIGHTS_FILE = "model.safetensors"
# What makes a folder usable beside its weights; copied from the input as it is.
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_DTYPES = {torch.float32: ("F32", np.float32), torch.bfloat16: ("BF16", np.uint16), torch.float16: ("F16", np.float16)}


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes lie."""

    file: str
    offset: int


def export_model(
    source: Path, folder: Path, shapes: Mapping[str, tuple[int, ...]], shards: Iterable[Shard], dtype: torch.dtype
) -> None:
    """Write ``folder`` from all ranks together; it appears under its name when it is complete.

    Args:
        source: the input folder; configuration, tokenizer and chat template are copied from it.
        shapes: name -> shape of every parameter of the whole model, in the order of the files.
        dtype: dtype of the tensors in the files.
    """
    files = _assign_files(shapes, dtype)

    def write(draft: Path) -> None:
        if dist.get_rank() == 0:
            copy_companions(source, draft)
        write_files(draft, files, shapes, [(shard.layout.name, shard) for shard in shards], dtype)

    write_whole(folder, write)


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Let all ranks ``write`` into a draft beside ``folder``, which then takes its place in one move."""
    draft = folder.with_name(f".{folder.name}.draft")
    if dist.get_rank() == 0:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
    dist.barrier()
    write(draft)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    dist.barrier()


def write_files(
    folder: Path,
    files: Mapping[str, list[str]],
    shapes: Mapping[str, tuple[int, ...]],
    named: Iterable[tuple[str, Shard]],
    dtype: torch.dtype,
) -> None:
    """Write safetensors files into ``folder``, from all ranks together.

    Args:
        files: file name -> its tensors.
        named: name in the file and the slice of it that this rank holds; only owners write.
    """
    if dist.get_rank() == 0:
        _write_headers(folder, files, shapes, dtype)
    dist.barrier()
    places = _places(files, shapes, dtype)
    for name, shard in named:
        if shard.layout.owned and shard.data.numel():
            _write_slice(folder, places[name], shard, dtype)
    dist.barrier()


def copy_companions(source: Path, folder: Path, names: Sequence[str] = COMPANIONS) -> None:
    """Copy configuration, tokenizer and chat template files, those that there are."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _assign_files(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, list[str]]:
    """File name -> its tensors, in order; one file up to :data:`MAX_FILE_BYTES`."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and size + num_bytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _header(
    names: list[str], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and the offset of each tensor in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, start = {}, 0
    for name in names:
        stop = start + math.prod(shapes[name]) * dtype.itemsize
        entries[name] = {"dtype": _DTYPES[dtype][0], "shape": list(shapes[name]), "data_offsets": [start, stop]}
        starts[name], start = start, stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in starts.items()} | {"": len(head) + start}


def _places(
    files: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> dict[str, _Place]:
    return {
        name: _Place(file, offset)
        for file, names in files.items()
        for name, offset in _header(names, shapes, dtype)[1].items()
        if name
    }


def _write_headers(
    folder: Path, files: Mapping[str, list[str]], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> None:
    for file, names in files.items():
        head, offsets = _header(names, shapes, dtype)
        with (folder / file).open("wb") as handle:
            handle.write(head)
            handle.truncate(offsets[""])
    if len(files) > 1:
        total = sum(math.prod(shape) * dtype.itemsize for shape in shapes.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_slice(folder: Path, place: _Place, shard: Shard, dtype: torch.dtype) -> None:
    values = shard.data.to(dtype).contiguous().cpu()
    bits = (values.view(torch.uint16) if dtype is torch.bfloat16 else values).numpy()
    whole = np.memmap(
        folder / place.file, dtype=_DTYPES[dtype][1], mode="r+", offset=place.offset, shape=shard.layout.shape
    )
    whole[shard.layout.slices] = bits
    whole.flush()
