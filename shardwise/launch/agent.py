"""The launcher: starts the workers of a job, or this machine's part of them, and says how it ended.

Imports no torch by itself: the fork server is to start first.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.config import load_yaml
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch import forkserver
from shardwise.launch.culprit import Culprit, find_culprit, read_deaths, read_errors, write_deaths
from shardwise.launch.machines import CameBackError, Machines
from shardwise.launch.nodes import local_processes
from shardwise.launch.place import DEFAULT_TARGET, Nodes
from shardwise.launch.restarts import run_with_restarts
from shardwise.launch.script import Script, output_of
from shardwise.launch.stop import StopListener
from shardwise.launch.streams import log_path
from shardwise.launch.whereabouts import forget
from shardwise.log import loggers_to_file, say
from shardwise.machine import available_cores
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, SaveConfig
from shardwise.train.compiler_cache import remove_cache
from shardwise.train.context import Restart
from shardwise.train.previous import put_back
from shardwise.train.status import FILE_NAME as STATUS_FILE
from shardwise.train.status import Status, finish_status, read_status, write_status

if TYPE_CHECKING:
    from shardwise.launch.elastic import AgentResult

_DEATHS_SECONDS = 10.0  # how long other machines may take to say who died
Changes = dict[str, str | int | None]  # fields of status.json
# From an output folder, the number of devices that are left and that of machines to the run and plan for them.
Replan = Callable[[Path, int, int], tuple[RunConfig, Plan]]


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the end of ``status.json``, and the message for the user (None: nothing to say).

    ``may_restart``: another attempt may go better; ``failed_at`` is when it failed, in seconds since 1970.
    ``follows``: the attempt after which this launcher came, in the place of one that had died; None: it was there.
    """

    changes: Changes
    message: str | None = None
    may_restart: bool = False
    failed_at: float = 0.0
    follows: int | None = None

    @property
    def exit_code(self) -> int:
        """Exit status of the job."""
        code = self.changes["exit_code"]
        assert isinstance(code, int)
        return code


@dataclass(frozen=True)
class Work:
    """What the workers run, where, and on how many machines.

    Attributes:
        start: folder of the launcher's log, and of everything else until a script names another.
        target: ``module:function`` that takes a :class:`WorkerContext`, or a script.
        devices: number of workers on all machines together.
        restarts: how often they may be started again where no ``run.yaml`` says so: before a script's Trainer works.
        variables: of the workers' environment, beside what all processes of the job have.
        machines: what this launcher knows of those of other machines.
        replan: how the run in ``folder`` goes on on fewer devices; None where it counts on as many as before.
    """

    start: Path
    target: str | Script
    devices: int
    nodes: Nodes = field(default_factory=Nodes)
    restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    machines: Machines = field(default_factory=Machines)
    replan: Replan | None = None

    @property
    def folder(self) -> Path:
        """Where logs, errors and status lie now."""
        found = output_of(self.start) if isinstance(self.target, Script) else None
        return found or self.start

    @property
    def tells(self) -> bool:
        """Whether this launcher keeps ``status.json``: that of machine 0 does."""
        return self.nodes.rank == 0

    def tell_deaths(self, deaths: Mapping[int, int]) -> None:
        """Leave what this machine has seen for the launchers of the others, where there are any."""
        if self.nodes.count > 1 and deaths and self.folder.is_dir():
            write_deaths(self.folder, self.nodes.rank, deaths)

    def grace_seconds(self) -> float | None:
        """Seconds that a stop may take; None while there is nothing to save: in a script that does not train yet, in
        a check."""
        path = self.folder / "run.yaml"
        if not path.exists():
            return None
        return SaveConfig.model_validate(load_yaml(path).get("save") or {}).grace_seconds


def launch(
    output_dir: Path,
    num_processes: int,
    *,
    target: str = DEFAULT_TARGET,
    env: dict[str, str] | None = None,
    nodes: Nodes | None = None,
    replan: Replan | None = None,
) -> int:
    """Run a job and wait for its end. To be called on the main thread, before torch is imported.

    Args:
        output_dir: folder of the run, with ``run.yaml`` and ``plan.json``; the same one on all machines.
        num_processes: number of workers, on all machines together.
        target: ``module:function`` that each worker calls with its :class:`WorkerContext`. What rank 0 returns may
            hold ``stopped``: the name of the signal that it stopped for.
        env: variables for the workers, on top of this process's environment.
        nodes: the machines, if there are more than this one.
        replan: makes the plan for a restart with fewer devices, where some are gone.

    Returns:
        The exit status of the contract: 0 done, 2 refused, 3 failed, 130 or 143 stopped; that of ``sys.exit`` if a
        worker called it. The reason of any other than 0 is in ``status.json`` and was shown once on stderr.
    """
    work = Work(output_dir.resolve(), target, num_processes, nodes or Nodes(), replan=replan)
    outcome = _launch(work, env or {})
    return _tell(work, outcome)


