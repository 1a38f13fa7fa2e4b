"""The machine is really measured, and a run without a strategy is planned with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError
from shardwise.front import measuring
from shardwise.front.measuring import cluster_of, keep, known, measured_here
from shardwise.front.planning import find_cluster, save_profile
from shardwise.measure.samples import Samples
from tests.measure.made_samples import made_samples
from tests.train.runs import make_inputs

ROOT = Path(__file__).resolve().parents[2]


def shardwise(*words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-m", "shardwise.cli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_run_without_a_strategy_measures_plans_trains_and_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs(tmp_path)
    out = tmp_path / "out"
    words = ["--model", str(inputs / "model"), "--data", str(inputs / "rows.jsonl"), "--devices", "2"]
    words += ["--device", "cpu", f"output_dir={out}", "train.max_steps=3", "save.export=false"]
    done = shardwise("train", *words, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    for text in ("measuring this machine with 2 processes", "planned: ", "predicted: ", "why: ", "measured"):
        assert text in done.stderr, done.stderr
    plan = json.loads((out / "plan.json").read_text())
    assert plan["devices"] == 2
    told = json.loads((out / "status.json").read_text())["prediction"]
    assert told["predicted_step_seconds"] == plan["predicted"]["step_seconds"]
    assert told["measured_steps"] == 2
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert told["measured_memory_bytes"] == max(step["peak_memory_bytes"] for step in steps)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shown = CliRunner().invoke(cli.app, ["measure", "--devices", "2", "--show", "--json"], catch_exceptions=False)
    answer = json.loads(shown.stdout)
    samples = Samples.from_json(answer["samples"])
    assert {one.op for one in samples.collectives} >= {"all_reduce", "all_gather", "send"}
    assert all(one.seconds > 0 for one in (*samples.products, *samples.attention, *samples.elementwise))
    profile = tmp_path / "own.json"
    profile.write_text(json.dumps(answer["profile"]))
    cluster = find_cluster(str(profile))
    assert 1e8 < cluster.peak("fp32") * cluster.chip.matmul_efficiency < 1e13
    assert 1e-7 < cluster.links[0].latency < 0.1


def test_what_is_kept_is_found_and_the_full_one_first(tmp_path: Path) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert known(3, environ) is None
    quick = made_samples(3)
    path = keep(quick, environ)
    assert path is not None
    assert known(3, environ) == quick
    full = Samples.from_json(quick.to_json() | {"level": "full"})
    keep(full, environ)
    assert known(3, environ) == full
    assert known(3, environ | {"OMP_NUM_THREADS": "7"}) is None, "other threads, another measurement"
    for file in path.parent.iterdir():
        file.write_text("{")
    assert known(3, environ) is None
    assert keep(quick, {}) is None


def test_a_stopped_measurement_is_no_failure_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measuring, "launch", lambda *_, **__: 130)
    with pytest.raises(SystemExit) as stopped:
        measuring.measure(2, "quick")
    assert stopped.value.code == 130
    assert list(tmp_path.iterdir()) == []
    # Of a planned run: its child is told, and has the time to clean up.
    child = f"""
import pathlib, sys, time
mine = pathlib.Path({str(tmp_path)!r}, "mine")
mine.touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(0.3)
    mine.unlink()
"""
    timer = threading.Thread(target=_interrupt_when, args=(tmp_path / "mine",), daemon=True)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        measuring._run_child([sys.executable, "-c", child], os.environ)
    timer.join()
    assert list(tmp_path.iterdir()) == []


def _interrupt_when(path: Path) -> None:
    deadline = time.monotonic() + 50
    while not path.exists():
        if time.monotonic() > deadline:
            return  # a signal that comes late would end another test
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


def test_a_machine_of_many_cores_is_measured_with_as_many_processes_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "available_cores", lambda: 384)
    monkeypatch.setattr(measuring, "keep", lambda *_: None)
    asked: list[int] = []
    monkeypatch.setattr(measuring, "measure", lambda number, _: asked.append(number) or made_samples(2))
    measured_here(None, "quick", {}, show=False)
    assert asked == [256]


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was measured with 3 processes"):
        measured_here(3, "full", {"XDG_CACHE_HOME": str(tmp_path)}, show=True)
    with pytest.raises(ConfigError, match="256 processes at once are the most"):
        measured_here(1000, "full", {}, show=False)
    with pytest.raises(ConfigError, match=r"ends in \.json"):
        save_profile(cluster_of(made_samples()), tmp_path / "profile", "--output")
    with pytest.raises(ConfigError, match="cannot be written to"):
        save_profile(cluster_of(made_samples()), tmp_path / "none" / "profile.json", "--output")
    foreign = tmp_path / "package.json"
    foreign.write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--output .*package\.json: is there, and is no profile"):
        save_profile(cluster_of(made_samples()), foreign, "--output")
    assert foreign.read_text(encoding="utf-8") == "{}"
