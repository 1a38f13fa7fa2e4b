"""Slices of the tensors of safetensors files, read straight into their place.

The library's own ``get_slice`` either maps the file, and then column slices touch all its pages, or reads the
whole tensor for any slice of it. Here a slice costs its own bytes: the file's header says where each tensor
lies (https://github.com/huggingface/safetensors#format), and every contiguous run of a slice is one ``pread``.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError
from shardwise.spec.weight_files import INDEX_FILE, weight_files

# Whole numbers of 64 bits are tables that a model looks up; narrower ones are how quantised weights are stored.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
}
_BOUNCE_BYTES = 2**20  # of a buffer between the file and a slice of another dtype
_MAX_HEADER_BYTES = 100 * 10**6  # the library's own limit
_COPY_AGAIN = "Copy it again"
Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: ``start`` is the offset of its first byte."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class TensorFolder:
    """The tensors of a folder with one or many safetensors files; a context that closes the files again.

    A tensor of another dtype than :data:`DTYPES` is refused, or left out where its name matches one of the patterns
    ``ignored``.

    Raises:
        CheckpointError: no such file, one that the index names and that is missing, or one that is broken.
    """

    def __init__(self, folder: Path, ignored: Sequence[str] = ()) -> None:
        self.entries: dict[str, Entry] = {}
        for file, names in weight_files(folder).items():
            found = read_header(file, ignored)
            missing = sorted(n for n in names if n not in found and not _matches(n, ignored)) if names else []
            if missing:
                raise CheckpointError(str(file), f"it lacks {missing[0]}, which {INDEX_FILE} places there", _COPY_AGAIN)
            self.entries |= found if names is None else {name: found[name] for name in names if name in found}
        self._stack = ExitStack()
        self._open: dict[Path, int] = {}

    def __enter__(self) -> TensorFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._open.clear()

    @torch.no_grad()
    def read_into(self, name: str, ranges: Ranges, out: torch.Tensor) -> None:
        """Fill ``out`` with the slice ``ranges`` (half-open, one for each dim), converted to its dtype.

        Reads only the bytes of the slice, and takes no memory but a buffer of a MiB where the dtypes differ or ``out``
        does not lie in one run.
        """
        entry = self.entries[name]
        assert out.shape == torch.Size(stop - start for start, stop in ranges), (name, out.shape, ranges)
        if not out.numel():
            return
        if out.is_contiguous():
            self._read_flat(entry, ranges, out.view(-1))
        elif out.numel() * out.element_size() > _BOUNCE_BYTES:
            for half, part in _halves(ranges, out):
                self.read_into(name, half, part)
        else:
            whole = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            self._read_flat(entry, ranges, whole.view(-1))
            out.copy_(whole)

    def _read_flat(self, entry: Entry, ranges: Ranges, out: torch.Tensor) -> None:
        descriptor, size = self._descriptor(entry.file), entry.dtype.itemsize
        direct = out.dtype is entry.dtype and out.device.type == "cpu"
        starts, length = contiguous_runs(entry.shape, ranges)
        buffer = out if direct else torch.empty(min(out.numel(), _BOUNCE_BYTES // size), dtype=entry.dtype)
        filled = done = 0  # elements in the buffer, elements that have left it
        for first, count in _pieces(starts, length, len(buffer)):
            if filled + count > len(buffer):
                out[done : done + filled].copy_(buffer[:filled])
                done, filled = done + filled, 0
            _pread(descriptor, _bytes(buffer[filled : filled + count]), entry.start + first * size, entry.file)
            filled += count
        if not direct:
            out[done:].copy_(buffer[:filled])

    def _descriptor(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
            self._stack.callback(os.close, self._open[file])
        return self._open[file]


def _halves(ranges: Ranges, out: torch.Tensor) -> Iterator[tuple[Ranges, torch.Tensor]]:
    """Both halves of the first dim that has more than one element."""
    dim = next(dim for dim, size in enumerate(out.shape) if size > 1)
    start, stop = ranges[dim]
    middle = (start + stop) // 2
    for low, high in ((start, middle), (middle, stop)):
        yield [*ranges[:dim], (low, high), *ranges[dim + 1 :]], out.narrow(dim, low - start, high - low)


def contiguous_runs(shape: Sequence[int], ranges: Ranges) -> tuple[np.ndarray, int]:
    """A slice of a row-major tensor as runs: the first element of each, in order, and their common length.

    >>> contiguous_runs((4, 6), [(1, 3), (2, 5)])
    (array([ 8, 14]), 3)
    """
    length, dim = 1, len(shape)
    while dim and (dim == len(shape) or ranges[dim] == (0, shape[dim])):
        dim -= 1
        length *= ranges[dim][1] - ranges[dim][0]
    starts = np.zeros(1, dtype=np.int64)
    for axis in range(dim):
        starts = (starts[:, None] * shape[axis] + np.arange(*ranges[axis])).reshape(-1)
    if dim < len(shape):
        starts = starts * shape[dim] + ranges[dim][0]
    return starts * math.prod(shape[dim + 1 :]), length


def _pieces(starts: np.ndarray, length: int, limit: int) -> Iterator[tuple[int, int]]:
    """``(first element, number)`` of reads of at most ``limit`` elements."""
    for start in starts.tolist():
        for first in range(0, length, limit):
            yield start + first, min(limit, length - first)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.view(torch.uint8).numpy())


def _pread(descriptor: int, into: memoryview, offset: int, file: Path) -> None:
    while len(into):
        count = os.preadv(descriptor, [into], offset)
        if count == 0:
            raise CheckpointError(str(file), "it became shorter while it was read", _COPY_AGAIN)
        into, offset = into[count:], offset + count


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def read_header(file: Path, ignored: Sequence[str] = ()) -> dict[str, Entry]:
    """Name -> entry of a safetensors file; others than :data:`DTYPES` whose name matches ``ignored`` are left out.

    Raises:
        CheckpointError: a file that cannot be read, that is no safetensors file, whose data do not end where its
            header says (it was cut off), or with a tensor of a dtype that no weight has (quantised ones).
    """
    try:
        with file.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("its header does not fit into it")
            header: dict[str, Any] = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        kept = {n: value for n, value in header.items() if value["dtype"] in DTYPES or not _matches(n, ignored)}
        entries = {name: _entry(file, name, value, 8 + length) for name, value in kept.items()}
        end = max((value["data_offsets"][1] for value in header.values()), default=0)
        if 8 + length + end != size:
            raise ValueError(f"its data should end at byte {8 + length + end}, and it has {size}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(str(file), f"not a readable safetensors file ({error})", _COPY_AGAIN) from error
    return entries


def _entry(file: Path, name: str, value: Any, data: int) -> Entry:
    if value["dtype"] not in DTYPES:
        rule = f"has dtype {value['dtype']}; weights are read in {', '.join(DTYPES)}"
        raise CheckpointError(f"{name} in {file}", rule, "Use weights that are not quantised")
    if int(value["data_offsets"][0]) < 0:
        raise ValueError(f"{name} begins at byte {value['data_offsets'][0]} of the data")
    entry = Entry(file, DTYPES[value["dtype"]], tuple(map(int, value["shape"])), data + int(value["data_offsets"][0]))
    size = math.prod(entry.shape) * entry.dtype.itemsize
    if int(value["data_offsets"][1]) - int(value["data_offsets"][0]) != size:
        raise ValueError(f"{name} of shape {entry.shape} does not have {size} bytes")
    return entry
