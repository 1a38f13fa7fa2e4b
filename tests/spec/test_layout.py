"""Parts of a parameter are cut as torch cuts them, and their owners hold every element once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardwise.spec.layout import ParamLayout, chunk_range, covers


def _grid(shape: tuple[int, ...], tp_dim: int | None, tp: int, dp_shard: int) -> list[ParamLayout]:
    """The layouts of one parameter on tp x dp_shard ranks, as the engine makes them."""
    layouts = []
    for t in range(tp):
        layout = ParamLayout("w", shape, owned=tp_dim is not None or t == 0)
        if tp_dim is not None:
            layout = replace(layout, tp_dim=tp_dim, tp_range=chunk_range(shape[tp_dim], tp, t))
        rows = layout.local_shape[0]
        layouts += [replace(layout, shard_range=chunk_range(rows, dp_shard, d)) for d in range(dp_shard)]
    return layouts


@hypothesis_settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 20))
def test_a_part_is_what_torch_chunk_gives(size: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))  # torch leaves empty parts out; every rank has one here
    assert [list(range(*chunk_range(size, parts, index))) for index in range(parts)] == chunks


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


@hypothesis_settings(deadline=None)
@given(st.data(), shapes, st.integers(1, 4), st.integers(1, 4))
def test_a_grid_of_ranks_covers_the_parameter_and_less_or_more_does_not(
    data: st.DataObject, shape: tuple[int, ...], tp: int, dp_shard: int
) -> None:
    tp_dim = data.draw(st.none() | st.integers(0, len(shape) - 1))
    layouts = _grid(shape, tp_dim, tp, dp_shard)
    assert covers(layouts)
    counts = np.zeros(shape, dtype=int)
    for layout in layouts:
        counts[layout.slices] += layout.owned
        assert counts[layout.slices].shape == layout.local_shape
    assert (counts == 1).all()
    owners = [layout for layout in layouts if layout.owned and 0 not in layout.local_shape]
    removed = data.draw(st.sampled_from(owners))
    assert not covers([layout for layout in layouts if layout is not removed])
    assert not covers([*layouts, removed])
    assert covers([*layouts, replace(removed, owned=False)])


def test_the_data_axis_cuts_what_the_tensor_axis_left() -> None:
    layout = ParamLayout("w", (12, 5), tp_dim=0, tp_range=(6, 12), shard_range=(2, 4))
    assert layout.ranges == ((8, 10), (0, 5))
    assert layout.offsets == (8, 0)
    assert layout.local_shape == (2, 5)
    assert np.arange(60).reshape(12, 5)[layout.slices].tolist() == [[40, 41, 42, 43, 44], [45, 46, 47, 48, 49]]
    columns = ParamLayout("w", (12, 6), tp_dim=1, tp_range=(3, 6), shard_range=(0, 4))
    assert columns.ranges == ((0, 4), (3, 6))


@pytest.mark.parametrize(
    "layouts",
    [
        [],
        [ParamLayout("w", (4,), owned=False)],
        [ParamLayout("w", (4,), shard_range=(0, 2))],
        # Two that overlap and leave a gap of the same size: the sum alone would not tell.
        [ParamLayout("w", (4,), shard_range=(0, 2)), ParamLayout("w", (4,), shard_range=(1, 3))],
    ],
)
def test_what_does_not_cover(layouts: list[ParamLayout]) -> None:
    assert not covers(layouts)


def test_a_scalar_is_covered_by_one_owner() -> None:
    assert covers([ParamLayout("scale", ())])
    assert not covers([ParamLayout("scale", ()), ParamLayout("scale", ())])


def test_a_tied_copy_is_known_by_its_owners_name() -> None:
    assert ParamLayout("lm_head.weight", (4, 2), tied_to="embed.weight").source == "embed.weight"
    assert ParamLayout("embed.weight", (4, 2), has_copy=True).source == "embed.weight"
