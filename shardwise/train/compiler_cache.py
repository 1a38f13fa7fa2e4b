"""Where the compiled code of a run lies."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import torch.distributed as dist

from shardwise.train.callbacks import Callback, RunInfo

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder(output_dir: Path) -> Path:
    """The folder of compiled code of the run that writes to ``output_dir``, on this machine."""
    run = hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"shardwise-compiled-{os.getuid()}-{run}"


class CompilerCache(Callback):
    """Gives a run a folder of its own, shared by its ranks on one machine, empty before and gone after it.

    Torch's own folder, shared by all runs of a user, keeps the half-written library of a killed run, and
    every later run that wants this library fails on it. A folder that the user names is used as it is.

    Args:
        environment: that of the process; torch reads the folder from it whenever it compiles.
    """

    may_stop = False

    def __init__(self, local_rank: int, environment: MutableMapping[str, str]) -> None:
        self._local_rank, self._environment = local_rank, environment
        self._folder: Path | None = None

    def on_train_begin(self, info: RunInfo) -> None:
        """Clear what a killed run has left."""
        if _VARIABLE in self._environment:
            return
        self._folder = cache_folder(info.output_dir)
        self._remove()
        dist.barrier()
        self._environment[_VARIABLE] = str(self._folder)

    def on_train_end(self, reason: str | None) -> None:
        """Everything is loaded by now."""
        if self._folder is not None:
            del self._environment[_VARIABLE]
            self._remove()

    def _remove(self) -> None:
        if self._local_rank == 0 and self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
