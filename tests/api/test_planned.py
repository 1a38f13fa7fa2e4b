"""What the automatic modes hand over: the batch of data parallelism, and degrees to be searched for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.api.trainer import to_be_planned
from shardwise.front.resolve import prepare
from tests.spec.model_folder import make_folder

BASE: dict[str, Any] = {"device": "cpu", "devices": 4, "train": {"gradient_accumulation_steps": 3, "max_steps": 1}}


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_DEVICE", raising=False)


@pytest.mark.parametrize(("given", "rows"), [({}, 24), ({"pp": 2}, 12), ({"pp": 2, "tp": 2}, 6)])
def test_the_batch_is_that_of_data_parallelism_on_what_is_left(given: dict[str, int], rows: int) -> None:
    tree = to_be_planned(BASE | {"strategy": {"micro_batch_size": 2, **given}}, {})
    assert tree["train"] == {"global_batch_size": rows, "max_steps": 1}
    assert (tree["strategy"], tree["cluster"]) == (given, "auto")
    kept = to_be_planned(BASE | {"strategy": {"micro_batch_size": 2}}, {"strategy": {"micro_batch_size": 2}})
    assert kept["strategy"] == {"micro_batch_size": 2}


@pytest.mark.parametrize(
    "more", [{"device": "cuda"}, {"devices": None}, {"devices": 1}, {"nnodes": 2}, {"strategy": {"pp": 3}}]
)
def test_other_runs_stay_as_they_are(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.api.trainer.choose_device", lambda wanted: wanted)
    tree = BASE | more
    assert to_be_planned(tree, {}) == tree


@pytest.mark.slow  # a child builds the model
def test_given_degrees_stay_and_the_rest_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder(tmp_path / "tiny")
    (tmp_path / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    tree = BASE | {"model": str(tmp_path / "tiny"), "data": {"train": str(tmp_path / "rows.jsonl")}}
    tree |= {"output_dir": str(tmp_path / "out"), "strategy": {"micro_batch_size": 2, "pp": 2}}
    _, plan = prepare(to_be_planned(tree, {}))
    assert (plan.devices, plan.strategy.pp, plan.global_batch_size) == (4, 2, 12)
    assert plan.predicted is not None
    assert "planned: pp 2" in capsys.readouterr().err
