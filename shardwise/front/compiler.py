"""What compiled blocks need of a machine, looked for before torch is imported."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.spec.plan import DeviceType


def missing_for_compiling(device: DeviceType) -> str:
    """What is missing here to compile blocks for ``device``, in words; empty where nothing is.

    Torch's compiler writes C++ for the CPU and calls ``$CXX`` or g++; for other devices it writes Triton,
    which builds its launchers with a C compiler. Both include Python's headers.
    """
    if device == "cpu":
        compiler = os.environ.get("CXX", "g++")
        missing = [] if shutil.which(compiler) else [f"a C++ compiler ({compiler} is not on the PATH)"]
    else:
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        found = any(shutil.which(name) for name in names)
        missing = [] if found else [f"a C compiler ({' or '.join(names)} is not on the PATH)"]
        if importlib.util.find_spec("triton") is None:
            missing.append("the Python package triton")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        missing.append(f"Python's headers ({header} is not there)")
    return " and ".join(missing)


def check_compiler(device: DeviceType) -> None:
    """Refuse ``train.compile`` where this machine cannot compile.

    Raises:
        ConfigError: names what is missing.
    """
    missing = missing_for_compiling(device)
    if missing:
        remedy = "Install it, or use train.compile=false: the same numbers from eager blocks"
        raise ConfigError("train.compile = true", f"this machine lacks {missing}", remedy)
