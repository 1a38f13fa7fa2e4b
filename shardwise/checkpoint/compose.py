"""Parameters that are composed of the tensors of files: stacked, joined, cut and turned, but not computed.

:class:`Composed` stands in for a tensor while transformers' own conversion runs, and notes where each box of
the result comes from. So a rank can read, or write, its slice of a merged weight without the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.spec.layout import Piece, Ranges, intersection


@dataclass(frozen=True)
class Part:
    """A box of the whole that is a box of the tensor ``name``.

    Args:
        start: the box's first element, in dims of the whole.
        size: its extent, in dims of the whole.
        source: its first element, in dims of the tensor.
        dims: for each dim of the whole the tensor's dim that runs along it, -1 where it only stacks (extent 1).
    """

    name: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    source: tuple[int, ...]
    dims: tuple[int, ...]

    def overlap(self, ranges: Ranges) -> Ranges | None:
        """What of ``ranges`` (in dims of the whole) lies in this part; None where nothing does."""
        own = tuple((first, first + extent) for first, extent in zip(self.start, self.size, strict=True))
        return intersection(ranges, own)

    def in_tensor(self, ranges: Ranges) -> Ranges:
        """``ranges`` of the whole, inside of this part, as ranges of the tensor."""
        found = [(first, first + 1) for first in self.source]
        for dim, (low, high), first in zip(self.dims, ranges, self.start, strict=True):
            if dim >= 0:
                shift = self.source[dim] - first
                found[dim] = (low + shift, high + shift)
        return tuple(found)

    def turned(self, box: torch.Tensor) -> torch.Tensor:
        """A view of ``box``, a box of the whole in this part, with the tensor's dims."""
        kept = [dim for dim in self.dims if dim >= 0]
        flat = box[tuple(0 if dim < 0 else slice(None) for dim in self.dims)]  # a view, unlike reshape
        return flat.permute([kept.index(dim) for dim in range(len(kept))])


@dataclass(frozen=True)
class Box:
    """What a piece of the whole has in common with one part.

    ``local`` addresses it in the local tensor; ``stored`` are its ranges in the tensor ``name``.
    """

    name: str
    local: tuple[slice, ...]
    stored: Ranges
    part: Part

    def turned(self, local: torch.Tensor) -> torch.Tensor:
        """A view of the elements at ``local`` with the tensor's dims."""
        return self.part.turned(local)


def boxes(parts: Sequence[Part], pieces: Sequence[Piece], *, first: bool = False) -> list[Box]:
    """The boxes that make up ``pieces`` of a whole.

    Args:
        first: of parts that hold the same elements (a tied weight that is stored twice) only the first.
    """
    found = []
    for piece in pieces:
        seen = set()
        for part in parts:
            both = part.overlap(piece.whole)
            if both is None or (first and part.start in seen):
                continue
            seen.add(part.start)
            found.append(Box(part.name, piece.place(both), part.in_tensor(both), part))
    return found


class Composed:
    """A tensor of which only shape and origin are known. Knows the operations that move elements, no others."""

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape, self.parts = torch.Size(shape), tuple(parts)

    @staticmethod
    def whole(name: str, shape: Sequence[int]) -> Composed:
        """The tensor ``name`` as it is."""
        zeros = (0,) * len(shape)
        return Composed(shape, [Part(name, zeros, tuple(shape), zeros, tuple(range(len(shape))))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS:
            raise NotImplementedError(f"{getattr(func, '__name__', func)} on slices")
        return _FUNCTIONS[func](*args, **(kwargs or {}))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Composed:
        return self

    def squeeze(self, dim: int) -> Composed:
        dim %= self.ndim
        if self.shape[dim] != 1:
            return self
        return Composed(_without(self.shape, dim), [_squeezed(part, dim) for part in self.parts])


def _without(values: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*values[:dim], *values[dim + 1 :])


def _squeezed(part: Part, dim: int) -> Part:
    return replace(part, start=_without(part.start, dim), size=_without(part.size, dim), dims=_without(part.dims, dim))


def _shifted(part: Part, dim: int, by: int) -> Part:
    start = list(part.start)
    start[dim] += by
    return replace(part, start=tuple(start))


def _cat(tensors: Sequence[Composed], dim: int = 0) -> Composed:
    dim %= tensors[0].ndim
    if any(_without(tensor.shape, dim) != _without(tensors[0].shape, dim) for tensor in tensors):
        raise ValueError(f"shapes {[tuple(tensor.shape) for tensor in tensors]} cannot be joined along dim {dim}")
    parts, length = [], 0
    for tensor in tensors:
        parts += [_shifted(part, dim, length) for part in tensor.parts]
        length += tensor.shape[dim]
    shape = list(tensors[0].shape)
    shape[dim] = length
    return Composed(shape, parts)


def _stack(tensors: Sequence[Composed], dim: int = 0) -> Composed:
    dim %= tensors[0].ndim + 1

    def raised(tensor: Composed) -> Composed:
        def insert(values: Sequence[int], value: int) -> tuple[int, ...]:
            return (*values[:dim], value, *values[dim:])

        parts = [
            replace(p, start=insert(p.start, 0), size=insert(p.size, 1), dims=insert(p.dims, -1)) for p in tensor.parts
        ]
        return Composed(insert(tensor.shape, 1), parts)

    return _cat([raised(tensor) for tensor in tensors], dim)


def _narrow(tensor: Composed, dim: int, start: int, stop: int) -> Composed:
    """Elements ``start`` to ``stop`` of ``dim``."""
    parts = []
    for part in tensor.parts:
        low, high = max(part.start[dim], start), min(part.start[dim] + part.size[dim], stop)
        if low >= high:
            continue
        first, size, source = list(part.start), list(part.size), list(part.source)
        if part.dims[dim] >= 0:
            source[part.dims[dim]] += low - part.start[dim]
        first[dim], size[dim] = low - start, high - low
        parts.append(replace(part, start=tuple(first), size=tuple(size), source=tuple(source)))
    shape = list(tensor.shape)
    shape[dim] = stop - start
    return Composed(shape, parts)


def _split(tensor: Composed, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Composed, ...]:
    dim %= tensor.ndim
    length = tensor.shape[dim]
    sizes = split_size_or_sections
    if isinstance(sizes, int):
        sizes = [min(sizes, length - first) for first in range(0, length, sizes)]
    if sum(sizes) != length:
        raise ValueError(f"{length} elements do not split into {list(sizes)}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(_narrow(tensor, dim, end - size, end) for end, size in zip(ends, sizes, strict=True))


def _chunk(tensor: Composed, chunks: int, dim: int = 0) -> tuple[Composed, ...]:
    return _split(tensor, max(1, -(-tensor.shape[dim] // chunks)), dim)


def _transpose(tensor: Composed, dim0: int, dim1: int) -> Composed:
    def swap(values: Sequence[int]) -> tuple[int, ...]:
        swapped = list(values)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        return tuple(swapped)

    parts = [replace(p, start=swap(p.start), size=swap(p.size), dims=swap(p.dims)) for p in tensor.parts]
    return Composed(swap(tensor.shape), parts)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.split: _split,
    torch.chunk: _chunk,
    torch.transpose: _transpose,
}
