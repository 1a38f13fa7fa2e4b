"""What a worker is given by whoever started it: its place in the job, the stop signal, the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO


class StopSignal(Protocol):
    """Tells whether the user asked the job to end."""

    def requested(self) -> str | None:
        """Name of the signal that asked for the stop (``"SIGTERM"``), or None. Cheap: rank 0 asks once a step."""


@dataclass(frozen=True)
class Restart:
    """What a worker is told that was started again after a failure.

    Attributes:
        number: 1 for the first restart of the job.
        allowed: how many there may be.
        failed_at: when the failure was seen, in seconds since 1970.
        failure: it, in one message.
    """

    number: int
    allowed: int
    failed_at: float
    failure: str


def note_nothing(text: str) -> None:
    """For workers that nobody asks where they are."""


@dataclass(frozen=True)
class WorkerContext:
    """One worker of a job, as its training function sees it.

    Attributes:
        output_dir: folder of the run; holds ``run.yaml`` and ``plan.json``.
        rank: place among all workers, 0 to ``world_size - 1``.
        local_rank: place among the workers of this machine; the number of its device.
        world_size: number of workers.
        stop: to be polled by rank 0 alone, at step boundaries; the other ranks learn it from rank 0.
        terminal: stream to the user's terminal on rank 0, None elsewhere. Writing to it never raises, even
            after the terminal is gone; what is written does not appear in the rank's log.
        restart: None at the first start.
        note: takes a few words that say what this rank is at, such as ``step 7``, for messages about one that hangs.
    """

    output_dir: Path
    rank: int
    local_rank: int
    world_size: int
    stop: StopSignal
    terminal: TextIO | None
    restart: Restart | None = None
    note: Callable[[str], None] = note_nothing
