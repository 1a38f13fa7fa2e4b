"""A worker's entry: from its environment to a process group, the training function, and a clean or a told end.

It reads its place in the job from the environment alone, so that torchrun can start it too:
``torchrun --nproc-per-node N -m shardwise.launch.worker OUTPUT_DIR``.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from shardwise.errors import ConfigError, LaunchError, SaveError, ShardwiseError
from shardwise.launch import forkserver
from shardwise.launch.culprit import WorkerError, is_connection_error, remove_errors, write_error
from shardwise.launch.heap import keep_freed_pages
from shardwise.launch.lock import claim, release_all
from shardwise.launch.place import DEFAULT_TARGET
from shardwise.launch.stop import ErrorChannel, StopChannel
from shardwise.launch.streams import log_path, redirect
from shardwise.launch.whereabouts import Whereabouts
from shardwise.lifeline import die_with_parent
from shardwise.train.context import Restart, WorkerContext, note_nothing
from shardwise.train.status import Status, finish_status, read_status, write_status

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # cuda and npu: written, not run in our tests
TIMEOUT_VARIABLE = "SHARDWISE_TIMEOUT_SECONDS"
_DEFAULT_TIMEOUT_SECONDS = 1800.0
_MAX_TIMEOUT_SECONDS = 365 * 86400.0

Train = Callable[[WorkerContext], dict[str, Any] | None]


def entry(output_dir: Path, target: str = DEFAULT_TARGET, restart: Restart | None = None) -> dict[str, Any] | None:
    """Run one worker of a job.

    Args:
        output_dir: folder of the run; ``plan.json`` in it gives the ``device_type``.
        target: ``module:function``; the function takes a :class:`WorkerContext`.
        restart: what is known of a failure before, None at the first start.

    Returns:
        What the function returned. After an exception there is no return: the error is left in
        ``logs/error-rank-N.json`` and the process ends at once with the error's exit code, so that no exit handler
        can keep the other ranks waiting.
    """

    def body(terminal: TextIO | None, note: Callable[[str], None]) -> dict[str, Any] | None:
        context = WorkerContext(
            output_dir=output_dir,
            rank=int(os.environ["RANK"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            stop=StopChannel(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
            terminal=terminal,
            restart=restart or _foreign_restart(os.environ),
            note=note,
        )
        return _run(context, target)

    return guarded(lambda: output_dir, body)


Body = Callable[[TextIO | None, Callable[[str], None]], dict[str, Any] | None]


def guarded(
    folder: Callable[[], Path], body: Body, muted: bool = False, notes: Path | None = None
) -> dict[str, Any] | None:
    """Run ``body`` as a worker: output in the log, life tied to the launcher, an error left for it.

    Args:
        folder: where log and errors lie; asked again when there is an error to leave.
        body: takes the stream to the terminal (rank 0 only), and what takes the words of where it is.
        muted: show nothing on the terminal at first.
        notes: where the words of where it is lie; None: in ``folder``.
    """
    _bind_to_launcher(os.environ)
    rank = int(os.environ["RANK"])
    (folder() / "logs").mkdir(parents=True, exist_ok=True)
    if _is_foreign(os.environ):  # our launcher has done so before it started the workers
        remove_errors(folder(), rank, int(os.environ["WORLD_SIZE"]))
    terminal = redirect(log_path(folder(), rank), terminal=rank == 0, muted=muted)
    note = _noted_in(notes or folder(), rank)
    try:
        _check_preloaded(os.environ)
        result = body(terminal, note)
    except SystemExit as leaving:
        if not leaving.code:
            return None
        _fail(folder(), rank, leaving, leaving.code if isinstance(leaving.code, int) else 1)
    except BaseException as error:
        _fail(folder(), rank, error, error.exit_code if isinstance(error, ShardwiseError) else LaunchError.exit_code)
    else:
        return result
    finally:
        release_all()
        sys.stdout.flush()
        sys.stderr.flush()
    return None


def _noted_in(folder: Path, rank: int) -> Callable[[str], None]:
    """What takes the words of where this rank is; nothing does under another launcher, which does not ask, and where
    the disk takes no file for them: to do without is better than to fail."""
    if not _is_foreign(os.environ):
        with suppress(OSError):
            return Whereabouts(folder, rank).note
    return note_nothing


def _foreign_restart(environ: Mapping[str, str]) -> Restart | None:
    """What torchrun says of a start that is not its first (``--max-restarts``)."""
    number = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not number or not _is_foreign(environ):
        return None
    allowed = int(environ.get("TORCHELASTIC_MAX_RESTARTS", str(number)))
    return Restart(number, allowed, time.time(), "a worker failed")


def _is_foreign(environ: Mapping[str, str]) -> bool:
    """Whether another launcher than ours started this worker; then it is the worker that keeps ``status.json``."""
    return forkserver.LAUNCHER_PID not in environ


def _bind_to_launcher(environ: Mapping[str, str]) -> None:
    """Tie this process's life to its parent's, and take the signals as a worker must.

    The fork server's own tie is not inherited, and the engine's start code has meanwhile set a weaker one.
    """
    preload = sys.modules.get(forkserver.PRELOAD)
    die_with_parent(os.getppid() if _is_foreign(environ) or not preload else preload.SERVER_PID)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _check_preloaded(environ: Mapping[str, str]) -> None:
    """Refuse to run on with modules missing: importing them again in each worker takes minutes, silently."""
    if _is_foreign(environ):
        return
    preload = sys.modules.get(forkserver.PRELOAD)
    failure = preload.FAILURE if preload else f"{forkserver.PRELOAD} is not among the modules"
    if failure:
        raise LaunchError(failure, "the fork server could not import what the workers need", "Check the installation.")


def timeout_seconds(environ: Mapping[str, str]) -> float:
    """How long a rank waits for another before it gives up.

    Raises:
        ConfigError: the variable holds no such time.
    """
    text = environ.get(TIMEOUT_VARIABLE, str(_DEFAULT_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TIMEOUT_SECONDS:
        rule = "must be a number of seconds above 0, a year at most"
        raise ConfigError(f"{TIMEOUT_VARIABLE} = {text!r}", rule, "Unset it: 1800 is the default")
    return seconds


def use_cores(environ: Mapping[str, str]) -> None:
    """Set the number of threads, which OpenMP has read at the import, and so before the fork."""
    if "OMP_NUM_THREADS" in environ:
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"].split(",")[0]))


def _run(context: WorkerContext, target: str) -> dict[str, Any] | None:
    use_cores(os.environ)
    plan = json.loads((context.output_dir / "plan.json").read_text(encoding="utf-8"))
    timeout = timedelta(seconds=timeout_seconds(os.environ))
    gathers = plan.get("strategy", {}).get("dp_shard", 1) > 1
    open_process_group(plan["device_type"], context.local_rank, timeout, gathers=gathers)
    tells = context.rank == 0 and _is_foreign(os.environ)
    if tells:
        claim(context.output_dir)
        write_status(context.output_dir, Status(state="running"))
    result = _load(target)(context)
    dist.destroy_process_group()
    if tells:
        finish_status(context.output_dir, state="done", exit_code=0)
    return result


def open_process_group(
    device_type: str, local_rank: int, timeout: timedelta, store: dist.Store | None = None, gathers: bool = False
) -> None:
    """Open the default process group with the device type's backend; ``store`` None: one as the environment says.

    ``gathers``: the plan shares weights out over data ranks.
    """
    if device_type == "cpu":
        keep_freed_pages(os.environ, gathers)
    if device_type == "npu":
        importlib.import_module("torch_npu")  # registers torch.npu and hccl
    if device_type != "cpu":
        torch.get_device_module(device_type).set_device(local_rank)
    if store is None:
        dist.init_process_group(BACKENDS[device_type], init_method="env://", timeout=timeout)
        return
    place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    dist.init_process_group(BACKENDS[device_type], store=store, timeout=timeout, **place)


def _load(target: str) -> Train:
    module, _, function = target.partition(":")
    loaded: Train = getattr(importlib.import_module(module), function)
    return loaded


def worker_error(rank: int, error: BaseException, exit_code: int) -> WorkerError:
    """An exception as the launcher and ``status.json`` are told of it."""
    refusal = error if isinstance(error, ShardwiseError) else None
    failed = error.rank if isinstance(error, SaveError) else None  # all ranks tell what one has met
    return WorkerError(
        time=time.time(),
        rank=rank if failed is None else failed,
        type=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code,
        connection_error=is_connection_error(error),
        refused=refusal is not None,
        rule=refusal.rule if refusal else None,
        remedy=refusal.remedy if refusal else None,
    )


def _fail(output_dir: Path, rank: int, error: BaseException, exit_code: int) -> None:
    """Leave the error for the launcher and the traceback in the log, and end the process.

    Where the disk takes neither, the job's store takes the error.
    """
    written = worker_error(rank, error, exit_code)
    try:
        with suppress(OSError):
            # Not sys.stderr: on rank 0 that shows on the terminal, where the launcher says it in one line.
            print(written.traceback, file=sys.__stderr__, flush=True)
            sys.stdout.flush()
        try:
            write_error(output_dir, written)
        except OSError:
            ErrorChannel(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])).leave(written)
        if _is_foreign(os.environ):
            tell_failure(output_dir, written)
        release_all()
    finally:
        os._exit(exit_code)


def tell_failure(output_dir: Path, error: WorkerError) -> None:
    """Put an error into ``status.json``; a complaint about a peer only where nobody has said more."""
    status = read_status(output_dir)
    if error.connection_error and status is not None and status.state != "running":
        return
    state = "refused" if error.refused and error.exit_code == ShardwiseError.exit_code else "failed"
    finish_status(output_dir, state=state, exit_code=error.exit_code, rank=error.rank, error=error.message)


if __name__ == "__main__":
    entry(Path(sys.argv[1]), next(iter(sys.argv[2:3]), DEFAULT_TARGET))
