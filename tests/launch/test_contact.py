"""Which script a process is, which place it has, and how many processes a machine starts. Nothing is started here."""

from __future__ import annotations

import builtins
import subprocess
import sys
import types
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.launch.contact import find_script, start_job
from shardwise.launch.nodes import local_processes, nodes_of
from shardwise.launch.place import Nodes, Place, current_place, preset_tree
from shardwise.launch.script import Script, output_of, point_to
from tests.launch.jobs import ROOT

WORKER = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}


def main_module(file: str | None, module: str | None = None) -> types.ModuleType:
    made = types.ModuleType("__main__")
    if file is not None:
        made.__file__ = file
    made.__spec__ = None if module is None else types.SimpleNamespace(name=module)  # type: ignore[assignment]
    return made


def test_a_file_is_started_again_with_its_arguments(tmp_path: Path) -> None:
    file = str(tmp_path / "train.py")
    Path(file).touch()
    assert find_script(main_module(file), ["train.py", "--lr", "1"]) == Script(file, ("--lr", "1"))


@pytest.mark.parametrize(("module", "name"), [("job.train", "job.train"), ("job.__main__", "job")])
def test_a_module_is_started_again_as_a_module(tmp_path: Path, module: str, name: str) -> None:
    file = tmp_path / "train.py"
    file.touch()
    main = main_module(str(file), module)
    assert find_script(main, ["x", "a"]) == Script(name, ("a",), is_module=True)


@pytest.mark.parametrize(
    ("main", "argv", "words"),
    [
        (main_module(None), ["-c"], ["python -c"]),
        (main_module(None), ["-"], ["standard input"]),
        (main_module(pytest.__file__), ["pytest"], ["installed tool"]),
    ],
)
def test_what_has_no_file_is_told_the_command(main: types.ModuleType, argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        find_script(main, argv)
    for word in [*words, "shardwise run script.py"]:
        assert word in str(error.value)


def test_a_notebook_is_told_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(builtins, "get_ipython", lambda: None, raising=False)
    with pytest.raises(ConfigError, match=r"notebook.*shardwise run script.py"):
        find_script(main_module(str(tmp_path / "x.py")), ["x.py"])


def test_the_tests_themselves_are_not_started_again() -> None:
    with pytest.raises(ConfigError, match="start from"):  # an installed tool; a process without a file under -n
        start_job(2)


@pytest.mark.parametrize("arguments", [["-c"], ["-"]])
def test_code_without_a_file_is_refused_in_one_message_with_status_2(arguments: list[str], tmp_path: Path) -> None:
    code = "from shardwise.mindspore import communication\ncommunication.init()\nprint('not reached')\n"
    command = [sys.executable, *arguments, *([code] if arguments == ["-c"] else [])]
    environment = {"PYTHONPATH": str(ROOT), "SHARDWISE_DEVICE": "cpu", "PATH": "/usr/bin"}
    answer = subprocess.run(
        command, input=code, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert (answer.returncode, answer.stdout) == (2, "")
    (line,) = answer.stderr.splitlines()
    assert "shardwise run script.py" in line


def test_other_errors_of_a_script_are_shown_as_ever(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("import shardwise.mindspore\nraise ValueError('mine')\n")
    answer = subprocess.run(
        [sys.executable, "x.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert answer.returncode == 1
    assert "Traceback" in answer.stderr
    assert "ValueError: mine" in answer.stderr


def test_importing_shardwise_and_its_api_loads_no_torch(tmp_path: Path) -> None:
    code = "import sys, shardwise.mindspore; from shardwise import Trainer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=False).returncode == 0


def test_a_place_is_read_where_all_of_it_is_there() -> None:
    assert current_place(WORKER) == Place(3, 1, 4, ours=False)
    assert current_place(WORKER | {"SHARDWISE_LAUNCHER_PID": "1"}) == Place(3, 1, 4, ours=True)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        assert current_place({key: value for key, value in WORKER.items() if key != name}) is None
    with pytest.raises(ConfigError, match="RANK=x"):
        current_place(WORKER | {"RANK": "x"})


def test_presets_are_a_tree() -> None:
    assert preset_tree({}) == {}
    variables = {"SHARDWISE_PRESETS": '["devices=4", "train.max_steps=2", "tp=2"]'}
    assert preset_tree(variables) == {"devices": 4, "train": {"max_steps": 2}, "strategy": {"tp": 2}}


def test_the_output_folder_is_known_when_a_worker_has_named_it(tmp_path: Path) -> None:
    assert output_of(tmp_path) is None
    point_to(tmp_path, tmp_path / "out")
    assert output_of(tmp_path) == tmp_path / "out"


def test_machines_share_the_processes_evenly() -> None:
    nodes = nodes_of(2, 1, "10.0.0.1:29400")
    assert nodes == Nodes(2, 1, "10.0.0.1:29400")
    assert local_processes(8, nodes) == 4
    assert local_processes(3, Nodes()) == 3
    with pytest.raises(ConfigError, match="devices=6 or 8"):
        local_processes(7, nodes)


@pytest.mark.parametrize(
    ("endpoint", "local"), [(None, True), ("127.0.0.1:1", True), ("localhost:1", True), ("10.0.0.1:1", False)]
)
def test_which_machines_reach_each_other_over_the_loopback(endpoint: str | None, local: bool) -> None:
    assert Nodes(2, 0, endpoint).is_local is local


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("raise ValueError('mine')", 3, ["x.py", "ValueError: mine", "before its processes were started"]),
        ("import nowhere_to_be_found", 3, ["ModuleNotFoundError", "before its processes were started"]),
        ("def broken(:", 3, ["SyntaxError", "x.py", "line 1"]),
        ("from shardwise.errors import ConfigError\nraise ConfigError('tp = 3', 'a rule')", 2, ["shardwise: tp = 3"]),
        ("import sys\nsys.exit(7)", 7, []),
        ("import beside, sys\nprint(__name__, sys.argv[1:], sys.path[0] == beside.FOLDER)", 0, []),
    ],
)
def test_a_script_that_is_run_has_the_status_of_the_contract_before_its_job_too(
    tmp_path: Path, code: str, status: int, words: list[str]
) -> None:
    (tmp_path / "x.py").write_text(code)
    (tmp_path / "beside.py").write_text("import os\nFOLDER = os.path.dirname(os.path.realpath(__file__))\n")
    answer = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "run", "x.py", "--lr", "1"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert answer.returncode == status
    assert all(part in answer.stderr for part in words)
    assert answer.stdout == ("" if status else "__main__ ['--lr', '1'] True\n")
    assert "runpy" not in answer.stderr
    assert ("Traceback" in answer.stderr) == ("raise Value" in code or "nowhere" in code)
