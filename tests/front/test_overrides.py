"""Overrides of a ``run.yaml`` that a run has left: what was filled in then is filled in anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.config import apply_overrides
from shardwise.errors import PlanError
from shardwise.front.resolve import prepare
from shardwise.front.tree import run_tree
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, dump_run
from tests.spec.model_folder import make_folder


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")


def _prepare(root: Path, *overrides: str) -> tuple[RunConfig, Plan]:
    make_folder(root / "tiny")
    (root / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    base = {"model": str(root / "tiny"), "data": {"train": str(root / "rows.jsonl")}, "output_dir": str(root / "out")}
    return prepare(apply_overrides(base, overrides))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (["pp=2"], ["pp=4"]),
        (["pp=4"], ["pp=1", "tp=2"]),
        ([], ["pp=2", "dp=3"]),
        (["dp=4"], ["dp=2"]),
        (["dp=4"], ["dp_replicate=2"]),
        (["devices=4", "pp=2"], ["pp=4"]),
        (["devices=4", "dp_replicate=2"], ["devices=8"]),
        (["dp=2"], ["micro_batch_size=3"]),
        (["dp=2"], ["train.global_batch_size=12"]),
        ([], ["train.max_steps=7"]),
        ([], ["train.seed=7"]),
        (["use_lora=true"], ["use_lora=false"]),
        (["use_lora=true"], ["lora.r=4"]),
        ([], ["parallel_config.pipeline_stage=4"]),
        (["pp=2", "schedule=interleaved"], ["schedule=1f1b"]),
        (["pp=2"], ["schedule=interleaved"]),
        (["pp=2", "schedule=interleaved"], ["stages=[1, 1, 1, 1]"]),
    ],
)
def test_an_override_is_as_if_it_had_been_there_from_the_start(
    tmp_path: Path, first: list[str], then: list[str]
) -> None:
    run, _ = _prepare(tmp_path, *first)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    again, plan = prepare(run_tree([str(path), *then], {}))
    want, want_plan = _prepare(tmp_path, *first, *then)
    assert plan == want_plan
    plain = {"filled": ()}
    assert again.model_copy(update=plain) == want.model_copy(update=plain)
    path.write_text(dump_run(again), encoding="utf-8")  # and so on: what was filled in is still known
    assert prepare(run_tree([str(path), "train.learning_rate=0.5"], {}))[1] == want_plan


def test_accumulation_steps_stay_known(tmp_path: Path) -> None:
    run, plan = _prepare(tmp_path, "micro_batch_size=2", "train.gradient_accumulation_steps=4")
    assert (run.train.global_batch_size, plan.num_micro_batches) == (8, 4)
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    assert prepare(run_tree([str(path), "train.gradient_accumulation_steps=3"], {}))[1].global_batch_size == 6
    assert prepare(run_tree([str(path), "dp=2"], {}))[1].global_batch_size == 8, "the batch is what was asked for"


def test_what_was_given_is_not_forgotten(tmp_path: Path) -> None:
    run, _ = _prepare(tmp_path, "pp=2", "stages=[1, 3]", "devices=2")
    path = tmp_path / "resolved.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    with pytest.raises(PlanError, match=r"strategy\.stages = \[1, 3\]: has 2 entries"):
        prepare(run_tree([str(path), "pp=4"], {}))
    with pytest.raises(PlanError, match="devices = 2"):
        prepare(run_tree([str(path), "tp=2"], {}))
    assert prepare(run_tree([str(path)], {"devices": 4}))[1].strategy.dp_shard == 2