def launch_script(script: Script, num_processes: int, *, nodes: Nodes | None = None, restarts: int = 0) -> int:
    """Run a script in each of ``num_processes`` workers and wait for their end; as :func:`launch` otherwise.

    Logs and status go to the output folder of the script's Trainer. A script that has none leaves its logs only if
    it fails, in a folder that the message names. ``restarts`` counts until its Trainer says how many there may be.
    """
    job_dir = Path(tempfile.mkdtemp(prefix="shardwise-"))
    work = Work(job_dir, script, num_processes, nodes or Nodes(), restarts)
    outcome = _launch(work, {forkserver.PRELOAD_MORE: "peft"})  # a script may ask for adapters
    code = _tell(work, outcome)
    if work.folder != job_dir or outcome.changes["state"] != "failed":
        shutil.rmtree(job_dir, ignore_errors=True)
    return code


def _launch(work: Work, env: dict[str, str]) -> Outcome:
    assert threading.current_thread() is threading.main_thread(), "signals can be taken on the main thread only"
    num_local = local_processes(work.devices, work.nodes)
    ranks = _ranks_here(work, num_local)

    def attempt(work: Work, restart: Restart | None) -> Outcome:
        nonlocal ranks
        num_local = local_processes(work.devices, work.nodes)
        ranks = _ranks_here(work, num_local)  # they may be fewer after a failure
        forget(work.start, ranks)
        return _run(work, num_local, listener, restart)

    _prepare(work)
    with ExitStack() as stack:
        listener = stack.enter_context(StopListener())
        stack.enter_context(forkserver.environment(_variables(num_local, os.environ, work.nodes) | env))
        stack.enter_context(forkserver.running())
        try:
            return run_with_restarts(work, attempt, lambda: listener.signal_name is not None)
        finally:
            forget(work.start, ranks)
            remove_cache(work.folder)  # a run that failed has left its compiled code


def _ranks_here(work: Work, num_local: int) -> range:
    """The ranks of this machine's workers; those of other machines may be at work in the same folder."""
    return range(work.nodes.rank * num_local, (work.nodes.rank + 1) * num_local)


def _tell(work: Work, outcome: Outcome) -> int:
    """Say how the job ended, then write it: the disk may be what failed."""
    if outcome.message:
        say(outcome.message)
    if work.tells:
        try:
            _settle(work.folder, outcome.changes)
        except OSError as error:
            say(f"{work.folder / STATUS_FILE} could not be written ({error.strerror}); the run has ended all the same")
    return outcome.exit_code


def _settle(folder: Path, changes: Changes) -> None:
    """``status.json``; and what the job had set aside is back where it was if the job has made no step: with its
    first one it would have discarded it."""
    if put_back(folder):
        before = read_status(folder) or Status()
        write_status(folder, Status(step=before.step, checkpoint=before.checkpoint))
    finish_status(folder, **changes)


def _prepare(work: Work) -> None:
    """The folder of the logs, without the errors of an earlier run; and the status of a run that has begun."""
    (work.start / "logs").mkdir(exist_ok=True)
    if work.tells:
        for path in (*work.start.glob("logs/error-rank-*.json"), *work.start.glob("logs/deaths-machine-*.json")):
            path.unlink()
        write_status(work.start, Status(state="running"))


