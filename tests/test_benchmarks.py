"""The benchmark of a whole job, on a job that takes seconds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from benchmarks.checkpoints import Round, share_of
from benchmarks.job import report
from benchmarks.plan import MOST_MIB, measure
from benchmarks.watch import StepRecord
from tests.train.runs import make_inputs

ROOT = Path(__file__).resolve().parents[1]


def test_the_report_of_a_job() -> None:
    steps = [
        {"kind": "train", "loss": 2.5, "step_seconds": 3.0, "num_input_tokens": 128},
        {"kind": "eval", "eval_loss": 2.0},
        {"kind": "train", "loss": 1.5, "step_seconds": 1.0, "num_input_tokens": 128},
    ]
    record = StepRecord(0.0, peak_rank_bytes=2**30, peak_total_bytes=3 * 2**30)
    assert report(record, 61.0, "\n".join(map(json.dumps, steps))).splitlines() == [
        "memory    all processes together at most 3.00 GiB, the largest 1.00 GiB",
        "step      median 2.00 s of 2 (1.00 to 3.00 s), 128 tokens",
        "job       01:01 from the command to its end",
        "loss      2.5000 in the first step, 1.5000 in the last",
    ]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.job", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_a_small_job_is_watched_to_its_end(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    config = {"model": str(inputs / "model"), "data": {"train": str(inputs / "rows.jsonl")}, "device": "cpu"}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config | {"train": {"max_steps": 3}}))
    done = _run(str(path), "pp=2", "tp=2")
    assert done.returncode == 0, done.stderr
    found = re.search(r"together at most ([\d.]+) (.iB), the largest ([\d.]+) MiB", done.stdout)
    assert found is not None, done.stdout
    total = float(found[1]) * {"MiB": 1, "GiB": 1024}[found[2]]
    assert total > 2 * float(found[3]), "four ranks and what started them"
    assert re.search(r"median [\d.]+ s of 3 ", done.stdout)
    refused = _run(str(path), "tp=3")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "strategy.tp = 3" in refused.stderr


def test_steps_beside_a_save_are_compared_round_by_round() -> None:
    """A machine that is slow in one round, or stalls in one step, changes nothing."""
    steps = [([1.0] * 3, [1.1, 1.1, 9.0]), ([2.0] * 3, [2.0] * 3), ([1.0] * 3, [5.0] * 3)]
    assert share_of([Round(alone, beside, save=1.0) for alone, beside in steps]) == 1.1


def test_a_search_is_timed() -> None:
    one = measure("qwen3-0.6b", "a100-40gb", 32, 4)
    assert 0 < float(str(one["mib"])) < MOST_MIB
    assert int(str(one["considered"])) > 100
