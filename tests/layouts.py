"""Layouts of one parameter on a grid of ranks, cut at random, and what they hold by plain concatenation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st

from shardwise.spec.layout import ParamLayout, chunk_range, over_tensor_ranks


def cut(
    draw: Callable[[int, int], int], shape: tuple[int, ...], tp_dim: int | None, tp: int, dp_shard: int, name: str = "w"
) -> list[ParamLayout]:
    """One parameter on tp x dp_shard ranks: each part of ``tp_dim`` is cut at random between the tensor ranks.

    A part may be held by further ranks too. Tensor ranks come first in the result, shards of one rank together.

    Args:
        draw: a number within two bounds.
    """
    layouts = [ParamLayout(name, shape, owned=rank == 0) for rank in range(tp)]
    if tp_dim is not None:
        cuts = sorted(draw(0, shape[tp_dim]) for _ in range(draw(1, 3) * tp - 1))
        parts = list(enumerate(itertools.pairwise([0, *cuts, shape[tp_dim]])))
        more = {index for index, _ in parts if draw(0, 3) == 0}
        ranges = [tuple(p for i, p in parts if i % tp == r or (i in more and draw(0, 1))) for r in range(tp)]
        layouts = [over_tensor_ranks(ParamLayout(name, shape), tp_dim, ranges, rank) for rank in range(tp)]
    return [
        replace(layout, shard_range=chunk_range(layout.local_shape[0], dp_shard, rank))
        for layout in layouts
        for rank in range(dp_shard)
    ]


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...] | None = None) -> list[ParamLayout]:
    """One parameter, of any shape where none is given, on up to 4 x 4 ranks."""
    shape = shape or tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    tp_dim = draw(st.none() | st.integers(0, len(shape) - 1))
    tp, dp_shard = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    return cut(lambda low, high: draw(st.integers(low, high)), shape, tp_dim, tp, dp_shard)


def random_grid(seed: int, shape: tuple[int, ...], tp: int, dp_shard: int, name: str) -> list[ParamLayout]:
    """The same by ``seed``, its ``tp_dim`` too."""
    rng = random.Random(f"{seed} {name}")
    return cut(rng.randint, shape, rng.choice([None, *range(len(shape))]), tp, dp_shard, name)


def held(whole: torch.Tensor, layout: ParamLayout) -> torch.Tensor:
    """What a layout holds of ``whole``, in words of torch alone."""
    if layout.tp_dim is not None:
        parts = [whole.narrow(layout.tp_dim, start, stop - start) for start, stop in layout.tp_ranges]
        whole = torch.cat(parts, layout.tp_dim)
    return whole if layout.shard_range is None else whole[slice(*layout.shard_range)]


def put(whole: torch.Tensor, layout: ParamLayout, values: torch.Tensor, *, owned: bool = False) -> None:
    """Write ``values``, of shape ``layout.local_shape``, to their place in ``whole``; on request only what is owned."""
    for piece in layout.pieces:
        if piece.owned or not owned:
            whole[piece.whole_slices] = values[piece.local_slices]
