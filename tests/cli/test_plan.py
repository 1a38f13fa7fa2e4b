"""`shardwise plan`: its object, its file, its refusals, and what it loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError, PlanError
from shardwise.spec.cluster import load_cluster
from shardwise.spec.plan import Plan

PLAN = ["plan", "--model", "qwen3-0.6b", "--cluster", "a100-40gb", "--devices", "4"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def shardwise(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, [*PLAN, *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_object_holds_what_the_contract_names() -> None:
    answer = json.loads(shardwise("--json", "--top", "3", "--fix", "tp=2", "micro_batch_size=2"))
    names = {"schema", "devices", "considered", "plans", "rejected", "why", "legal_degrees"}
    assert names <= set(answer)
    first = answer["plans"][0]
    assert {"rank", "strategy", "stages", "step_seconds", "tokens_per_second_per_device", "mfu"} <= set(first)
    assert {"time_terms", "memory_by_stage", "bubble", "exposed_comm_seconds"} <= set(first)
    for plan in answer["plans"]:
        assert (plan["strategy"]["tp"], plan["strategy"]["micro_batch_size"]) == (2, 2)
        assert sum(plan["time_terms"].values()) == pytest.approx(plan["step_seconds"])
        assert len(plan["memory_by_stage"]) == plan["strategy"]["pp"]
        for stage in plan["memory_by_stage"]:
            assert sum(stage["terms"].values()) == pytest.approx(stage["total_bytes"])
    assert all(set(one) >= {"strategy", "rule", "detail"} for one in answer["rejected"])
    runnable = next(plan for plan in answer["plans"] if plan["runnable"])
    written = Plan.load("plan.json")
    assert written.strategy.stages == tuple(runnable["stages"])
    assert written.devices == runnable["devices"]
    assert written.strategy.tp == 2


def test_the_page_says_why_and_what_would_change() -> None:
    text = shardwise("train.global_batch_size=64", "data.max_length=1024", "--explain")
    assert "global batch 64 rows = " in text
    for words in ("why ", "place ", "legal ", "rejected ", "with a quarter less memory: ", "with twice the batch: "):
        assert words in text


def test_the_page_needs_nothing_else_and_draws_every_pass() -> None:
    shardwise("--html", "plan.html", "pp=2", "dp=1", "tp=1", "micro_batch_size=2", "train.global_batch_size=16")
    page = Path("plan.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 3
    assert not any(word in page for word in ("http", "<script", "<link", "src="))
    ElementTree.fromstring(page.replace("<!doctype html>", "").replace('<meta charset="utf-8">', ""))
    forward, backward = (page.count(f"<title>{kind} of micro-batch 0,") for kind in ("forward", "backward"))
    assert forward == backward >= 2


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    profile = load_cluster("a100-40gb").to_json()
    (tmp_path / "own.json").write_text(json.dumps(profile | {"name": "own"}))
    assert json.loads(shardwise("--cluster", "own.json", "--json"))["cluster"] == "own"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tp=3"], "does not divide the 16 attention heads. legal degrees: 1, 2, 4"),
        (["--memory", "10MB"], "the smallest need of any split is"),
        (["--memory", "1GB"], "the smallest need of any split is"),
        (["--memory", "much"], "must be a size above 0 with its unit"),
        (["--cluster", "a100-50gb"], "there is no such profile. Did you mean"),
        (["--cluster", "none.json"], "cannot be read"),
        (["--model", "qwen4-0.6b"], "Did you mean the well-known qwen3-0.6b?"),
        (["strategy.micro_batch=2"], "unknown key. Did you mean strategy.micro_batch_size?"),
        (["--html", "none/page.html"], "cannot be written to"),
        (["--html", "page", "--output", "./page"], "is where the plan is written"),
        (["lora.target_modules=[q_prj]"], "matches no linear layer. Names here: q_proj, k_proj"),
        (["--output", "other.txt"], "is there, and is no plan"),
        (["--fix", "tp=16"], "strategy.tp = 16: takes 16 devices, and 4 are given"),
        (["--fix", "recompute=40"], "strategy.recompute = 40: the model has 28 blocks. Use full, or at most 28"),
        (["sequence_parallel=true", "tp=1"], "strategy.tp is 1"),
        (["tp=2", "tp_whole=0.001"], "was described with its first tables, those of 0."),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: list[str], words: str) -> None:
    Path("other.txt").write_text("mine")
    with pytest.raises((ConfigError, PlanError)) as refused:
        shardwise(*arguments)
    assert words in str(refused.value)
    assert Path("other.txt").read_text() == "mine"
    assert not Path("plan.json").exists()


def test_a_file_that_cannot_be_written_is_found_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.planner.search.search", lambda *_: pytest.fail("the search has begun"))
    with pytest.raises(ConfigError, match="cannot be written to"):
        shardwise("--output", "none/plan.json")


def test_planning_loads_no_torch() -> None:
    code = "import sys; from shardwise import cli; cli.app(sys.argv[1:], standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, *PLAN, "--json"], check=True, capture_output=True, timeout=120)


def test_what_trains_and_how_changes_what_it_costs() -> None:
    def first(*arguments: str) -> dict[str, Any]:
        best: dict[str, Any] = json.loads(shardwise("--json", "--top", "1", "--fix", "tp=1", "pp=1", *arguments))[
            "plans"
        ][0]
        return best

    def memory(plan: dict[str, Any], term: str) -> float:
        return float(plan["memory_by_stage"][0]["terms"][term])

    fixed = ("dp_replicate=4", "dp_shard=1", "micro_batch_size=1", "recompute=none")
    adamw, sgd, lora = first(*fixed), first(*fixed, "train.optimizer=sgd"), first(*fixed, "use_lora=true")
    assert memory(sgd, "optimizer") == pytest.approx(memory(adamw, "optimizer") / 3)  # masters alone
    assert memory(lora, "optimizer") < 0.05 * memory(adamw, "optimizer")
    few = first(*fixed, "lora.target_modules=[q_proj,v_proj]")
    assert memory(few, "optimizer") < 0.3 * memory(lora, "optimizer")
    assert few["step_seconds"] < min(adamw["step_seconds"], lora["step_seconds"])


def test_a_precision_that_cannot_be_trained_in_is_said(tmp_path: Path) -> None:
    command = ["plan", "--model", "qwen3-0.6b", "--cluster", "v100-32gb", "--devices", "4", "--json"]
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    plans = json.loads(result.stdout)["plans"]
    assert all("precision fp16" in plan["not_runnable"] for plan in plans)
    assert not (tmp_path / "plan.json").exists()
