"""Sharding tables as candidates: what they cost decides; the plan carries its own and says what others would cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError, PlanError
from shardwise.front.planning import runnable_plan
from shardwise.planner.adapters import Lora, adapted
from shardwise.planner.explain import answer, describe, why
from shardwise.planner.job import Job
from shardwise.planner.known import known_costs, known_models, known_within
from shardwise.planner.layout import Work
from shardwise.planner.refine import memory_need, refine
from shardwise.planner.screen import groups_of, judge
from shardwise.planner.search import search
from shardwise.planner.space import enumerate_space
from shardwise.planner.sweep import candidate_of
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import ClusterSpec, load_cluster

GIB = 2**30
MODEL = "qwen3-0.6b"
DEFAULT_ALONE = "megatron-"  # well-known ones without other tables


@cache
def cluster(speed: float = 1.0) -> ClusterSpec:
    """A cluster whose links are so many times as fast as they are."""
    made = load_cluster("a100-40gb")
    return replace(made, links=tuple(replace(link, bandwidth=link.bandwidth * speed) for link in made.links))


def job(speed: float = 1.0, devices: int = 4, rows: int = 8, memory: float = 0.0, **fixed: Any) -> Job:
    spec, costs = known_costs(MODEL)
    return Job(spec, costs, cluster(speed), devices, rows, Work(2048, ours=True), fixed, memory * GIB)


def without_tables(wanted: Job) -> Job:
    return replace(wanted, costs=wanted.costs.under(None))


@pytest.mark.parametrize("name", [name for name in known_models() if not name.startswith(DEFAULT_ALONE)])
def test_well_known_models_carry_their_tables(name: str) -> None:
    """Each of them moves less than the first and leaves more whole."""
    _, costs = known_costs(name)
    assert costs.tables
    assert ModelCosts.from_json(costs.to_json()) == costs
    for table in costs.tables:
        assert len(table.kinds) == len(costs.kinds)
        legal = [split.degree for split in table.kinds[0].degrees if split.degree > 1 and not split.rule]
        assert legal
        for degree in legal:
            first, other = (_moved(kinds, costs.order, degree) for kinds in (costs.kinds, table.kinds))
            assert other < first
        first, other = (sum(kinds[k].parameters.whole for k in costs.order) for kinds in (costs.kinds, table.kinds))
        assert other > first
        total = sum(kind.parameters.total for kind in (costs.kinds[k] for k in costs.order))
        assert other <= table.whole * total * (1 + 1e-9)
        assert [kind.parameters.total for kind in table.kinds] == [kind.parameters.total for kind in costs.kinds]


def _moved(kinds: Any, order: tuple[int, ...], degree: int) -> float:
    """Elements of a token at ring cost, in which a reduction to all counts twice."""
    sent = [one for k in order for one in kinds[k].degree(degree).collectives]
    return float(sum(one.elements * (one.forward + one.backward) * (1 + (one.op == "all_reduce")) for one in sent))


def test_slow_links_choose_a_table_that_moves_less() -> None:
    wanted = job(0.02, tp=4)
    found = search(wanted)
    first = found.plans[0]
    assert first.candidate.tp_whole in [table.whole for table in wanted.costs.tables]
    plain = search(without_tables(wanted)).plans[0]
    assert first.step_seconds < plain.step_seconds
    assert first.estimate.time_terms["tensor"] < plain.estimate.time_terms["tensor"]
    assert first.estimate.time_terms["matmul"] > plain.estimate.time_terms["matmul"]
    plan = runnable_plan(wanted, found)
    assert plan is not None
    assert plan.strategy.tp_whole == first.candidate.tp_whole
    assert first.candidate.fields()["tp_whole"] == first.candidate.tp_whole
    assert f"tp_whole {first.candidate.tp_whole:g}" in describe(first.candidate)
    assert any("under the table that leaves least whole it loses by" in line for line in why(wanted, found))


def test_fast_links_keep_the_first_table_and_say_what_another_costs() -> None:
    wanted = job(tp=4, micro_batch_size=1)
    found = search(wanted)
    first = found.plans[0]
    assert first.candidate.tp_whole is None
    tables = answer(wanted, found)["tables"]
    assert [one["chosen"] for one in tables] == [True, *(False for _ in tables[1:])]
    cut = [one["sequence_parallel"] for one in tables]
    assert cut == [first.candidate.sequence_parallel, *(False for _ in tables[1:])], "others are described without"
    assert {one["tp_whole"] for one in tables[1:]} == {table.whole for table in wanted.costs.tables}
    for one in tables:
        assert sum(one["time_terms"].values()) == pytest.approx(one["step_seconds"])
        assert one["step_seconds"] >= first.step_seconds
    assert any(line.startswith("tp by the table that leaves least whole; under") for line in why(wanted, found))


def test_a_table_that_does_not_fit_is_not_chosen() -> None:
    """Slow links would have one that leaves more whole; memory refuses it, and the plan says so."""
    wanted = job(0.02, tp=4, micro_batch_size=1, recompute="full", dp=1, pp=1)
    first = search(wanted).plans[0]
    assert first.candidate.tp_whole is not None
    least = search(without_tables(wanted)).plans[0].estimate.memory_bytes
    assert least < first.estimate.memory_bytes
    tight = replace(wanted, memory_bytes=(least + 2**20) / 0.95)
    found = search(tight)
    assert found.plans[0].candidate.tp_whole is None
    assert memory_need(tight, found.plans[0].candidate) <= tight.limit_bytes
    assert any("it does not fit" in line for line in why(tight, found))


@settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.generate])  # not shrunk: the rows say enough
@given(
    speed=st.sampled_from([0.01, 0.1, 1.0]),
    devices=st.sampled_from([2, 3, 4, 8]),
    rows=st.sampled_from([4, 8, 24]),
    memory=st.sampled_from([0.0, 12.0]),
)
@example(0.01, 8, 24, 6.0)
@example(0.01, 4, 4, 0.0)
def test_more_tables_never_make_the_best_plan_slower(speed: float, devices: int, rows: int, memory: float) -> None:
    wanted = job(speed, devices, rows, memory)

    def best(one: Job) -> float:
        try:
            return search(one, top=1).plans[0].step_seconds
        except PlanError:
            return float("inf")

    assert best(wanted) <= best(without_tables(wanted)) * (1 + 1e-9)


def test_nothing_that_was_passed_over_is_faster() -> None:
    """Every legal candidate under every table, looked at stage by stage."""
    wanted = job(0.02, devices=4, rows=4, pp=1, sequence_parallel=False, micro_batch_size=1)
    best = search(wanted, top=1).plans[0].step_seconds
    times = {}
    for least, most in ((2, 4), (1, 2), (0, 1)):
        for group in groups_of(wanted, enumerate_space(wanted, least, most)):
            columns = judge(group, group.columns)[0].columns
            for index in range(len(columns["tp"])):
                candidate = candidate_of(wanted, columns, index)
                plan, _ = refine(wanted, candidate)
                assert plan is not None
                assert plan.step_seconds >= columns["bound"][index] * (1 - 1e-9)
                times[plan.candidate] = plan.step_seconds
    assert {one.tp_whole for one in times} == set(wanted.by_table)
    assert best <= min(times.values()) * (1 + 1e-9)


def test_a_given_table_is_the_only_one() -> None:
    spec, costs = known_costs(MODEL)
    share = costs.tables[-1].whole
    wanted = replace(job(tp=4, tp_whole=share), costs=known_within(MODEL, costs, share))
    found = search(wanted)
    assert {plan.candidate.tp_whole for plan in found.plans} == {share}
    assert answer(wanted, found)["tables"] == []
    with pytest.raises(ConfigError, match=r"was described with its first tables, those of 0\..*Use strategy.tp_whole"):
        known_within(MODEL, costs, costs.tables[0].whole / 2)
    assert spec.num_blocks == costs.num_blocks


def test_adapters_are_in_the_blocks_of_every_table() -> None:
    costs = adapted(known_costs(MODEL)[1], Lora(8))
    for table in costs.tables:
        assert [kind.trainable.total for kind in table.kinds] == [kind.trainable.total for kind in costs.kinds]
        assert all(kind.trainable.total < kind.parameters.total / 10 for kind in table.kinds)
