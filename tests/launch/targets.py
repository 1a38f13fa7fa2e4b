"""Small training functions: an all-reduce in a loop, and one way to end each."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import CheckpointError
from shardwise.train.compiler_cache import compiler_folder
from shardwise.train.context import WorkerContext
from shardwise.train.status import update_status


def _reduce(value: float = 1.0) -> float:
    tensor = torch.full((4,), value)
    dist.all_reduce(tensor)
    return float(tensor[0])


def _spin(context: WorkerContext, seconds: float = 60.0) -> None:
    """All-reduces until the time is up; says that it has begun."""
    _reduce()
    (context.output_dir / f"begun-{context.rank}").write_text(str(os.getpid()))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        _reduce()
        time.sleep(0.01)


def normal(context: WorkerContext) -> dict[str, Any]:
    (context.output_dir / f"first-line-{context.rank}").write_text(str(time.time()))
    assert _reduce(context.rank) == sum(range(context.world_size))
    print(f"printed by rank {context.rank}")
    print(f"complained by rank {context.rank}", file=sys.stderr)
    os.write(1, f"written by rank {context.rank}\n".encode())
    if context.terminal:
        context.terminal.write("a line for the terminal\n")
    assert (context.terminal is None) == (context.rank != 0)
    return {"steps": 1}


def forever(context: WorkerContext) -> None:
    _spin(context)


def rank_1_raises(context: WorkerContext) -> None:
    if context.rank == 1:
        _spin(context, 0.2)
        raise ValueError("row 17 is not a row")
    _spin(context)


def rank_1_raises_with_compiled_code(context: WorkerContext) -> None:
    if context.rank == 0:
        compiler_folder(context.output_dir).mkdir()
        (compiler_folder(context.output_dir) / "block.so").touch()
    rank_1_raises(context)


def rank_1_raises_while_others_wait(context: WorkerContext) -> None:
    _reduce()
    if context.rank == 1:
        time.sleep(0.5)
        raise ValueError("row 17 is not a row")
    _reduce()


def all_refuse(context: WorkerContext) -> None:
    raise CheckpointError("model.safetensors", "holds no lm_head.weight", "Take the whole folder.")


def rank_1_leaves_with_status_0(context: WorkerContext) -> None:
    if context.rank == 1:
        os._exit(0)
    _spin(context)


def exit_with_7(context: WorkerContext) -> None:
    _reduce()
    sys.exit(7)


def stoppable(context: WorkerContext) -> dict[str, Any]:
    """Steps that end when rank 0 hears of a stop; every rank then makes the same number of steps."""
    numbers = [0, int(signal.SIGTERM), int(signal.SIGINT)]
    steps = 0
    while True:
        asked = context.stop.requested() if context.rank == 0 else None
        number = int(_reduce(float(signal.Signals[asked].value) if asked else 0.0))
        assert number in numbers
        if number:
            (context.output_dir / f"stopped-{context.rank}").write_text(str(steps))
            return {"stopped": signal.Signals(number).name}
        time.sleep(0.05)
        steps += 1
        (context.output_dir / f"begun-{context.rank}").write_text(str(os.getpid()))
        if context.rank == 0:
            update_status(context.output_dir, step=steps)


def disk_full(context: WorkerContext) -> None:
    """Rank 1 fails, and neither its error nor the status finds a place (a folder is in it)."""
    _reduce()
    if context.rank == 1:
        (context.output_dir / "logs" / "error-rank-1.json").mkdir()
        (context.output_dir / "status.json").unlink()
        (context.output_dir / "status.json").mkdir()
        raise OSError(28, "No space left on device", "model.safetensors")
    _reduce()


def rank_1_sleeps(context: WorkerContext) -> None:
    """In its third step, while the others wait for it until their time is up."""
    for step in range(1, 4):
        context.note(f"step {step}")
        if (context.rank, step) == (1, 3):
            time.sleep(300)
        _reduce()
