"""Plans of three small models, each measured on four processes of two cores, beside what the planner says of them.

``measured_plans.csv`` and ``measured_models.json`` come from a run of ``benchmarks/measured_plans`` on a quiet machine:
its rows, the machine's profile, and what the models cost. The bounds are what was reached, so that no error grows.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from benchmarks.measured_plans import COLUMNS, LENGTH, MEMORY_OVER, MEMORY_UNDER, MODELS, ROWS, TIME_LIMIT, table_line
from shardwise.front.planning import work_of
from shardwise.planner.cost import estimate
from shardwise.planner.host import on_cluster
from shardwise.planner.job import Candidate, Job
from shardwise.planner.known import with_degrees
from shardwise.planner.search import search
from shardwise.spec.block import ModelCosts
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.model import read_model
from shardwise.spec.run import TrainConfig

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """One plan: predicted and measured seconds (with quartiles), and MiB of each pipeline rank."""

    candidate: Candidate
    seconds: float
    lower: float
    upper: float
    memory: list[float]
    predicted_seconds: float
    predicted_memory: list[float]


@cache
def job_of(name: str) -> Job:
    data = json.loads((HERE / "measured_models.json").read_text(encoding="utf-8"))
    cluster = ClusterSpec.from_json(data["cluster"])
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
        model = read_model(Path(folder))
    costs = with_degrees(ModelCosts.from_json(data["costs"][name]), model)
    work = on_cluster(work_of(LENGTH, "fp32", TrainConfig()), cluster)
    return Job(model, costs, cluster, 4, ROWS, work, all_devices=True)


@cache
def rows_of(name: str) -> list[Row]:
    with (HERE / "measured_plans.csv").open(encoding="utf-8", newline="") as file:
        return [_row(line) for line in csv.DictReader(file) if line["model"] == name]


def _row(line: dict[str, str]) -> Row:
    fields: dict[str, Any] = {name: line[name] for name in COLUMNS}
    for name, value in fields.items():
        if name in ("sequence_parallel", "reshard"):
            fields[name] = value == "True"
        elif name != "schedule":
            fields[name] = int(value)
    candidate = Candidate(**fields, stages=tuple(map(int, line["stages"].split("-"))))
    job = job_of(line["model"])
    made = estimate(job.costs, job.cluster, candidate.layout(ROWS), job.work)
    seconds = [float(line[name]) for name in ("seconds", "lower", "upper")]
    memory = [sum(terms.values()) / 2**20 for terms in made.memory_terms]
    return Row(candidate, *seconds, [float(size) for size in line["mib"].split("-")], made.step_seconds, memory)


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_that_is_taken_is_among_the_fastest(name: str) -> None:
    rows = rows_of(name)
    taken = search(job_of(name), top=1, only_runnable=True).plans[0].candidate
    (chosen,) = [row for row in rows if row.candidate == taken]
    best = min(rows, key=lambda row: row.seconds)
    assert chosen.seconds <= best.seconds * (1 + TIME_LIMIT) or chosen.lower <= best.upper


# Of each model: mean error of the time, mean error of memory, and its least and most error; of the stages those whose
# memory is within the limits, and those that are predicted too low.
BOUNDS = {
    "deep": (0.07, 0.052, -0.15, 0.16, 0.80, 0.10),
    "wide": (0.085, 0.053, -0.22, 0.17, 0.80, 0.14),
    "grouped": (0.09, 0.041, -0.11, 0.14, 0.79, 0.14),
}


@pytest.mark.parametrize("name", MODELS)
def test_predictions_come_no_further_from_what_was_measured(name: str) -> None:
    rows, (time, memory, least, most, within, too_low) = rows_of(name), BOUNDS[name]
    errors = [row.predicted_seconds / row.seconds - 1 for row in rows]
    assert fmean(map(abs, errors)) <= time
    assert abs(median(errors)) <= 0.04
    errors = [
        predicted / measured - 1
        for row in rows
        for predicted, measured in zip(row.predicted_memory, row.memory, strict=True)
    ]
    assert fmean(map(abs, errors)) <= memory
    assert least <= min(errors)
    assert max(errors) <= most
    assert fmean(-MEMORY_UNDER <= error <= MEMORY_OVER for error in errors) >= within
    assert fmean(error < -MEMORY_UNDER for error in errors) <= too_low


def test_a_line_of_the_table_is_a_row_of_the_benchmark() -> None:
    fields = dict(zip(COLUMNS, (2, 1, 2, 1, False, True, "1f1b", 1, 2), strict=True)) | {"stages": [2, 1]}
    row = {"model": "wide", "fields": fields, "seconds": [1.0, 3.0, 2.0], "bytes": [2**20, 3 * 2**20, 2**21, 0]}
    with (HERE / "measured_plans.csv").open(encoding="utf-8", newline="") as file:
        names = next(csv.reader(file))
    read = _row(dict(zip(names, table_line(row), strict=True)))
    assert (read.candidate.dp_shard, read.candidate.reshard, read.candidate.stages) == (2, True, (2, 1))
    assert (read.seconds, read.memory) == (2.0, [3.0, 2.0])
