"""Which part of a parameter a rank holds: the one description that every room reads.

Initialisation draws by it, loading reads by it, the gradient norm counts by it, checkpoints and
exports write by it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def chunk_range(size: int, parts: int, index: int) -> tuple[int, int]:
    """The range of part ``index`` when ``size`` elements are cut as :func:`torch.chunk` cuts them.

    All parts hold ``ceil(size / parts)`` elements, but the last ones, which may hold fewer or none.
    """
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True)
class ParamLayout:
    """The slice of one parameter on one rank.

    The tensor axis cuts dim ``tp_dim`` first; the ``dp_shard`` axis then cuts dim 0 of what is left.

    Args:
        name: module parameter name, without any wrapper's prefix.
        shape: shape of the whole parameter.
        tp_dim: the dim that the tensor axis cuts, None where each tensor rank holds all of it.
        tp_range: this rank's range of ``tp_dim``.
        shard_range: this rank's range of dim 0 of the tensor-local part, None without dp_shard.
        owned: exactly one rank owns each element; only owned elements are counted in norms and saved.
        tp_partial: replicated over the tensor axis, but each rank's gradient is only its share.
        tied_to: set on the second copy of a tied weight; the name of its owner.
        has_copy: set on a tied weight whose second copy is on another stage.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_range: tuple[int, int] = (0, 0)
    shard_range: tuple[int, int] | None = None
    owned: bool = True
    tp_partial: bool = False
    tied_to: str | None = None
    has_copy: bool = False

    @property
    def source(self) -> str:
        """The name under which the value is known in files and checkpoints."""
        return self.tied_to or self.name

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The half-open range of each dim of the whole parameter that this rank holds."""
        ranges = [(0, size) for size in self.shape]
        if self.tp_dim is not None:
            ranges[self.tp_dim] = self.tp_range
        if self.shard_range is not None:
            start = ranges[0][0]
            ranges[0] = (start + self.shard_range[0], start + self.shard_range[1])
        return tuple(ranges)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.ranges)

    @property
    def offsets(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.ranges)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.ranges)


def covers(layouts: Sequence[ParamLayout]) -> bool:
    """Whether the owned slices of one parameter, over all ranks, hold every element exactly once."""
    owned = [layout for layout in layouts if layout.owned and 0 not in layout.local_shape]
    if not owned:
        return False
    total = 1
    for size in owned[0].shape:
        total *= size
    counted = 0
    for index, layout in enumerate(owned):
        size = 1
        for length in layout.local_shape:
            size *= length
        counted += size
        for other in owned[:index]:
            if all(a[0] < b[1] and b[0] < a[1] for a, b in zip(layout.ranges, other.ranges, strict=True)):
                return False
    return counted == total
