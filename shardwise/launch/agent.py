"""The launcher: starts the workers of a job on this machine, and says how it ended.

Imports no torch by itself: the fork server is to start first.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config import load_yaml
from shardwise.errors import LaunchError
from shardwise.launch import forkserver
from shardwise.launch.culprit import find_culprit, read_errors
from shardwise.launch.stop import StopListener
from shardwise.launch.streams import log_path
from shardwise.log import loggers_to_file, say
from shardwise.spec.run import SaveConfig
from shardwise.train.status import Status, finish_status, write_status

if TYPE_CHECKING:
    from shardwise.launch.elastic import AgentResult

DEFAULT_TARGET = "shardwise.train.worker:train"
Changes = dict[str, str | int | None]  # fields of status.json


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the end of ``status.json``, and the message for the user (None: nothing to say)."""

    changes: Changes
    message: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit status of the job."""
        code = self.changes["exit_code"]
        assert isinstance(code, int)
        return code


def launch(
    output_dir: Path, num_processes: int, *, target: str = DEFAULT_TARGET, env: dict[str, str] | None = None
) -> int:
    """Run a job on this machine and wait for its end. To be called on the main thread, before torch is imported.

    Args:
        output_dir: folder of the run, with ``run.yaml`` and ``plan.json``.
        num_processes: number of workers.
        target: ``module:function`` that each worker calls with its :class:`WorkerContext`. What rank 0 returns may
            hold ``stopped``: the name of the signal that it stopped for.
        env: variables for the workers, on top of this process's environment.

    Returns:
        The exit status of the contract: 0 done, 2 refused, 3 failed, 130 or 143 stopped; that of ``sys.exit`` if a
        worker called it. The reason of any other than 0 is in ``status.json`` and was shown once on stderr.
    """
    assert threading.current_thread() is threading.main_thread(), "signals can be taken on the main thread only"
    output_dir = output_dir.resolve()
    _prepare(output_dir, num_processes)
    with ExitStack() as stack:
        listener = stack.enter_context(StopListener())
        stack.enter_context(forkserver.environment(_variables(num_processes, os.environ) | (env or {})))
        stack.enter_context(forkserver.running())
        outcome = _run(output_dir, target, num_processes, listener)
    finish_status(output_dir, **outcome.changes)
    if outcome.message:
        say(outcome.message)
    return outcome.exit_code


def _prepare(output_dir: Path, num_processes: int) -> None:
    """The folder of the logs, without the errors of an earlier run; and the status of a run that has begun."""
    (output_dir / "logs").mkdir(exist_ok=True)
    for path in output_dir.glob("logs/error-rank-*.json"):
        path.unlink()
    write_status(output_dir, Status(state="running"))


def _variables(num_processes: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of the job, where the user has not set it.

    More OpenMP threads than cores, or threads that spin while they wait, take the cores from the other ranks.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {
        "OMP_NUM_THREADS": str(max(1, cores // num_processes)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here: no need to find this machine's address by its name
    return {name: value for name, value in values.items() if name not in environ}


def _grace_seconds(output_dir: Path) -> float:
    run = load_yaml(output_dir / "run.yaml")
    return SaveConfig.model_validate(run.get("save") or {}).grace_seconds


def _run(output_dir: Path, target: str, num_processes: int, listener: StopListener) -> Outcome:
    log = output_dir / "logs" / "launcher.log"
    # The engine must leave our signal handlers alone; its C++ side warns of what is normal here.
    quiet = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with forkserver.environment(quiet):
            from shardwise.launch import elastic  # takes seconds, like the imports of the fork server beside it

            with loggers_to_file(("torch",), log):
                if listener.signal_name:
                    return _stopped(listener.signal_name)
                grace = _grace_seconds(output_dir)
                result = elastic.run_workers(output_dir, target, num_processes, listener, grace)
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return _failed(None, f"the workers could not be run: {type(error).__name__}: {error}", log)
    return _judge(output_dir, num_processes, result)


def _judge(output_dir: Path, num_processes: int, result: AgentResult) -> Outcome:
    if result.succeeded:
        stopped = (result.returned or {}).get("stopped")
        return _stopped(stopped) if stopped else Outcome({"state": "done", "exit_code": 0})
    if result.stop_failed:
        return _failed(None, result.stop_failed, log_path(output_dir, 0))
    culprit = find_culprit(result.deaths, read_errors(output_dir, num_processes), num_processes)
    state = "refused" if culprit.refused else "failed"
    changes: Changes = {"state": state, "exit_code": culprit.exit_code, "rank": culprit.rank, "error": culprit.message}
    log = log_path(output_dir, culprit.rank or 0)
    return Outcome(changes, culprit.message if culprit.refused else f"{culprit.message}\nlog: {log}")


def _stopped(signal_name: str) -> Outcome:
    code = 128 + signal.Signals[signal_name].value
    return Outcome({"state": "stopped", "exit_code": code}, f"stopped by {signal_name}")


def _failed(rank: int | None, message: str, log: Path) -> Outcome:
    changes: Changes = {"state": "failed", "exit_code": LaunchError.exit_code, "rank": rank, "error": message}
    return Outcome(changes, f"{message}\nlog: {log}")
