"""What the command does around a run: options over a file, another locale, Ctrl-C before the job has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.front import training
from shardwise.front.resolve import prepare
from shardwise.front.tree import run_tree
from shardwise.launch.lock import release_all
from shardwise.spec.aliases import translate
from tests.spec.model_folder import make_folder

ROOT = Path(__file__).resolve().parents[2]
_PREPARE = """
import sys
from shardwise import cli
from shardwise.front import resolve, training
training.train = lambda tree: print(resolve.prepare(tree)[1].devices) or 0
cli.main()
"""


def test_an_option_for_a_key_of_a_section_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: d8.jsonl\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data = 'd8\.jsonl': is not a section, so data\.train cannot be set"):
        run_tree([str(path)], {"data.train": "other.jsonl"})
    with pytest.raises(ConfigError, match="strategy = 'auto': is a section of keys"):
        translate({"strategy": "auto", "parallel_config": {"data_parallel": 2}})


def _environment(**variables: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON"))}
    return kept | {"PYTHONPATH": str(ROOT), "SHARDWISE_DEVICE": "cpu"} | variables


@pytest.mark.parametrize("source", ["file", "argument"])
def test_72_names_that_are_no_ascii_are_found_under_the_locale_c(tmp_path: Path, source: str) -> None:
    """baby-llama2-chinese 7: LC_ALL=C with UTF-8 mode and its coercion switched off."""
    model = make_folder(tmp_path / "模型")
    data = tmp_path / "数据.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    path = tmp_path / "配置.yaml"
    lines = {"model": model, "output_dir": tmp_path / "输出"} | ({"data.train": data} if source == "file" else {})
    text = "".join(f"{key}: {value}\n" for key, value in lines.items() if key != "data.train")
    path.write_text(text + (f"data: {{train: {data}}}\n" if source == "file" else ""), encoding="utf-8")
    words = [sys.executable, "-c", _PREPARE, "train", str(path)]
    words += [] if source == "file" else ["--data", str(data)]
    plain = _environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    done = subprocess.run(words, env=plain, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_72_a_script_finds_its_data_under_the_locale_c(tmp_path: Path) -> None:
    """There the interpreter stays as it is: the name is looked up by its UTF-8 bytes."""
    model = make_folder(tmp_path / "model")
    data = tmp_path / "数据.jsonl"
    data.write_text("{}\n", encoding="utf-8")
    code = (
        "import sys\nfrom shardwise.front.resolve import check_data\nfrom shardwise.spec.rules import parse_run\n"
        "name = bytes.fromhex(sys.argv[1]).decode('utf-8')\n"
        "assert sys.getfilesystemencoding() == 'ascii', sys.getfilesystemencoding()\n"
        f"check_data(parse_run({{'model': {str(model)!r}, 'data': {{'train': name}}}}))"
    )
    plain = _environment(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    words = [sys.executable, "-c", code, str(data).encode().hex()]
    done = subprocess.run(words, env=plain, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("start", ["from shardwise import cli; cli.main()", "launch"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(tmp_path: Path, start: str) -> None:
    """The first import that the command makes waits, until the signal is there."""
    waiting = tmp_path / "waiting"
    wait = f"import pathlib, time; pathlib.Path({str(waiting)!r}).touch(); time.sleep(60)\n"
    hook = "import builtins\nreal = builtins.__import__\ndef slow(name, *more, **named):\n"
    hook += "    if name == 'shardwise.launch.agent':\n        exec(WAIT)\n    return real(name, *more, **named)\n"
    hook += f"WAIT = {wait!r}\nbuiltins.__import__ = slow\n"
    if start == "launch":
        run = f"{hook}import runpy, sys; sys.argv = ['x', '--devices', '1', 'no.py']\n"
        run += "runpy.run_module('shardwise.launch', run_name='__main__', alter_sys=True)"
    else:
        run = f"{hook}import sys; sys.argv = ['shardwise', 'train', 'model=m']\n{start}"
    process = subprocess.Popen(
        [sys.executable, "-c", run], env=_environment(), stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    deadline = time.monotonic() + 60
    while not waiting.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr.strip()) == (130, "stopped by SIGINT")


@pytest.mark.parametrize("ending", [ConfigError("d8.jsonl:9", "not JSON"), KeyboardInterrupt()])
def test_what_ends_a_start_while_rows_are_tokenised_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: BaseException
) -> None:
    (tmp_path / "d8.jsonl").write_text("{}\n", encoding="utf-8")
    model, output = make_folder(tmp_path / "m"), tmp_path / "out"
    tree = {"model": str(model), "device": "cpu", "data": {"train": str(tmp_path / "d8.jsonl")}}
    tree |= {"output_dir": str(output)}

    def end(*_: object) -> None:
        assert (output / ".lock").exists()  # nobody else may take the folder meanwhile
        raise ending

    monkeypatch.setattr(training, "prepare_ahead", end)
    with pytest.raises(type(ending)):
        training.train(tree)
    release_all()
    assert not list(output.iterdir())
    prepare(tree)  # the corrected run is not refused


def test_the_configuration_of_the_first_test_is_else_good(tmp_path: Path) -> None:
    (tmp_path / "d8.jsonl").write_text("{}\n", encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {make_folder(tmp_path / 'm')}\ndevice: cpu\n", encoding="utf-8")
    assert prepare(run_tree([str(path)], {"data.train": str(tmp_path / "d8.jsonl")}))[1].devices == 1
