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

from shardwise.checkpoint.compose import Ranges, boxes
from shardwise.checkpoint.naming import Naming, StoredTensor, plain_naming
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
_DTYPES = {
    torch.float64: ("F64", np.float64),
    torch.float32: ("F32", np.float32),
    torch.bfloat16: ("BF16", np.uint16),
    torch.float16: ("F16", np.float16),
}


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes lie."""

    file: str
    offset: int


def export_model(
    source: Path,
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    shards: Iterable[Shard],
    dtype: torch.dtype,
    naming: Naming | None = None,
) -> None:
    """Write ``folder`` from all ranks together; it appears under its name when it is complete.

    Args:
        source: the input folder; configuration, tokenizer and chat template are copied from it.
        shapes: name -> shape of every parameter of the whole model, in the order of the files.
        dtype: dtype of the tensors in the files.
        naming: tensors, dtypes and files in place of ``shapes`` and ``dtype``, as the input has them.
    """
    if naming is None:
        naming = plain_naming(shapes, dtype)
    files = _assign_files(naming.tensors)

    def write(draft: Path) -> None:
        if dist.get_rank() == 0:
            copy_companions(source, draft)
        write_files(draft, files, naming, [(shard.layout.name, shard) for shard in shards])

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
    folder: Path, files: Mapping[str, list[str]], naming: Naming, named: Iterable[tuple[str, Shard]]
) -> None:
    """Write safetensors files into ``folder``, from all ranks together.

    Args:
        files: file name -> its tensors.
        named: name in ``naming.parts`` and the slice of it that this rank holds; only owners write.
    """
    tensors = naming.tensors
    if dist.get_rank() == 0:
        _write_headers(folder, files, tensors)
    dist.barrier()
    places = _places(files, tensors)
    for name, shard in named:
        if shard.layout.owned and shard.data.numel():
            for box in boxes(naming.parts[name], shard.layout.ranges):
                values = box.turned(shard.data[box.local])
                _write_box(folder, places[box.name], tensors[box.name], box.stored, values)
    dist.barrier()


def copy_companions(source: Path, folder: Path, names: Sequence[str] = COMPANIONS) -> None:
    """Copy configuration, tokenizer and chat template files, those that there are."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)


def _assign_files(tensors: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """File name -> its tensors, in order: as they came, else one file up to :data:`MAX_FILE_BYTES`."""
    by_file: dict[str, list[str]] = {}
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if tensor.file is not None:
            by_file.setdefault(tensor.file, []).append(name)
            continue
        num_bytes = _num_bytes(tensor)
        if groups[-1] and size + num_bytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if by_file:
        return by_file
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _num_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _header(names: list[str], tensors: Mapping[str, StoredTensor]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and the offset of each tensor in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, start = {}, 0
    for name in names:
        tensor = tensors[name]
        stop = start + _num_bytes(tensor)
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype][0],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        starts[name], start = start, stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in starts.items()} | {"": len(head) + start}


def _places(files: Mapping[str, list[str]], tensors: Mapping[str, StoredTensor]) -> dict[str, _Place]:
    return {
        name: _Place(file, offset)
        for file, names in files.items()
        for name, offset in _header(names, tensors)[1].items()
        if name
    }


def _write_headers(folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, StoredTensor]) -> None:
    for file, names in files.items():
        head, offsets = _header(names, tensors)
        with (folder / file).open("wb") as handle:
            handle.write(head)
            handle.truncate(offsets[""])
    if len(files) > 1 or "-of-" in next(iter(files)):
        total = sum(_num_bytes(tensor) for tensor in tensors.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_box(folder: Path, place: _Place, tensor: StoredTensor, ranges: Ranges, box: torch.Tensor) -> None:
    values = box.to(tensor.dtype).contiguous().cpu()
    bits = (values.view(torch.uint16) if tensor.dtype is torch.bfloat16 else values).numpy()
    kind = _DTYPES[tensor.dtype][1]
    whole = np.memmap(folder / place.file, dtype=kind, mode="r+", offset=place.offset, shape=tensor.shape)
    whole[tuple(slice(start, stop) for start, stop in ranges)] = bits
    whole.flush()
