"""The lines that a run prints of itself before it starts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardwise.report.console import gradient_line, show_plan
from shardwise.report.results import unbroken
from shardwise.spec.plan import Plan, ranks
from shardwise.spec.rules import parse_run
from shardwise.spec.strategy import resolve
from tests.spec.model_folder import make_spec


def _line(folder: Path, **strategy: Any) -> str:
    model = make_spec(folder)
    split, rows = resolve(parse_run({"model": "m", "strategy": strategy}), model, 1)
    return gradient_line(Plan(model, split, rows, "cpu"))


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"dp_replicate": 2}, "summed over 2 replicas in buckets of 25 MiB"),
        ({"dp_replicate": 4, "gradient_aggregation_group": 1}, "summed over 4 replicas in 1 bucket,"),
        ({"dp_replicate": 2, "pp": 2, "gradient_aggregation_group": 3}, "over 2 replicas in 3 buckets,"),
        ({"dp_shard": 2}, "reduced in 4 units of blocks a stage, over 2 data ranks"),
        ({"dp_shard": 2, "gradient_aggregation_group": 9}, "reduced in 4 units of blocks"),
        ({"dp_shard": 2, "pp": 2, "gradient_aggregation_group": 1}, "reduced in 1 unit of blocks a stage"),
        ({"dp_replicate": 2, "dp_shard": 2}, "over 4 data ranks"),
        ({"tp": 2, "gradient_aggregation_group": 4}, "= 4: without data parallelism there is nothing to group"),
    ],
)
def test_how_gradients_are_summed(tmp_path: Path, strategy: dict[str, Any], words: str) -> None:
    assert words in _line(tmp_path / "m", **strategy)


def test_nothing_is_said_where_nothing_is_summed_and_nobody_asked(tmp_path: Path) -> None:
    assert _line(tmp_path / "m", tp=2) == ""


@pytest.mark.parametrize("name", ["big[v2]", "m[/b]", "a:bug:b", "back\\[bold]", "[red]x[/red]"])
def test_a_name_that_looks_like_markup_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    model = make_spec(tmp_path / "m")
    run = parse_run({"model": name})
    split, rows = resolve(run, model, 1)
    text = io.StringIO()
    show_plan(run, Plan(model, split, rows, "cpu"), Console(file=text, width=200))
    assert f"model     {name}: LlamaForCausalLM" in text.getvalue()


def test_an_interleaved_pipeline_shows_the_stages_of_each_rank(tmp_path: Path) -> None:
    model = make_spec(tmp_path / "m", num_hidden_layers=10)
    run = parse_run({"model": "m", "strategy": {"pp": 2, "schedule": "interleaved"}})
    split, rows = resolve(run, model, 1)
    text = io.StringIO()
    show_plan(run, Plan(model, split, rows, "cpu"), Console(file=text, width=200))
    assert "pp 2; interleaved over stages of 3, 3, 2, 2 blocks, 2 on each rank" in text.getvalue()
    assert "embedding + blocks 0..2 and 6..7 " in text.getvalue()
    assert "blocks 3..5 and 8..9 + head " in text.getvalue()


def test_sequence_parallel_is_said(tmp_path: Path) -> None:
    model = make_spec(tmp_path / "m")
    for sequence in (True, False):
        run = parse_run({"model": "m", "strategy": {"tp": 2, "sequence_parallel": sequence}})
        split, rows = resolve(run, model, 1)
        text = io.StringIO()
        show_plan(run, Plan(model, split, rows, "cpu"), Console(file=text, width=200))
        assert ("sequence parallel: norms and the residual stream on 1/2" in text.getvalue()) is sequence


def test_the_table_of_a_million_million_ranks_is_short(tmp_path: Path) -> None:
    model = make_spec(tmp_path / "m")
    run = parse_run({"model": "m", "strategy": {"dp_shard": 10**12, "tp": 2}})
    split, rows = resolve(run, model, 1)
    text = io.StringIO()
    show_plan(run, Plan(model, split, rows, "cpu"), Console(file=text, width=200))
    assert "and 1999999999984 more ranks" in text.getvalue()


def test_no_line_is_broken_where_there_is_no_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    model = make_spec(tmp_path / "m")
    run = parse_run({"model": "a-long-name/" * 30, "strategy": {"pp": 2, "tp": 2, "dp_shard": 2}})
    split, rows = resolve(run, model, 1)
    plan = Plan(model, split, rows, "cpu")
    shown = {}
    for is_terminal in (False, True):
        text = io.StringIO()
        show_plan(run, plan, unbroken(Console(file=text, force_terminal=is_terminal, no_color=True)))
        shown[is_terminal] = text.getvalue()
    assert shown[False].splitlines()[1].startswith("strategy")
    assert all(str(share) in shown[False] for share in ranks(plan))
    assert max(map(len, shown[False].splitlines()[1:])) > 40
    assert not shown[True].splitlines()[1].startswith("strategy"), "a terminal's own width counts"
