"""Whole runs in one output folder: a refused one costs no results, a second one at once is refused."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.jobs import Job, command
from tests.train.runs import make_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    return make_inputs(tmp_path / "inputs")


@contextmanager
def _train(inputs: Path, *words: str, model: str | None = None) -> Iterator[Job]:
    output = inputs.parent / "out"
    given = (f"model={model or inputs / 'model'}", f"data.train={inputs / 'rows.jsonl'}", f"output_dir={output}")
    fixed = ("device=cpu", "train.global_batch_size=4", "save.strategy=steps", "save.steps=1")
    with command(output, "-m", "shardwise.cli", "train", *given, *fixed, *words) as job:
        yield job


def _finished(inputs: Path, *words: str) -> Job:
    with _train(inputs, *words) as job:
        job.wait()
    assert "Traceback" not in job.stderr
    return job


def _steps(job: Job) -> list[int]:
    return [json.loads(line)["step"] for line in (job.output_dir / "metrics.jsonl").read_text().splitlines()]


def _results(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in ("status.json", ".lock")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if "logs" not in path.parts}


def test_a_wrong_row_costs_neither_results_nor_the_next_start(inputs: Path) -> None:
    rows = inputs / "rows.jsonl"
    good, wrong = rows.read_text(), rows.read_text() + '{"input_ids": [999999]}\n'
    rows.write_text(wrong)
    first = _finished(inputs, "train.max_steps=2")
    assert (first.process.returncode, first.status()["state"]) == (2, "refused")
    rows.write_text(good)
    done = _finished(inputs, "train.max_steps=2")
    assert done.process.returncode == 0, done.stderr
    before = _results(done.output_dir)
    assert "export/model.safetensors" in before

    rows.write_text(wrong)
    refused = _finished(inputs, "train.max_steps=3", "overwrite=true")
    assert refused.process.returncode == 2, refused.stderr
    assert _results(refused.output_dir) == before
    status = refused.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("refused", 2, 2)
    assert status["checkpoint"] == "checkpoints/step-00000002"
    assert ":9: " in status["error"]
    # On the way on, too: run.yaml and plan.json are still those of the checkpoint.
    rows.write_text(good.replace("[", "[1, ", 1).replace('"labels": [', '"labels": [1, ', 1))
    refused = _finished(inputs, "train.max_steps=3", "resume=auto", "pp=2")
    assert refused.process.returncode == 2, refused.stderr
    assert "its data is" in refused.stderr
    assert _results(refused.output_dir) == before
    assert refused.status()["checkpoint"] == "checkpoints/step-00000002"

    rows.write_text(good)
    anew = _finished(inputs, "train.max_steps=3", "overwrite=true")
    assert anew.process.returncode == 0, anew.stderr
    assert _steps(anew) == [1, 2, 3]
    assert not (anew.output_dir / ".previous").exists()
    assert not (anew.output_dir / ".lock").exists()


def test_a_second_run_in_the_folder_is_refused_and_a_stop_says_how_to_go_on(inputs: Path) -> None:
    with _train(inputs, "train.max_steps=100000", "save.steps=1000000") as job:
        metrics = job.output_dir / "metrics.jsonl"
        job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
        second = _finished(inputs, "train.max_steps=3", "resume=auto")
        assert second.process.returncode == 2
        assert f"another run is at work in it (process {job.process.pid})" in second.stderr
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.stderr
    step = job.status()["step"]
    last = job.stderr.splitlines()[-1]
    assert last == f"stopped by SIGTERM: saved checkpoints/step-{step:08d}; resume=auto goes on from there"
    # With another strategy, from the file that the run has left.
    words = (str(job.output_dir / "run.yaml"), "resume=auto", "pp=2", f"train.max_steps={step + 1}")
    with command(job.output_dir, "-m", "shardwise.cli", "train", *words) as again:
        assert again.wait() == 0, again.stderr
    assert f"after step {step}" in again.stderr
    assert again.status()["step"] == step + 1
