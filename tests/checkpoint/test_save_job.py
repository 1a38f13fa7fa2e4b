"""How a checkpoint gets its name, and what its writer asks of a device; without other ranks."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.checkpoint import save_job, writing
from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.listing import fault_in
from shardwise.checkpoint.save_job import Content, SaveJob, damage_in
from shardwise.checkpoint.store import tensor_state
from shardwise.spec.layout import ParamLayout, chunk_range
from shardwise.testing import run_distributed


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What writers were made with; nothing is agreed on, planned or written."""
    options: list[dict[str, Any]] = []

    def writer(folder: Path, **given: Any) -> SimpleNamespace:
        options.append(given)
        return SimpleNamespace(finish=lambda *arguments: (folder / ".metadata").write_text("{}"))

    monkeypatch.setattr(save_job, "FileSystemWriter", writer)
    monkeypatch.setattr(save_job, "_make_plan", lambda *arguments: (None, SimpleNamespace(storage_data={})))
    monkeypatch.setattr(save_job, "_agree", lambda failure: None)
    monkeypatch.setattr(save_job, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setattr(SaveJob, "_write", lambda job: None)
    return options


def _job(folder: Path, background: bool = False) -> SaveJob:
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text("{}")
    return SaveJob(folder / "checkpoints", Content(3, {}, {"train": {}}, Companions(model)), background=background)


def test_a_background_save_asks_no_device_for_a_stream(tmp_path: Path, made: list[dict[str, Any]]) -> None:
    """DCP's loader that copies ahead takes the stream of the current device, which in a new thread is device 0."""
    _job(tmp_path, background=True)
    _job(tmp_path)
    assert made[0]["per_thread_copy_ahead"] == 0
    assert made[1]["per_thread_copy_ahead"] > 0


def test_every_file_is_on_the_disk_before_the_name(
    tmp_path: Path, made: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, sync = set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), sync(file)))
    job = _job(tmp_path)
    adapter = job._draft / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_text("1")
    job._give_name([])
    assert not fault_in(job.final)
    assert {path.stat().st_ino for path in (job.final, *job.final.rglob("*"))} <= synced


def _saves_beside_steps(rank: int, folder: Path) -> tuple[bool, bool]:
    """Whether a save that rests for hours was written before it was waited for; and one that is due at once."""
    writing._SHARE = 1e-6
    layout = ParamLayout("weight", (64, 64), shard_range=chunk_range(64, 2, rank))
    tensors = tensor_state([(layout, torch.rand(32, 64))], "model")
    written = []
    for step, within in ((1, math.inf), (2, 0.0)):
        job = SaveJob(folder, Content(step, tensors, {}, Companions(folder)), background=True, within=within)
        assert job._thread is not None
        job._thread.join(0.5 if within else 60)
        written.append(job.is_written)
        assert not damage_in(job.finish())
    return written[0], written[1]


def test_a_background_save_rests_until_it_is_waited_for_or_due(tmp_path: Path) -> None:
    assert run_distributed(_saves_beside_steps, 2, tmp_path, timeout=120) == [(False, True), (False, True)]
