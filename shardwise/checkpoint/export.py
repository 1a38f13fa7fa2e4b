"""Export to a Hugging Face folder: every rank writes its own slices into the safetensors files.

No tensor is gathered. A safetensors file is a JSON header and the tensors' bytes one after the other
(https://github.com/huggingface/safetensors#format), so rank 0 writes headers and sizes, and each owner
then writes its slices in place.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.compose import boxes
from shardwise.checkpoint.naming import Naming, StoredTensor
from shardwise.checkpoint.safetensors import DTYPES, contiguous_runs
from shardwise.errors import SaveError
from shardwise.models.shard import Shard
from shardwise.spec.layout import Ranges
from shardwise.spec.weight_files import INDEX_FILE, WEIGHTS_FILE
from shardwise.units import format_bytes

MAX_FILE_BYTES = 5 * 10**9
_WEIGHTS = re.compile(r"(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}  # of dtypes in a file's header


@dataclass(frozen=True)
class _Place:
    """Where a tensor's bytes lie."""

    file: str
    offset: int


def export_model(
    source: Companions, folder: Path, naming: Naming, shards: Iterable[Shard], *, replace: bool = True
) -> None:
    """Write ``folder`` from all ranks together.

    Args:
        source: what is copied beside the weights.
        naming: the tensors of the files, with their dtypes and, where they are given, the files' names.
        replace: the folder is the run's own, and what it held goes; else its other files stay.
    """
    files = assign_files(naming.tensors)

    def write(draft: Path) -> None:
        if dist.get_rank() == 0:
            source.copy_to(draft)
        write_files(draft, files, naming, [(shard.layout.name, shard) for shard in shards])

    replace_folder(folder, write) if replace else write_into(folder, write)


def write_into(folder: Path, write: Callable[[Path], None]) -> None:
    """Let all ranks ``write`` into a draft inside ``folder``, whose files then take their places one by one.

    What else the folder holds is the user's and stays; weight files of an earlier export, which the new ones do not
    replace by name, are removed.
    """
    folder = folder.absolute()

    def place(draft: Path) -> None:
        for path in folder.iterdir():
            if _WEIGHTS.fullmatch(path.name) and not (draft / path.name).exists():
                path.unlink()
        for path in list(draft.iterdir()):
            path.replace(folder / path.name)
        draft.rmdir()

    _write_draft(folder / ".export.draft", write, place)


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let all ranks ``write`` into a draft beside ``folder``, which then takes its place in one move."""

    def place(draft: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)

    _write_draft(folder.with_name(f".{folder.name}.draft"), write, place)


def _write_draft(draft: Path, write: Callable[[Path], None], place: Callable[[Path], None]) -> None:
    """All ranks ``write`` into a new folder; when the last has done so, rank 0 puts it in its place."""
    with writing(draft):
        if dist.get_rank() == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
        dist.barrier()
        write(draft)
        dist.barrier()
        if dist.get_rank() == 0:
            place(draft)
    dist.barrier()


def write_files(
    folder: Path, files: Mapping[str, list[str]], naming: Naming, named: Iterable[tuple[str, Shard]]
) -> None:
    """Write safetensors files into ``folder``, from all ranks together.

    Args:
        files: file name -> its tensors.
        named: name in ``naming.parts`` and the slice of it that this rank holds; only owners write.
    """
    if dist.get_rank() == 0:
        write_headers(folder, files, naming.tensors)
    dist.barrier()
    write_slices(folder, files, naming, named)
    dist.barrier()


def write_slices(
    folder: Path, files: Mapping[str, list[str]], naming: Naming, named: Iterable[tuple[str, Shard]]
) -> None:
    """Write what this process owns of ``named`` into files whose headers are there; arguments as above."""
    places = _places(files, naming.tensors)
    for name, shard in named:
        owned = [piece for piece in shard.layout.pieces if piece.owned]
        if not owned:
            continue  # the second copy of a tied weight has no name in the files
        for box in boxes(naming.parts[name], owned):
            values = box.turned(shard.data[box.local])
            _write_box(folder, places[box.name], naming.tensors[box.name], box.stored, values)


def assign_files(tensors: Mapping[str, StoredTensor], max_bytes: int | None = None) -> dict[str, list[str]]:
    """File name -> its tensors, in order: as they came, else one file up to :data:`MAX_FILE_BYTES`.

    With ``max_bytes`` they are parted anew; a tensor that is larger has a file of its own.
    """
    by_file: dict[str, list[str]] = {}
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if tensor.file is not None and max_bytes is None:
            by_file.setdefault(tensor.file, []).append(name)
            continue
        num_bytes = tensor_bytes(tensor)
        if groups[-1] and size + num_bytes > (max_bytes or MAX_FILE_BYTES):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if by_file:
        return by_file
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def tensor_bytes(tensor: StoredTensor) -> int:
    """Bytes of a tensor's values."""
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _header(names: list[str], tensors: Mapping[str, StoredTensor]) -> tuple[bytes, dict[str, int]]:
    """The bytes before the data, and the offset of each tensor in the file."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, start = {}, 0
    for name in names:
        tensor = tensors[name]
        stop = start + tensor_bytes(tensor)
        entries[name] = {
            "dtype": _NAMES[tensor.dtype],
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


def write_headers(folder: Path, files: Mapping[str, list[str]], tensors: Mapping[str, StoredTensor]) -> None:
    """Make the files with their headers and all the room they need, and the index of several; by one process."""
    for file, names in files.items():
        head, offsets = _header(names, tensors)
        with writing(folder / file), (folder / file).open("wb") as handle:
            handle.write(head)
            handle.flush()
            # All room is taken now: a full disk is met by one rank, before any has written its part.
            os.posix_fallocate(handle.fileno(), 0, offsets[""])
    if len(files) > 1 or "-of-" in next(iter(files)):
        total = sum(tensor_bytes(tensor) for tensor in tensors.values())
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_box(folder: Path, place: _Place, tensor: StoredTensor, ranges: Ranges, box: torch.Tensor) -> None:
    """Write a box of a tensor, run by run; a full disk is an error here (a mapped file would kill the process)."""
    values = torch.empty(box.shape, dtype=tensor.dtype).copy_(box)
    bits = memoryview(values.reshape(-1).view(torch.uint8).numpy())
    starts, length = contiguous_runs(tensor.shape, ranges)
    size, path = tensor.dtype.itemsize, folder / place.file
    with writing(path), path.open("r+b", buffering=0) as file:
        for number, start in enumerate(starts.tolist()):
            run = bits[number * length * size : (number + 1) * length * size]
            _pwrite(file.fileno(), run, place.offset + start * size)


def _pwrite(descriptor: int, data: memoryview, offset: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the file system into one message, with the room that is left.

    Raises:
        SaveError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise save_error(path, error) from error


def save_error(path: Path, error: BaseException, needed_bytes: int = 0) -> SaveError:
    """What to say of ``error``, met while ``path`` was written; ``needed_bytes``: of all that was to be written."""
    folder = next(parent for parent in path.absolute().parents if parent.is_dir())
    room = f"{format_bytes(shutil.disk_usage(folder).free)} are free there"
    if needed_bytes:
        room = f"it needs {format_bytes(needed_bytes)}, and {room}"
    reason = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return SaveError(str(path), f"could not be written ({reason}); {room}", "What was there is untouched")
