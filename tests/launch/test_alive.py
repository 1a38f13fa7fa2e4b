"""Which devices still answer, by what the vendors' tools are known to print; no machine with such a device was used."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardwise.launch import alive
from shardwise.launch.alive import Alive, alive_devices

LISTED = """GPU 0: NVIDIA H200 (UUID: GPU-aa-0)
GPU 1: NVIDIA H200 (UUID: GPU-bb-1)
  MIG 1g.18gb     Device  0: (UUID: MIG-dd-0)
Unable to determine the device handle for gpu 0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU
GPU 3: NVIDIA H200 (UUID: GPU-cc-3)
"""


@pytest.mark.parametrize(
    ("variable", "names", "lost"),
    [
        (None, ("GPU-aa-0", "GPU-bb-1", "GPU-cc-3"), ("2",)),
        ("0,1,2,3", ("GPU-aa-0", "GPU-bb-1", "GPU-cc-3"), ("2",)),
        ("3, 2", ("GPU-cc-3",), ("2",)),
        ("GPU-bb,GPU-ee,MIG-dd-0", ("GPU-bb", "MIG-dd-0"), ("GPU-ee",)),
        ("", (), ()),
    ],
)
def test_gpus_that_are_visible_and_answer(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, names: tuple[str, ...], lost: tuple[str, ...]
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=15, stdout=LISTED))
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert alive_devices("cuda", environ) == Alive("cuda", names, lost)


def test_a_tool_that_fails_as_a_whole_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    error: Exception = subprocess.TimeoutExpired("nvidia-smi", 60)
    assert alive_devices("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"}) is None
    error = FileNotFoundError()
    assert alive_devices("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"}) is None
    broken = SimpleNamespace(returncode=18, stdout="Failed to initialize NVML: Driver/library version mismatch")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: broken)
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        assert alive_devices("cuda", environ) is None


def test_npus_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("davinci0", "davinci10", "davinci2", "davinci_manager"):
        (tmp_path / name).touch()
    monkeypatch.setattr(alive, "_DEV", tmp_path)
    assert alive_devices("npu", {}) == Alive("npu", ("0", "2", "10"))
    assert alive_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,2"}) == Alive("npu", ("2",), ("1",))
    assert alive_devices("npu", {"ASCEND_RT_VISIBLE_DEVICES": "1,3"}) is None, "they may be logical numbers"
    assert alive_devices("cpu", {}) is None
