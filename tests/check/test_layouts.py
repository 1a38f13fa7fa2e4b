"""Which layouts stand for a plan, and what is said to be left out."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.check.layouts import MAX_PROCESSES, coverage, layouts, num_micro_batches, small_strategy, tensor_degree
from shardwise.spec.plan import Plan
from shardwise.spec.strategy import AXES, Strategy, default_stages
from tests.spec.model_folder import make_spec

DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@given(pp=DEGREES, dp_replicate=DEGREES, dp_shard=DEGREES, tp=DEGREES)
def test_every_axis_runs_on_few_processes(pp: int, dp_replicate: int, dp_shard: int, tp: int) -> None:
    strategy = Strategy(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp)
    found = layouts(strategy)
    for axis in AXES:
        degrees = {layout[axis] for layout in found}
        least = 3 if axis == "tp" and tp == 3 else 2
        assert degrees <= {1, least}
        assert max(degrees) == (1 if getattr(strategy, axis) == 1 else least)
    for layout in found:
        assert prod(layout.values()) <= MAX_PROCESSES


def test_a_degree_of_seven_runs_by_itself() -> None:
    strategy = Strategy(pp=2, dp_replicate=2, dp_shard=2, tp=7)
    assert [{axis for axis, n in layout.items() if n > 1} for layout in layouts(strategy)] == [
        {"pp", "dp_replicate", "dp_shard"},
        {"tp"},
    ]
    assert [tensor_degree(Strategy(tp=tp)) for tp in (1, 2, 9, 12, 11, 14)] == [1, 2, 3, 2, 1, 2]


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_the_small_strategy_keeps_everything_but_sizes(blocks: int, tmp_path: Path) -> None:
    strategy = Strategy(
        *(4, 1, 2, 4), reshard=False, schedule="gpipe", micro_batch_size=8, recompute=7, stages=default_stages(28, 4)
    )
    plan = Plan(make_spec(tmp_path / "m", num_hidden_layers=28), strategy, 256, "npu")
    (degrees,) = layouts(strategy)
    small = small_strategy(plan, degrees, blocks)
    assert (small.pp, small.dp_replicate, small.dp_shard, small.tp) == (2, 1, 2, 2)
    assert sum(small.stages) == blocks
    assert (small.reshard, small.schedule, small.micro_batch_size) == (False, "gpipe", 2)
    assert small.recompute == max(small.stages)
    assert num_micro_batches(plan) == 4
    told = coverage(plan, [degrees], "bf16", compiled=True)
    assert told.covered["layouts"] == "pp 2 x dp_shard 2 x tp 2"
    for words in ("pp 4", "tp 4", "kernels and collectives of npu", "bf16", "compiled blocks", "data"):
        assert any(words in item for item in told.not_covered), words


def test_shared_kv_heads_are_named_where_the_copy_has_none(tmp_path: Path) -> None:
    spec = make_spec(tmp_path / "m")  # 4 heads, 2 KV heads
    for tp, named in ((2, False), (4, True)):
        strategy = Strategy(tp=tp, stages=(4,))
        told = coverage(Plan(spec, strategy, 8, "cpu"), layouts(strategy), "fp32", compiled=False)
        assert any("2 KV heads" in item for item in told.not_covered) == named


def test_axes_that_never_meet_are_named(tmp_path: Path) -> None:
    strategy = Strategy(*(2, 2, 2, 2), stages=(2, 2))
    plan = Plan(make_spec(tmp_path / "m"), strategy, 16, "cpu")
    told = coverage(plan, layouts(strategy), "fp32", compiled=False)
    assert told.not_covered == ["pp, dp_replicate, dp_shard, tp all at once", "the weights, the data and its loading"]
