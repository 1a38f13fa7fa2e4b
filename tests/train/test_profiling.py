"""``log.profile_steps``: one trace a rank and a range, of the steps that were named and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.train.runs import make_inputs, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _num_updates(path: Path) -> int:
    """Optimizer steps in a chrome trace that also holds matrix products."""
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    assert "aten::mm" in names
    return sum(name.startswith("Optimizer.step#") for name in names)


def test_the_named_steps_are_traced_on_every_rank(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", ["pp=2", "train.max_steps=6", "log.profile_steps=2-4,6"])
    assert result.errors == ["", ""]
    folder = tmp_path / "out" / "profile"
    ranges = {"2-4": 3, "6": 1}
    assert {path.name for path in folder.iterdir()} == {f"steps-{s}-rank-{r}.json" for s in ranges for r in (0, 1)}
    for path in folder.iterdir():
        assert _num_updates(path) == ranges[path.name.split("-rank")[0].removeprefix("steps-")]
    assert f"traced steps 2-4: {folder / 'steps-2-4-rank-0.json'}" in result.terminal


def test_steps_beyond_the_epochs_are_refused_before_weights_load(inputs: Path, tmp_path: Path) -> None:
    result = run(inputs, tmp_path / "out", ["tp=2", "train.epochs=3", "log.profile_steps=4"])
    assert set(result.errors) == {"ConfigError: log.profile_steps = '4': the run has 3 steps. Name steps of 1 to 3"}


def test_a_resumed_run_says_what_is_past(inputs: Path, tmp_path: Path) -> None:
    saving = ["save.strategy=steps", "save.steps=2", "log.profile_steps=1,4"]
    run(inputs, tmp_path / "out", [*saving[:2], "train.max_steps=2"])
    result = run(inputs, tmp_path / "out", [*saving, "train.max_steps=4", "resume=auto"])
    assert "log.profile_steps: 1 began before step 3; not traced" in result.terminal
    assert [path.name for path in (tmp_path / "out" / "profile").iterdir()] == ["steps-4-rank-0.json"]
