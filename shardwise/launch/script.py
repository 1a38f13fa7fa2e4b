"""A script as a job: which file, and where its logs lie while its output folder is not known yet.

The output folder of a script is known when its Trainer starts. Until then logs and errors lie in a folder for this
job alone; in it the first worker of a machine then leaves the name of the output folder. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.files import replace_text

_POINTER = "output_dir"
_BEGUN = "begun"


@dataclass(frozen=True)
class Script:
    """What runs in each process: a file, or a module (``python -m NAME``), and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def point_to(job_dir: Path, output_dir: Path) -> None:
    """Leave the name of the output folder for the launcher, behind those of Trainers before, in one move."""
    names = [str(path) for path in outputs_of(job_dir) if path != output_dir]
    _write(job_dir / _POINTER, [*names, str(output_dir)])


def outputs_of(job_dir: Path) -> list[Path]:
    """The output folders that the workers of a job have named, the one at work last."""
    return [Path(name) for name in _read(job_dir / _POINTER)]


def output_of(job_dir: Path) -> Path | None:
    """The output folder that a worker has named, None before."""
    return next(reversed(outputs_of(job_dir)), None)


def note_begun(job_dir: Path, output_dir: Path, attempt: int) -> None:
    """Leave word for later attempts that a Trainer of this one (0 for the first) has begun in a folder, in one move."""
    _write(job_dir / _BEGUN, [*_read(job_dir / _BEGUN), [attempt, str(output_dir)]])


def begun_of(job_dir: Path) -> list[tuple[int, Path]]:
    """Which attempt began in which folder: an entry for each Trainer, in their order."""
    return [(attempt, Path(name)) for attempt, name in _read(job_dir / _BEGUN)]


def _write(path: Path, values: list[Any]) -> None:
    replace_text(path, json.dumps(values))


def _read(path: Path) -> list[Any]:
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []
