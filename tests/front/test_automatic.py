"""A run that names its cluster and leaves its strategy open is planned."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardwise.api.session import _agree
from shardwise.check.costing import model_costs
from shardwise.config import apply_overrides, load_yaml
from shardwise.errors import ConfigError, LaunchError, PlanError
from shardwise.front import automatic, describing
from shardwise.front.preparing import prepare_data
from shardwise.front.resolve import prepare
from shardwise.launch.script_worker import ScriptWorker
from shardwise.spec.filled import without_stale
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, dump_run
from shardwise.tensor.cache import TableCache
from tests.spec.model_folder import make_folder


@pytest.fixture(scope="module", autouse=True)
def _traced_here() -> Iterator[None]:
    """What the child would answer, without the seconds in which it imports."""

    @cache
    def traced(folder: str) -> dict[str, Any]:
        return model_costs(Path(folder), TableCache(None), None).to_json()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describing, "run_child", lambda arguments, _: traced(arguments[0]))
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("automatic")
    make_folder(folder / "tiny")
    (folder / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    return folder


def planned(root: Path, *overrides: str) -> tuple[RunConfig, Plan]:
    base: dict[str, Any] = {"model": str(root / "tiny"), "data": {"train": str(root / "rows.jsonl")}, "device": "cpu"}
    base |= {"output_dir": str(root / "out"), "cluster": "cpu"}
    return prepare(apply_overrides(base, overrides))


@pytest.mark.parametrize("devices", [3, 4, 5, 6, 7])
def test_a_plan_is_legal_on_any_number_of_devices(root: Path, devices: int) -> None:
    run, plan = planned(root, f"devices={devices}", "train.global_batch_size=24")
    assert plan.devices == run.devices <= devices
    assert plan.strategy.tp != 3
    assert plan.global_batch_size == 24


def test_given_fields_stay_and_the_rest_is_said(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, plan = planned(root, "devices=4", "tp=2", "recompute=full")
    assert (plan.strategy.tp, plan.strategy.recompute) == (2, -1)
    said = capsys.readouterr().err
    assert "planned: " in said
    assert "predicted: " in said
    assert "why: " in said


def test_a_planned_run_resolves_to_itself_and_can_be_planned_anew(root: Path) -> None:
    run, plan = planned(root, "devices=4")
    path = root / "run.yaml"
    path.write_text(dump_run(run))
    again, same = prepare(load_yaml(path))
    assert same == plan
    assert again.strategy == run.strategy
    other = apply_overrides(without_stale(load_yaml(path), ["strategy.pp"]), ["pp=2"])
    assert prepare(other)[1].strategy.pp == 2


def test_what_cannot_be_planned_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="is a profile of cuda devices, and the run is on cpu"):
        planned(root, "cluster=a100-40gb")
    with pytest.raises(ConfigError, match="there is no such profile"):
        planned(root, "cluster=atlas")
    with pytest.raises(PlanError, match="does not divide the 4 attention heads"):
        planned(root, "devices=3", "tp=3")
    with pytest.raises(ConfigError, match="the batch would depend on the plan"):
        planned(root, "train.gradient_accumulation_steps=2", "micro_batch_size=1")


def test_what_fails_while_planning_does_not_keep_a_run_from_data_parallel(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: Any) -> None:
        raise LaunchError("measuring", "ended with status 3")

    monkeypatch.setattr(automatic, "measured_cluster", fails)
    _, plan = planned(root, "cluster=null", "devices=4")
    assert (plan.strategy.dp_shard, plan.predicted) == (4, None)
    assert "not planned (measuring: ended with status 3)" in capsys.readouterr().err
    with pytest.raises(LaunchError, match="ended with status 3"):
        planned(root, "cluster=auto", "devices=4")


def test_a_look_at_rows_plans_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "measured_cluster", lambda *_: pytest.fail("it measures"))
    tree = {"model": str(root / "tiny"), "data": {"train": str(root / "rows.jsonl")}, "devices": 4, "device": "cpu"}
    assert prepare_data(tree)[1].strategy.dp_shard == 4


def test_processes_that_are_there_already_are_as_many_as_the_plan_has_devices(root: Path) -> None:
    """Under another launcher nobody could start fewer."""
    tree = {"model": str(root / "tiny"), "data": {"train": str(root / "rows.jsonl")}, "cluster": "cpu"}
    tree |= {"device": "cpu", "output_dir": str(root / "there"), "train": {"global_batch_size": 24}}
    store = SimpleNamespace(agree=lambda make: make())
    worker = SimpleNamespace(place=SimpleNamespace(world_size=5), store=store, has_worked_in=lambda folder: False)
    with pytest.raises(PlanError, match=r"5 processes: the fastest plan is for 4 devices\. Start 4"):
        _agree(cast(ScriptWorker, worker), tree, [], None)
    assert not (root / "there" / "run.yaml").exists()
