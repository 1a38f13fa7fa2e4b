"""A script as a job: which file, and where its logs lie while its output folder is not known yet.

The output folder of a script is known when its Trainer starts. Until then logs and errors lie in a folder for this
job alone; in it the first worker of a machine then leaves the name of the output folder. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_POINTER = "output_dir"


@dataclass(frozen=True)
class Script:
    """What runs in each process: a file, or a module (``python -m NAME``), and its arguments."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False


def point_to(job_dir: Path, output_dir: Path) -> None:
    """Leave the name of the output folder for the launcher, behind those of Trainers before, in one move."""
    names = [str(path) for path in outputs_of(job_dir) if path != output_dir]
    draft = job_dir / f".{_POINTER}"
    draft.write_text(json.dumps([*names, str(output_dir)]), encoding="utf-8")
    draft.replace(job_dir / _POINTER)


def outputs_of(job_dir: Path) -> list[Path]:
    """The output folders that the workers of a job have named, the one at work last."""
    path = job_dir / _POINTER
    return [Path(name) for name in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def output_of(job_dir: Path) -> Path | None:
    """The output folder that a worker has named, None before."""
    return next(reversed(outputs_of(job_dir)), None)
