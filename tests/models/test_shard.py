"""A rank's part of a parameter: taken from the whole, put back into it, drawn at random."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shardwise.models.init import Distribution, fill_random
from shardwise.models.shard import Shard, take
from shardwise.spec.layout import ParamLayout
from tests.layouts import cut, grids, held, put


@given(grids())
@settings(deadline=None)
def test_what_all_ranks_take_is_the_whole_when_they_put_it_back(layouts: list[ParamLayout]) -> None:
    whole = torch.randn(layouts[0].shape)
    again = torch.full_like(whole, float("nan"))
    for layout in layouts:
        values = take(whole, layout)
        assert torch.equal(values, held(whole, layout))
        put(again, layout, values)
    assert torch.equal(again, whole)


def test_one_piece_is_taken_as_a_view() -> None:
    whole = torch.zeros(4, 2)
    take(whole, ParamLayout("w", (4, 2), tp_dim=0, tp_ranges=((2, 4),))).fill_(1.0)
    assert whole.sum() == 4.0


@pytest.mark.parametrize("shape", [(2600, 3), (5, 40, 6), (2050,)])
@pytest.mark.parametrize(
    "dist", [Distribution(0.0, 0.02, zero_row=1), Distribution(1.0, 0.0), Distribution(0.0, 0.0, bound=0.5)]
)
@given(data=st.data())
@settings(deadline=None, max_examples=10)
def test_random_values_are_those_of_the_whole_in_any_ranges(
    shape: tuple[int, ...], dist: Distribution, data: st.DataObject
) -> None:
    """Rows beyond 1,024 come from further chunks; stacked experts are drawn one by one."""
    whole = Shard(ParamLayout("w", shape), torch.nn.Parameter(torch.empty(shape)))
    fill_random([whole], {"w": dist}, seed=7)
    dim = data.draw(st.integers(0, len(shape) - 1))
    for layout in cut(lambda low, high: data.draw(st.integers(low, high)), shape, dim, 2, 2):
        shard = Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, float("nan"))))
        fill_random([shard], {"w": dist}, seed=7)
        assert torch.equal(shard.data, held(whole.data, layout))