def _variables(num_processes: int, environ: Mapping[str, str], nodes: Nodes) -> dict[str, str]:
    """Environment of the job, where the user has not set it.

    More OpenMP threads than cores, or threads that spin while they wait, take the cores from the other ranks.
    """
    values = {
        "OMP_NUM_THREADS": threads_of(num_processes, {}),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if nodes.is_local and "lo" in (name for _, name in socket.if_nameindex()):
        values["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are here: no need to find this machine's address by its name
    return {name: value for name, value in values.items() if name not in environ}


def threads_of(num_processes: int, environ: Mapping[str, str]) -> str:
    """``OMP_NUM_THREADS`` of each of so many workers of this machine: the user's, else an even share of the cores."""
    return environ.get("OMP_NUM_THREADS") or str(max(1, available_cores() // num_processes))


def _run(work: Work, num_local: int, listener: StopListener, restart: Restart | None = None) -> Outcome:
    log = work.start / "logs" / "launcher.log"
    # The engine must leave our signal handlers alone; its C++ side warns of what is normal here.
    quiet = {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        with forkserver.environment(quiet):
            from shardwise.launch import elastic  # takes seconds, like the imports of the fork server beside it

            with loggers_to_file(("torch",), log):
                if listener.signal_name:
                    return _stopped(listener.signal_name)
                result = elastic.run_workers(work, num_local, listener, restart)
    except CameBackError as error:
        message = f"machine {work.nodes.rank} came back after its launcher had died"
        changes: Changes = {"state": "failed", "exit_code": LaunchError.exit_code, "rank": None, "error": message}
        return Outcome(changes, message, True, time.time(), error.attempt)
    except ShardwiseError as error:
        state = "refused" if error.exit_code == ShardwiseError.exit_code else "failed"
        return Outcome({"state": state, "exit_code": error.exit_code, "error": str(error)}, str(error))
    except Exception as error:
        if listener.signal_name:  # it came while machines were waited for
            return _stopped(listener.signal_name)
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        return _failed(None, f"the workers could not be run: {type(error).__name__}: {error}", log)
    return _judge(work, result, listener.signal_name)


def _judge(work: Work, result: AgentResult, signal_name: str | None) -> Outcome:
    folder = work.folder
    if result.succeeded:
        stopped = (result.returned or {}).get("stopped")
        if not stopped:
            return Outcome({"state": "done", "exit_code": 0})
        # Only rank 0 knows which signal it was; on another machine it may have been none of ours.
        name = stopped if stopped in signal.Signals.__members__ else signal_name or "SIGTERM"
        with suppress(OSError, ValueError):  # a full disk; the stop is what matters
            status = read_status(folder)
            return _stopped(name, status.checkpoint if status else None)
        return _stopped(name)
    if result.nothing_to_save and signal_name:
        return _stopped(signal_name)
    if result.stop_failed:
        return _failed(None, result.stop_failed, log_path(folder, 0))
    _keep_stacks(folder, result)
    culprit = _culprit(work, result)
    state = "refused" if culprit.refused else "failed"
    changes: Changes = {"state": state, "exit_code": culprit.exit_code, "rank": culprit.rank, "error": culprit.message}
    log = log_path(folder, culprit.rank or 0)
    message = culprit.message if culprit.refused else f"{culprit.message}\nlog: {log}"
    return Outcome(changes, message, culprit.may_pass and not signal_name, result.failed_at)


def _keep_stacks(folder: Path, result: AgentResult) -> None:
    """The stacks of ranks that had to be ended go into their logs."""
    for rank, stack in result.standing.items():
        with suppress(OSError), log_path(folder, rank).open("a", encoding="utf-8") as file:
            file.write(f"when the job failed, this rank was in {stack.at}:\n{stack.text or 'no answer'}\n")


def _culprit(work: Work, result: AgentResult) -> Culprit:
    """Who failed first. A machine that only sees a connection end waits a moment for what the others have seen."""
    folder, deaths = work.folder, result.deaths
    work.tell_deaths(deaths)
    deadline = time.monotonic() + _DEATHS_SECONDS
    while True:
        errors = [*read_errors(folder, work.devices), *result.errors]
        told = read_deaths(folder)
        known = deaths | {rank: code for other in told for rank, code in other.items() if rank not in deaths}
        explained = any(code < 0 for code in known.values()) or not all(error.connection_error for error in errors)
        if explained or work.nodes.count in (1, len(told)) or time.monotonic() > deadline:
            return find_culprit(known, errors, work.devices, result.standing)
        time.sleep(0.1)


def _stopped(signal_name: str, checkpoint: str | None = None) -> Outcome:
    """``checkpoint`` is what the job has saved, as ``status.json`` names it."""
    code = 128 + signal.Signals[signal_name].value
    saved = f": saved {checkpoint}; resume=auto goes on from there" if checkpoint else ""
    return Outcome({"state": "stopped", "exit_code": code}, f"stopped by {signal_name}{saved}")


def _failed(rank: int | None, message: str, log: Path) -> Outcome:
    changes: Changes = {"state": "failed", "exit_code": LaunchError.exit_code, "rank": rank, "error": message}
    return Outcome(changes, f"{message}\nlog: {log}")
