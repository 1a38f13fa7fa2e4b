"""Runs of the worker's ``train`` on forked ranks: all of a run but its launcher, in a second or two."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config import apply_overrides
from shardwise.front.resolve import prepare
from shardwise.spec.run import dump_run
from shardwise.testing import run_distributed
from shardwise.train.callbacks import Callback
from shardwise.train.context import WorkerContext
from shardwise.train.status import Status, read_status
from tests.fixtures import make_model, make_rows

MakeCallbacks = Callable[[int], list[Callback]]


class _Stop:
    """Asks for a stop from the look number ``after`` (from 1) on; 0: never."""

    def __init__(self, after: int) -> None:
        self._after, self._looks = after, 0

    def requested(self) -> str | None:
        self._looks += 1
        return "SIGTERM" if self._after and self._looks >= self._after else None


@dataclass
class Result:
    """What came of a run: by rank, and in its folder."""

    output_dir: Path
    returned: list[dict[str, Any]]
    errors: list[str]
    callbacks: list[Any]
    terminal: str

    def metrics(self, kind: str = "train") -> list[dict[str, Any]]:
        lines = (self.output_dir / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def status(self) -> Status:
        status = read_status(self.output_dir)
        assert status is not None
        return status


def make_inputs(folder: Path, name: str = "llama") -> Path:
    """A folder with a tiny model and eight rows of tokens."""
    make_model(folder / "model", name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return folder


def run(
    inputs: Path,
    output_dir: Path,
    overrides: Sequence[str],
    make_callbacks: MakeCallbacks | None = None,
    stop_at_look: int = 0,
) -> Result:
    """Train on as many ranks as the overrides say, from the files in ``inputs``.

    ``stop_at_look``: number of rank 0's look at the stop signal that finds one; 0: none does.
    """
    paths = [f"model={inputs / 'model'}", f"data.train={inputs / 'rows.jsonl'}", f"output_dir={output_dir}"]
    config, plan = prepare(apply_overrides({}, [*paths, "device=cpu", *overrides]))
    output_dir.mkdir(exist_ok=True)
    (output_dir / "run.yaml").write_text(dump_run(config))
    plan.save(output_dir / "plan.json")
    ranks = run_distributed(_rank, plan.devices, output_dir, plan.devices, make_callbacks, stop_at_look)
    returned, errors, callbacks, terminals = zip(*ranks, strict=True)
    return Result(output_dir, list(returned), list(errors), list(callbacks), terminals[0])


def _rank(
    rank: int, output_dir: Path, world_size: int, make_callbacks: MakeCallbacks | None, stop_at_look: int
) -> tuple[Any, ...]:
    from shardwise.train.worker import train

    os.environ.pop("WANDB_MODE", None)
    terminal = io.StringIO()
    stop, shown = _Stop(stop_at_look), terminal if rank == 0 else None
    context = WorkerContext(output_dir, rank, rank, world_size, stop, shown)
    callbacks = make_callbacks(rank) if make_callbacks else []
    returned, error = None, ""
    try:
        returned = train(context, callbacks)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    notes = [getattr(callback, "notes", None) for callback in callbacks]
    return returned, error, notes, terminal.getvalue()
