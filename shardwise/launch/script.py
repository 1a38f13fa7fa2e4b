"""A script as a job: which file, and where its logs lie while its output folder is not known yet.

The output folder of a script is known when its Trainer starts. Until then logs and errors lie in a folder for this
job alone; in it the first worker of a machine then leaves the name of the output folder. Imports no torch.
"""

from __future__ import annotations

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
    """Leave the name of the output folder for the launcher, in one move."""
    draft = job_dir / f".{_POINTER}"
    draft.write_text(str(output_dir), encoding="utf-8")
    draft.replace(job_dir / _POINTER)


def output_of(job_dir: Path) -> Path | None:
    """The output folder that a worker has named, None before."""
    path = job_dir / _POINTER
    return Path(path.read_text(encoding="utf-8")) if path.exists() else None
