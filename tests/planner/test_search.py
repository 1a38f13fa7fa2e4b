"""The search: what it finds is legal, fits, and is not beaten by what it passed over."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.planner.cost import estimate
from shardwise.planner.layout import Work
from shardwise.planner.search import _simulated, search
from shardwise.planner.shape import Experts, Shape, model_costs
from shardwise.planner.space import Job, groups, tensor_degrees
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import load_cluster

SMALL = model_costs(Shape("small", 8, 1024, 16, 4, 64, 2816, 32000), range(1, 17))
NARROW = model_costs(Shape("narrow", 4, 64, 4, 2, 16, 160, 131), range(1, 9))
EXPERTS = model_costs(Shape("experts", 6, 512, 8, 8, 64, 1024, 8000, experts=Experts(8, 2, 512)))
GIB = 2**30


def job(costs: ModelCosts = SMALL, devices: int = 16, rows: int = 64, memory: float = 40 * GIB, **fixed: object) -> Job:
    return Job(costs, load_cluster("a100-40gb"), devices, rows, Work(1024), memory, fixed)


@pytest.mark.parametrize("costs", [SMALL, EXPERTS], ids=["dense", "experts"])
def test_plans_are_legal_fit_and_come_in_order(costs: ModelCosts) -> None:
    wanted = job(costs)
    found = search(wanted)
    times = [plan.estimate.step_seconds for plan in found.plans]
    assert times == sorted(times)
    assert len(times) == 10
    for plan in found.plans:
        chosen = plan.layout
        assert chosen.tp * chosen.pp * chosen.dp * chosen.cp == 16
        assert chosen.dp * chosen.micro_batch * chosen.num_micro_batches == 64
        assert (chosen.dp * chosen.cp) % chosen.ep == 0
        assert sum(chosen.stages) == costs.num_blocks
        assert plan.estimate.memory_bytes <= wanted.memory_bytes


def test_nothing_that_was_passed_over_is_faster() -> None:
    """Every candidate of a small job simulated: the first plan is within 2 % of the best."""
    wanted = job(SMALL, devices=4, rows=16, recompute="none")
    best = search(wanted).plans[0].estimate.step_seconds
    every = [
        _simulated(group, index, wanted).estimate
        for group in groups(wanted, tensor_degrees(wanted)[0])
        for index in range(len(group))
    ]
    fitting = [made.step_seconds for made in every if made.memory_bytes <= wanted.memory_bytes]
    assert len(fitting) > 100
    assert best <= 1.02 * min(fitting)


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_a_degree_that_does_not_divide_the_heads_is_never_chosen(devices: int) -> None:
    found = search(job(NARROW, devices=devices, rows=devices * 4))
    assert all(plan.layout.tp in (1, 2, 4) for plan in found.plans)
    if devices in (3, 6):
        assert any(one.strategy == "tp 3" and "4 attention heads" in one.rule for one in found.rejected)


@pytest.mark.parametrize(
    "fixed", [{"tp": 8}, {"pp": 4}, {"zero": 3}, {"cp": 1, "dp": 4}, {"micro_batch": 2}, {"recompute": "full"}]
)
def test_given_fields_stay(fixed: dict[str, object]) -> None:
    for plan in search(job(**fixed)).plans:
        assert all(getattr(plan.layout, name) == value for name, value in fixed.items())


@pytest.mark.parametrize("memory", [1e7, 2 * GIB])
def test_memory_that_nothing_fits_is_refused_with_the_smallest_need(memory: float) -> None:
    with pytest.raises(PlanError, match=r"no split fits; the smallest need is .* GiB \(tp \d+, zero"):
        search(job(devices=1, rows=8, memory=memory))


def test_a_fixed_degree_that_is_illegal_is_refused_with_its_rule() -> None:
    with pytest.raises(PlanError, match="does not divide the 4 attention heads"):
        search(job(NARROW, devices=3, rows=12, tp=3))


def test_what_does_not_fit_is_counted() -> None:
    found = search(job(devices=4, rows=16, memory=3 * GIB))
    out = [one for one in found.rejected if "memory" in one.rule]
    assert out
    assert all("smallest of them needs" in one.detail for one in out)
    assert 0 < sum(one.number for one in out) < found.considered


@settings(max_examples=10, deadline=None)
@given(factor=st.floats(1.0, 4.0), memory=st.sampled_from([6.0, 10.0, 20.0]))
def test_more_memory_is_never_slower(factor: float, memory: float) -> None:
    less, more = (search(job(devices=8, rows=32, memory=m * GIB)) for m in (memory, memory * factor))
    assert more.plans[0].estimate.step_seconds <= less.plans[0].estimate.step_seconds * 1.02


def test_stages_of_a_plan_are_balanced() -> None:
    plan = search(job(pp=4)).plans[0]
    assert plan.layout.stages[-1] <= min(plan.layout.stages[:-1])
    assert estimate(SMALL, load_cluster("a100-40gb"), plan.layout, Work(1024)) == plan.estimate
