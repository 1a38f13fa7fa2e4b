"""Calibration: numbers come back from runs that they made, and nothing is written that predicts no better."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError
from shardwise.front.planning import find_cluster
from shardwise.planner.accuracy import predict
from shardwise.planner.calibrate import calibrate
from shardwise.planner.cost import estimate
from shardwise.planner.runs import read_run
from shardwise.spec.cluster import Stack
from tests.planner.test_runs import ROW

MINE = ROW | {"framework": "shardwise", "recompute": "none", "source": "mine"}
CHANGES: list[dict[str, str]] = [
    {},
    {"tp": "8", "dp": "1"},
    {"tp": "1", "dp": "8"},
    {"pp": "1", "dp": "4"},
    {"seq_len": "8192", "micro_batch": "1"},
    {"tp": "2", "dp": "4", "micro_batch": "1"},
    {"n_layers": "16", "hidden": "2048"},
    {"n_layers": "8", "hidden": "1024", "n_heads": "16", "micro_batch": "1"},
]


def rows(stack: Stack, noise: float = 0.0, outlier: int | None = None, times: int = 1) -> list[dict[str, str]]:
    """Runs that a stack makes, each measured so many times."""
    random = np.random.default_rng(0)
    made = []
    for number, change in enumerate(CHANGES * times):
        row = MINE | change | {"id": str(number)}
        run = read_run(row)
        seconds = estimate(run.costs, replace(run.cluster, stack=stack), run.layout, run.work).step_seconds
        seconds *= 1 + noise * random.standard_normal()
        made.append(row | {"step_seconds": f"{seconds * (2 if number == outlier else 1):.6g}"})
    return made


@pytest.mark.parametrize("stack", [Stack("true", 1.7), Stack("true", 1.3, 2.2), Stack("true", 1.1, 1.0, 6e-5)], ids=str)
def test_numbers_come_back(stack: Stack) -> None:
    found = calibrate(predict(rows(stack, noise=0.01)))
    fitted = found.cluster.stack
    assert fitted.slowdown == pytest.approx(stack.slowdown, rel=0.06)
    assert found.configurations == len(CHANGES)
    assert found.after["mean_absolute"] < 0.02 < found.before["mean_absolute"]
    assert ("attention" in found.fitted) == (stack.attention > 1)
    assert ("host_seconds" in found.fitted) == (stack.host_seconds > 1e-5)


def test_one_run_that_went_wrong_does_not_move_the_others() -> None:
    found = calibrate(predict(rows(Stack("true", 1.7), noise=0.01, outlier=3)))
    assert found.cluster.stack.slowdown == pytest.approx(1.7, rel=0.05)
    assert abs(found.after["median"]) < 0.03


def test_repeated_runs_are_left_out_together() -> None:
    """One number a configuration would look exact if its second run stayed."""
    made = rows(Stack("true", 1.7), times=2)
    for row, factor in zip(made, [*np.linspace(0.7, 1.4, len(CHANGES))] * 2, strict=True):
        row["step_seconds"] = str(float(row["step_seconds"]) * factor)
    assert calibrate(predict(made)).after["mean_absolute"] > 0.1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([{"recompute": ""}] * 8, "needs measured step times of 3 different configurations, and the file has 0"),
        ([{"chip": "H100"}], "of several chips: a100-80gb, h100-80gb"),
        ([{"framework": "FSDP"}], "of several software stacks: fsdp, shardwise"),
    ],
)
def test_what_cannot_be_fitted_is_refused(changes: list[dict[str, str]], words: str) -> None:
    made = rows(Stack("true", 1.7))
    made = [row | change for row, change in zip(made, changes, strict=False)] + made[len(changes) :]
    with pytest.raises(ConfigError) as refused:
        calibrate(predict(made))
    assert words in str(refused.value)


def test_numbers_that_predict_no_better_are_not_used() -> None:
    made = rows(read_run(MINE).cluster.stack)
    random = np.random.default_rng(1)
    for row in made:
        row["step_seconds"] = str(float(row["step_seconds"]) * random.uniform(0.97, 1.03))
    made = [row for row in made if row["id"] in "012"]
    with pytest.raises(ConfigError, match="the profile as it is"):
        calibrate(predict(made))


def test_the_command_writes_a_profile_that_a_plan_takes(tmp_path: Path) -> None:
    made = rows(Stack("true", 1.7), noise=0.01)
    table, profile = tmp_path / "runs.csv", tmp_path / "mine.json"
    with table.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.DictWriter(handle, list(made[0]))
        writer.writeheader()
        writer.writerows(made)

    def invoke(*words: str) -> str:
        result = CliRunner().invoke(cli.app, list(words), catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    words = ("estimate", "--runs", str(table), "--calibrate", str(profile))
    text = invoke(*words)
    assert "fitted to 8 configurations: slowdown 1." in text
    found = json.loads(invoke(*words, "--json"))["calibration"]  # its own file may be written again
    assert found["after"]["mean_absolute"] < found["before"]["mean_absolute"]
    cluster = find_cluster(str(profile))
    assert (cluster.name, cluster.stack.name) == ("a100-80gb", "calibrated")
    assert cluster.stack.slowdown == found["stack"]["slowdown"]
    plan = ("plan", "--model", "llama2-7b", "--devices", "8", "--json", "--output", str(tmp_path / "plan.json"))
    slow, fast = (json.loads(invoke(*plan, "--cluster", name)) for name in (str(profile), "a100-80gb"))
    assert slow["plans"][0]["step_seconds"] > 1.2 * fast["plans"][0]["step_seconds"]
    other = tmp_path / "other.json"
    other.write_text("{}", encoding="utf-8")
    for path, rule in ((other, "is no profile"), (tmp_path / "mine.txt", "ends in .json")):
        with pytest.raises(ConfigError, match=rule):
            CliRunner().invoke(cli.app, [*words[:-1], str(path)], catch_exceptions=False)
