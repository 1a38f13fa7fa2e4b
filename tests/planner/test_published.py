"""Predictions of published runs: the table of errors fails when it grows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ablate_planner import PARTS, dense_runs, error
from shardwise.planner.accuracy import Prediction, predict, read_rows, summary

TABLE = Path(__file__).with_name("published.csv")
EVERY = 4  # of the largest source one model in so many


@pytest.fixture(scope="module")
def predictions() -> list[Prediction]:
    rows = read_rows(TABLE)
    models = list(dict.fromkeys(row["n_layers"] + row["hidden"] for row in rows if "single-node" in row["source"]))
    kept = {model for index, model in enumerate(models) if index % EVERY == 0}
    return predict(r for r in rows if "single-node" not in r["source"] or r["n_layers"] + r["hidden"] in kept)


@pytest.fixture(scope="module")
def found(predictions: list[Prediction]) -> dict[str, Any]:
    return summary(predictions)


def test_few_rows_cannot_be_predicted(predictions: list[Prediction]) -> None:
    reasons = [one.skipped for one in predictions if one.skipped]
    assert len(reasons) <= 21
    assert all("empty" in reason or "fewer than" in reason or "no multiple" in reason for reason in reasons)


def test_step_time(found: dict[str, Any]) -> None:
    dense, experts = found["time"]["dense"], found["time"]["moe"]
    assert dense["rows"] > 450
    assert dense["mean_absolute"] < 0.10
    assert abs(dense["median"]) < 0.05
    assert experts["rows"] > 30
    assert experts["mean_absolute"] < 0.18


# Sources with at least 10 scored rows, and their largest mean error.
SOURCES = {
    "BigScience BLOOM tr11 prequel": 0.12,
    "MindFormers r1.3.0 model cards": 0.13,
    "MindSpeed-LLM (ModelLink) README": 0.10,
    "MindSpeed-LLM CI baselines": 0.21,
    "MosaicML llm-foundry MPT benchmarks": 0.06,
    "SimuMax B200 v1.2 release (Moore Threads)": 0.04,
    "vTrain ground truth (multi-node)": 0.09,
    "vTrain ground truth (single-node)": 0.10,
}


def test_step_time_of_each_source(found: dict[str, Any]) -> None:
    sources = {name: errors for name, errors in found["time_by_source"].items() if errors["rows"] >= 10}
    assert set(sources) == set(SOURCES)
    worse = {name: e["mean_absolute"] for name, e in sources.items() if e["mean_absolute"] > SOURCES[name]}
    assert worse == {}


def test_peak_memory(found: dict[str, Any]) -> None:
    memory = found["memory"]
    assert memory["rows"] == 100
    assert memory["mean_absolute"] < 0.12
    assert memory["share_15_low"] <= 0.05


def test_the_fastest_comes_first(found: dict[str, Any]) -> None:
    assert found["ranking"]["groups"] >= 10
    assert found["ranking"]["mean_loss"] < 0.03


def test_each_part_of_the_model_is_worth_something() -> None:
    """What the docs' table shows of all rows: without any of the five effects the error grows."""
    runs = dense_runs()[::3]
    raw, scaled = error(runs, PARTS["nothing"])
    assert len(PARTS) == 6
    for name, predicted in list(PARTS.items())[1:]:
        without_raw, without_scaled = error(runs, predicted)
        assert without_raw > raw + 0.04, name
        assert without_scaled > scaled + 0.015, name
