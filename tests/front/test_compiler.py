"""What compiled blocks need of a machine is looked for before anything is loaded."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.front.compiler import missing_for_compiling
from shardwise.front.resolve import prepare
from tests.spec.model_folder import make_folder


def _program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with Python's headers and a PATH with g++ alone; returns the folder of programs."""
    folder, headers = tmp_path / "bin", tmp_path / "include"
    folder.mkdir()
    headers.mkdir()
    (headers / "Python.h").touch()
    _program(folder, "g++")
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(headers))
    return folder


def test_a_cpu_needs_the_compiler_that_torch_will_call(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_for_compiling("cpu") == ""
    monkeypatch.setenv("CXX", "clang++")
    assert missing_for_compiling("cpu") == "a C++ compiler (clang++ is not on the PATH)"
    _program(machine, "clang++")
    assert missing_for_compiling("cpu") == ""


def test_headers_are_needed_too(machine: Path, tmp_path: Path) -> None:
    (tmp_path / "include" / "Python.h").unlink()
    (machine / "g++").unlink()
    missing = missing_for_compiling("cpu")
    assert "g++ is not on the PATH" in missing
    assert "Python.h is not there" in missing


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_other_devices_need_triton_and_a_c_compiler(
    device: str, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    missing = missing_for_compiling(device)  # type: ignore[arg-type]
    assert "gcc or clang is not on the PATH" in missing
    assert "the Python package triton" in missing
    _program(machine, "clang")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert missing_for_compiling(device) == ""  # type: ignore[arg-type]


def test_a_run_without_a_compiler_is_refused_by_what_is_missing(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    tree = {
        "model": str(make_folder(tmp_path / "m")),
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "train": {"compile": True},
        "device": "cpu",
        "output_dir": str(tmp_path / "out"),
    }
    assert prepare(tree)[0].train.compile
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train.compile = true: .*no-such-compiler.*train.compile=false"):
        prepare(tree)
    tree["train"] = {"compile": False}
    assert not prepare(tree)[0].train.compile
