"""First contact: a script that no launcher started becomes the launcher of itself, on all devices.

The process is replaced by ``python -m shardwise.launch FILE ARGUMENTS``, so nothing behind that line runs in it, its
exit status is the job's, and signals reach the launcher without a go-between.
"""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from shardwise.config import apply_overrides
from shardwise.errors import ConfigError
from shardwise.launch.place import PRESETS
from shardwise.launch.script import Script
from shardwise.spec.paths import check_path

DEVICE_VARIABLE = "SHARDWISE_DEVICE"
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def start_job(num_devices: int) -> NoReturn:
    """Replace this process by the launcher of its own script.

    Args:
        num_devices: number of processes, over all machines.

    Raises:
        ConfigError: there is no file to start again.
    """
    script = find_script(sys.modules["__main__"], sys.argv)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Without the current folder on the search path: a json.py in it would be imported. The package itself must be.
    # (Flags such as -u and -W go on.)
    flags = [flag for flag in subprocess._args_from_interpreter_flags() if flag != "-P"]  # type: ignore[attr-defined]
    launcher = [sys.executable, *flags, "-P", "-m", "shardwise.launch", "--devices", str(num_devices)]
    what = ["-m", script.name] if script.is_module else [script.name]
    os.execve(sys.executable, [*launcher, *what, *script.arguments], os.environ | {"PYTHONPATH": _search_path()})


def run_script(script: Path, arguments: list[str], entries: list[str]) -> NoReturn:
    """Replace this process by the script, with ``key=value`` entries that win over what it says.

    Raises:
        ConfigError: no such file, or an entry that is no ``key=value``.
    """
    check_path("script", str(script))
    if not script.is_file():
        raise ConfigError(f"script {script}", "there is no such file", "Name a Python file")
    tree = apply_overrides({}, entries)
    variables = {PRESETS: json.dumps(entries), "PYTHONPATH": _search_path()}
    device = tree.get("device")
    if device is not None:
        variables[DEVICE_VARIABLE] = str(device)
    opening = [sys.executable, "-P", "-m", "shardwise.launch.opening", str(script)]
    os.execve(sys.executable, [*opening, *arguments], os.environ | variables)


def _search_path() -> str:
    """Where the next process finds this package, installed or not."""
    return os.pathsep.join(filter(None, [_PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))


def find_script(main: ModuleType, argv: list[str]) -> Script:
    """The script that ``__main__`` is.

    Raises:
        ConfigError: a notebook, ``-c``, standard input, or an installed tool, which must not run on every device.
    """
    rule = "training runs in processes that start from a file, and this is {}"
    remedy = "Save the code as script.py and use: shardwise run script.py"
    if hasattr(builtins, "get_ipython") or hasattr(sys, "ps1"):
        raise ConfigError("start from a notebook or a prompt", rule.format("none"), remedy)
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file():  # of standard input it is <stdin>
        where = "python -c" if argv[:1] == ["-c"] else "standard input"
        raise ConfigError(f"start from {where}", rule.format("none"), remedy)
    if _is_installed(Path(file)):
        remedy = "Use: shardwise run script.py"
        raise ConfigError(f"start from {file}", rule.format("an installed tool"), remedy)
    spec = main.__spec__
    if spec is not None:
        name = spec.name.removesuffix(".__main__") if spec.name != "__main__" else None
        if name:
            return Script(name, tuple(argv[1:]), is_module=True)
    return Script(os.path.abspath(file), tuple(argv[1:]))


def _is_installed(file: Path) -> bool:
    folders = (sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib"))
    return any(file.resolve().is_relative_to(Path(folder).resolve()) for folder in folders)
