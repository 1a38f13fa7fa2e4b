"""The frontier is what trying everything leaves unbeaten; a bound chooses from it the table that moves least."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.shrink import build_small, shrink
from shardwise.tensor.alternatives import MOST_NAMED, Alternative, share_of
from shardwise.tensor.cache import TableCache
from shardwise.tensor.find import TableSearch
from shardwise.tensor.frontier import solve_frontier, thinned, unbeaten
from shardwise.tensor.search import Choice, Mode, Problem, choices, combinations
from shardwise.tensor.simulate import compare, reference
from shardwise.tensor.table import ShardingTable, Style
from tests.tensor.test_search import attention_block, problems

Numbers = tuple[float, float]


def _numbers(problem: Problem, chosen: dict[str, Choice]) -> Numbers:
    """Weights that stay whole, and elements moved."""
    paid = {problem.groups[p]: problem.sizes[p].inputs for p, choice in chosen.items() if choice.sums_input}
    moved = sum(choice.moved for choice in chosen.values()) + 2.0 * sum(paid.values())
    return sum(choice.whole for choice in chosen.values()), moved


def _every(problem: Problem) -> list[Numbers]:
    """Those of all combinations."""
    return [_numbers(problem, chosen) for _, chosen in combinations(problem)]


@settings(max_examples=100, deadline=None)
@given(problems())
def test_equals_enumeration(problem: Problem) -> None:
    solutions = solve_frontier(problem, most=10**6)
    assert [_numbers(problem, dict(s.choices)) for s in solutions] == unbeaten(_every(problem), lambda point: point)
    for solution in solutions:
        for product, choice in solution.choices.items():
            behind = problem.region_behind(product)
            mode = Mode.WHOLE if behind is None else solution.modes[behind]
            assert choice in list(choices(problem, product, solution.modes[problem.region_before(product)], mode))


def test_a_block_may_leave_its_attention_whole_or_its_mlp_or_both() -> None:
    problem = attention_block()
    points = [_numbers(problem, dict(s.choices)) for s in solve_frontier(problem)]
    attention, mlp = 2 * 64 * 64 + 2 * 64 * 32, 3 * 64 * 96
    assert points[0] == (0, 8 * 64)
    assert (attention, 4 * 64) in points
    assert points[-1] == (attention + mlp, 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1), st.integers(2, 6))
def test_thinning_keeps_the_ends(points: list[tuple[int, int]], most: int) -> None:
    frontier = unbeaten(points, lambda point: point)
    kept = thinned(frontier, most, lambda point: point)
    assert len(kept) == min(len(frontier), most)
    assert {kept[0], kept[-1]} == {frontier[0], frontier[-1]}
    assert [point for point in frontier if point in kept] == kept
    assert kept == _thinned_one_by_one(frontier, most)


def _thinned_one_by_one(points: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """All corners looked at again for each point that is left out."""
    kept = list(points)
    while len(kept) > most:
        triples = zip(kept, kept[1:], kept[2:], strict=False)
        corners = [(after[0] - own[0]) * (before[1] - own[1]) for before, own, after in triples]
        del kept[1 + corners.index(min(corners))]
    return kept


def test_thinning_takes_no_more_than_a_sort() -> None:
    asked = 0

    def counted(point: tuple[int, int]) -> tuple[int, int]:
        nonlocal asked
        asked += 1
        return point

    points = [(index, 20_000 - index) for index in range(20_000)]
    assert len(thinned(unbeaten(points, counted), 128, counted)) == 128
    assert asked == 2 * len(points)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 2}


@cache
def _search(degree: int) -> TableSearch:
    config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=2, **SIZES)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return TableSearch(model, build_small(shrink(config, degree=degree)), degree)


def test_a_bound_leaves_more_whole_and_moves_less() -> None:
    search = _search(2)
    first, _ = search.tables()
    table, proven = search.tables(whole=0.41)  # q, k, v and o are 40 % of a block
    assert first.cost is not None
    assert table.cost is not None
    assert {table.style(f"model.layers.1.self_attn.{n}_proj") for n in "qkvo"} == {None}
    assert table.style("model.layers.1.mlp.gate_proj") is Style.COLUMN
    assert table.cost.moved == first.cost.moved / 2
    assert table.cost.whole == pytest.approx(0.403 * table.cost.total, rel=1e-2)
    sent = sum(compare(search.small, proven, reference(search.small)).moved.values())
    every = sum(compare(search.small, search.tables()[1], reference(search.small)).moved.values())
    assert sent < every


def test_a_plan_names_the_first_table_and_some_others() -> None:
    first, _ = _search(2).tables()
    named = first.alternatives
    assert named[0] == first.cost
    assert 2 <= len(named) <= MOST_NAMED + 1
    assert [cost.moved for cost in named] == sorted((cost.moved for cost in named), reverse=True)
    assert [cost.whole for cost in named] == sorted(cost.whole for cost in named)
    assert ShardingTable.from_json(first.to_json()) == first
    # What is named is had by the bound that it is named after.
    chosen, _ = _search(2).tables(whole=share_of(named[1]))
    assert chosen.cost == named[1]


def test_a_bound_below_the_first_table_is_refused() -> None:
    with pytest.raises(PlanError, match=r"tp_whole = 0.001.*at the least.*tp_whole=0\.0") as refused:
        _search(2).tables(whole=0.001)
    least = float(str(refused.value).split("tp_whole=")[1].split(",")[0])
    assert _search(2).tables(whole=least)[0] == _search(2).tables()[0]


def test_the_default_is_tried_last_where_it_lies_within_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    search = _search(2)
    first, others = search.offered()
    assert len(others) > 4  # more than are tried
    proven, tried = TableSearch.proven, []

    def only_first(self: TableSearch, chosen: Alternative, *, sequence: bool = False) -> object:
        tried.append(chosen.cost)
        if chosen.cost != first.cost:
            raise PlanError("tp", "differs", "tp=1")
        return proven(self, chosen, sequence=sequence)

    monkeypatch.setattr(TableSearch, "proven", only_first)
    assert search.tables(whole=0.9)[0].cost == first.cost
    assert len(tried) == 5


def test_blocks_of_unequal_widths_count_by_their_own() -> None:
    search = _search(2)
    mlp = search.model.get_submodule("model.layers.0.mlp")
    before = search.offered()[1][-1].cost.whole
    saved = dict(mlp.named_children())
    try:
        for name in ("gate_proj", "up_proj"):
            setattr(mlp, name, torch.nn.Linear(64, 192, bias=False, device="meta"))
        mlp.down_proj = torch.nn.Linear(192, 64, bias=False, device="meta")
        after = search.offered()[1][-1].cost
    finally:
        for name, module in saved.items():
            setattr(mlp, name, module)
    assert after.whole - before == 3 * 64 * 96


def test_tables_of_other_bounds_are_kept_apart(tmp_path: object) -> None:
    cache_of = TableCache(tmp_path)  # type: ignore[arg-type]
    config = _search(2).small.config
    table = _search(2).tables(whole=0.41)[0]
    cache_of.keep(config, table, whole=0.41)
    assert cache_of.find(config, 2, whole=0.41) == table
    assert cache_of.find(config, 2) is None
    assert cache_of.find(config, 2, whole=0.4) is None
