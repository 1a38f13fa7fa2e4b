"""Parts of a parameter are cut as torch cuts them, and their owners hold every element once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardwise.spec.layout import ParamLayout, Piece, chunk_range, covers, over_tensor_ranks
from tests.layouts import grids, held


@hypothesis_settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 20))
def test_a_part_is_what_torch_chunk_gives(size: int, parts: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)]
    chunks += [[]] * (parts - len(chunks))  # torch leaves empty parts out; every rank has one here
    assert [list(range(*chunk_range(size, parts, index))) for index in range(parts)] == chunks


@hypothesis_settings(deadline=None)
@given(grids())
def test_pieces_tile_the_local_tensor_with_the_elements_of_the_ranges(layouts: list[ParamLayout]) -> None:
    whole = torch.arange(torch.Size(layouts[0].shape).numel()).view(layouts[0].shape)
    for layout in layouts:
        want = held(whole, layout)
        assert want.shape == layout.local_shape
        got, times = torch.full_like(want, -1), torch.zeros_like(want)
        for piece in layout.pieces:
            got[piece.local_slices] = whole[piece.whole_slices]
            times[piece.local_slices] += 1
        assert torch.equal(got, want)
        assert torch.equal(times, torch.ones_like(times))


@hypothesis_settings(deadline=None)
@given(grids())
def test_pieces_are_as_few_as_can_be_and_in_order(layouts: list[ParamLayout]) -> None:
    for layout in layouts:
        dim = layout.tp_dim or 0
        for before, after in itertools.pairwise(layout.pieces):
            touch = before.whole[dim][1] == after.whole[dim][0]
            assert before.owned is not after.owned if touch else before.whole[dim][1] < after.whole[dim][0]


@hypothesis_settings(deadline=None)
@given(st.data(), grids())
def test_a_grid_of_ranks_covers_the_parameter_and_less_or_more_does_not(
    data: st.DataObject, layouts: list[ParamLayout]
) -> None:
    assert covers(layouts)
    counts = torch.zeros(layouts[0].shape, dtype=torch.int64)
    for layout in layouts:
        for piece in layout.pieces:
            counts[piece.whole_slices] += piece.owned
    assert torch.equal(counts, torch.ones_like(counts))
    owners = [layout for layout in layouts if any(piece.owned for piece in layout.pieces)]
    removed = data.draw(st.sampled_from(owners))
    assert not covers([layout for layout in layouts if layout is not removed])
    assert not covers([*layouts, removed])
    assert covers([*layouts, replace(removed, owned=False)])


def test_an_ordinary_slice_is_one_piece_that_the_data_axis_cuts_further() -> None:
    rows = ParamLayout("w", (12, 5), tp_dim=0, tp_ranges=((6, 12),), shard_range=(2, 4))
    assert rows.pieces == (Piece(((8, 10), (0, 5)), ((0, 2), (0, 5))),)
    assert rows.local_shape == (2, 5)
    columns = ParamLayout("w", (12, 6), tp_dim=1, tp_ranges=((3, 6),), shard_range=(0, 4))
    assert columns.pieces == (Piece(((0, 4), (3, 6)), ((0, 4), (0, 3))),)


def test_the_data_axis_cuts_across_the_ranges_of_a_fused_weight() -> None:
    """Of q, k and v with 8, 4 and 4 rows the second rank holds 4, 2 and 2; the second of two shards starts in k."""
    layout = ParamLayout("qkv", (16, 3), tp_dim=0, tp_ranges=((4, 8), (10, 12), (14, 16)))
    assert layout.local_shape == (8, 3)
    assert [piece.local[0] for piece in layout.pieces] == [(0, 4), (4, 6), (6, 8)]
    sharded = replace(layout, shard_range=(5, 8))
    assert [(piece.whole[0], piece.local[0]) for piece in sharded.pieces] == [((11, 12), (0, 1)), ((14, 16), (1, 3))]
    stack = ParamLayout("gate_up", (6, 8, 3), tp_dim=1, tp_ranges=((2, 4), (6, 8)), shard_range=(3, 6))
    assert stack.local_shape == (3, 4, 3)
    assert stack.pieces == (
        Piece(((3, 6), (2, 4), (0, 3)), ((0, 3), (0, 2), (0, 3))),
        Piece(((3, 6), (6, 8), (0, 3)), ((0, 3), (2, 4), (0, 3))),
    )


def test_rows_that_several_tensor_ranks_hold_are_owned_by_the_first() -> None:
    """Four ranks, two key heads of two rows behind eight query rows: ranks 0 and 1 share a head, 2 and 3 the other."""
    ranges = [((2 * rank, 2 * rank + 2), (8 + rank // 2 * 2, 10 + rank // 2 * 2)) for rank in range(4)]
    layouts = [over_tensor_ranks(ParamLayout("qk", (12, 3)), 0, ranges, rank) for rank in range(4)]
    assert covers(layouts)
    assert [layout.tp_shared for layout in layouts] == [((8, 12),)] * 4
    assert all(layout.tp_partial for layout in layouts)
    owned = [[piece.whole[0] for piece in layout.pieces if piece.owned] for layout in layouts]
    assert owned == [[(0, 2), (8, 10)], [(2, 4)], [(4, 6), (10, 12)], [(6, 8)]]
    assert [piece.whole[0] for piece in layouts[3].pieces] == [(6, 8), (10, 12)]


def test_without_common_rows_nothing_is_partial() -> None:
    layout = over_tensor_ranks(ParamLayout("w", (4,)), 0, [((0, 1),), ((1, 4),)], 1)
    assert layout == ParamLayout("w", (4,), tp_dim=0, tp_ranges=((1, 4),))


def test_rows_that_no_rank_holds_are_noticed() -> None:
    with pytest.raises(AssertionError):
        over_tensor_ranks(ParamLayout("w", (4,)), 0, [((0, 1),), ((2, 4),)], 0)


@pytest.mark.parametrize("ranges", [((0, 3), (2, 5)), ((3, 5), (0, 2)), ((0, 7),), ((3, 2),), ()])
def test_ranges_are_ascending_disjoint_and_inside(ranges: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(AssertionError):
        ParamLayout("w", (6,), tp_dim=0, tp_ranges=ranges)
    with pytest.raises(AssertionError):
        ParamLayout("w", (6,), tp_ranges=((0, 3),))


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
