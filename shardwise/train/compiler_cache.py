"""Where the compiled code of a run lies. Imports no torch before the run."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from shardwise.train.callbacks import Callback, RunInfo

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_folder(output_dir: Path) -> Path:
    """The folder of compiled code of the run that writes to ``output_dir``, on this machine."""
    run = hashlib.sha256(str(output_dir.resolve()).encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"shardwise-compiled-{os.getuid()}-{run}"


def remove_cache(output_dir: Path) -> None:
    """Remove that folder, if there is one."""
    shutil.rmtree(compiler_folder(output_dir), ignore_errors=True)


class CompilerCache(Callback):
    """Gives a run a folder of its own, shared by its ranks on one machine, empty before and gone after it.

    Torch's own folder, shared by all runs of a user, keeps the half-written library of a killed run, and
    every later run that wants this library fails on it. A folder that the user names is used as it is.

    A rank of a run that fails leaves the folder: another rank may still compile, and would fail too and perhaps be
    taken for the first. The launcher removes it when no rank is left, where there is none the next run.

    Args:
        environment: that of the process; torch reads the folder from it whenever it compiles.
    """

    may_stop = False

    def __init__(self, local_rank: int, environment: MutableMapping[str, str]) -> None:
        self._local_rank, self._environment = local_rank, environment
        self._output_dir: Path | None = None

    def on_train_begin(self, info: RunInfo) -> None:
        """Clear what a killed run has left."""
        if _VARIABLE in self._environment:
            return
        import torch.distributed as dist

        self._output_dir = info.output_dir
        self._remove()
        dist.barrier()
        self._environment[_VARIABLE] = str(compiler_folder(info.output_dir))

    def on_train_end(self, reason: str | None) -> None:
        """Everything is loaded by now."""
        if self._output_dir is not None:
            del self._environment[_VARIABLE]
            self._remove()

    def _remove(self) -> None:
        if self._local_rank == 0 and self._output_dir is not None:
            remove_cache(self._output_dir)
