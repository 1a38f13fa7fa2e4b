"""The elastic agent of one node, with our stop channel and without its guess at who failed. Imports torch."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.events import Event, EventSource
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from shardwise.launch import script_worker, worker
from shardwise.launch.culprit import WorkerError
from shardwise.launch.meeting import Meeting
from shardwise.launch.script import Script
from shardwise.launch.stop import ErrorChannel, StopChannel, StopListener
from shardwise.launch.whereabouts import Stack, ask
from shardwise.train.context import Restart

if TYPE_CHECKING:
    from shardwise.launch.agent import Work

_LOCAL = "127.0.0.1"  # the number, not the name: no name service and no IPv6 is needed
_SHUTDOWN_SECONDS = 5
_SETTLE_SECONDS = 3.0  # how long ranks may take to end by themselves when one has
_NOTICE_SECONDS = 5.0  # that workers have to notice by themselves that those of another machine have failed
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class AgentResult:
    """How the workers ended.

    Attributes:
        succeeded: every rank returned from its function.
        returned: what rank 0 returned.
        deaths: exit codes of the ranks that ended before anything was sent to them, in the order seen.
        stop_failed: the workers were killed because a stop that was asked for did not end in time; the reason.
        nothing_to_save: the workers were killed by a stop before there was anything to save.
        errors: what ranks have said of their end that the disk did not take.
        standing: where the ranks stood that had not ended when the others had.
        failed_at: when the first death was seen, in seconds since 1970; 0 if none was.
    """

    succeeded: bool
    returned: dict[str, Any] | None = None
    deaths: dict[int, int] = field(default_factory=dict)
    stop_failed: str | None = None
    nothing_to_save: bool = False
    errors: list[WorkerError] = field(default_factory=list)
    standing: dict[int, Stack] = field(default_factory=dict)
    failed_at: float = 0.0


class _NoRedirects(LogsSpecs):
    """The worker redirects its streams itself: the agent would let two streams overwrite each other in one file.

    Args:
        variables: what each worker's environment is to hold beside what the agent puts there.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__()
        self._variables = variables

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for values in envs.values():
            values["TORCHELASTIC_ERROR_FILE"] = ""
            values.update(self._variables)
        return LogsDest(
            stdouts=dict.fromkeys(envs, ""),
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )

    @property
    def root_log_dir(self) -> str:
        return ""


class _Agent(LocalElasticAgent):
    """Starts the workers of this node, passes a stop request on, and remembers who died by itself."""

    def __init__(self, spec: WorkerSpec, listener: StopListener, work: Work, attempt: int = 0) -> None:
        redirects = _NoRedirects(work.variables)
        super().__init__(spec, redirects, start_method="forkserver", shutdown_timeout=_SHUTDOWN_SECONDS)
        self._listener, self._work, self._attempt = listener, work, attempt
        self._other_failed_at: float | None = None
        self._channel: StopChannel | None = None
        self.deaths: dict[int, int] = {}
        self.stop_failed: str | None = None
        self.nothing_to_save = False
        self.errors: list[WorkerError] = []
        self.standing: dict[int, Stack] = {}
        self.failed_at = 0.0

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._pass_stop_on(worker_group)
        if self.stop_failed or self.nothing_to_save:
            self._shutdown(signal.SIGKILL, timeout=_SHUTDOWN_SECONDS)
            return RunResult(state=WorkerState.FAILED)
        if self._note_deaths(worker_group) or self._other_machine_has_failed():
            self.failed_at = time.time()
            # At once: the ranks of other machines end in this moment too, and their launchers ask who was first.
            self._work.tell_deaths(self.deaths)
            self._work.machines.tell_failure(self._attempt)
            # Let the rest end by itself for a moment: afterwards nobody can tell our signal from another's.
            deadline = time.monotonic() + _SETTLE_SECONDS
            while time.monotonic() < deadline and len(self.deaths) < len(worker_group.workers):
                time.sleep(_POLL_SECONDS / 4)
                self._note_deaths(worker_group)
            self.standing = ask(self._work.start, self._living(worker_group))
            self._fetch_errors(worker_group)
            return RunResult(state=WorkerState.FAILED)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():  # a death between our look and the agent's, which has sent SIGTERM to all others
            self.failed_at = time.time()
            self._work.machines.tell_failure(self._attempt)
            first = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self.deaths = first | {
                rank: code for rank, code in self._exit_codes(worker_group).items() if code not in (0, -signal.SIGTERM)
            }
            self._fetch_errors(worker_group)
        return result

    def _other_machine_has_failed(self) -> bool:
        """Whether workers of another machine have failed, and those here have had the time to fail of it."""
        if self._other_failed_at is None:
            if not self._work.machines.has_failed(self._attempt):
                return False
            self._other_failed_at = time.monotonic()
        return time.monotonic() - self._other_failed_at > _NOTICE_SECONDS

    def _exit_codes(self, worker_group: WorkerGroup) -> dict[int, int]:
        codes = {
            worker_group.workers[local_rank].global_rank: process.exitcode
            for local_rank, process in enumerate(self._pcontext._pc.processes)  # type: ignore[union-attr]
        }
        return {rank: code for rank, code in codes.items() if code is not None}

    def _living(self, worker_group: WorkerGroup) -> dict[int, int]:
        """Process id of each rank here that has not ended."""
        return {
            worker_group.workers[local_rank].global_rank: process.pid
            for local_rank, process in enumerate(self._pcontext._pc.processes)  # type: ignore[union-attr]
            if process.exitcode is None
        }

    def _note_deaths(self, worker_group: WorkerGroup) -> bool:
        """A worker that is done waits until all are, so one that has ended before has failed, also with status 0."""
        for rank, code in self._exit_codes(worker_group).items():
            self.deaths.setdefault(rank, code)
        return bool(self.deaths)

    def _fetch_errors(self, worker_group: WorkerGroup) -> None:
        assert worker_group.master_addr is not None
        assert worker_group.master_port is not None
        with suppress(Exception):  # the store may be gone with the machine that holds it
            channel = ErrorChannel(worker_group.master_addr, worker_group.master_port)
            self.errors = channel.left(self._work.devices)

    def _pass_stop_on(self, worker_group: WorkerGroup) -> None:
        name = self._listener.signal_name
        if name is None:
            return
        grace = self._work.grace_seconds()
        if self._channel is None and grace is None:
            self.nothing_to_save = True
            return
        if self._channel is None:
            assert worker_group.master_addr is not None
            assert worker_group.master_port is not None
            self._channel = StopChannel(worker_group.master_addr, worker_group.master_port)
            self._channel.request(name)
        if self._listener.at_once:
            self.stop_failed = f"a second signal came after {name}, before the workers had stopped: nothing was saved"
        elif grace is not None and self._listener.seconds_since() > grace:
            limit = f"save.grace_seconds = {grace:g}"
            self.stop_failed = f"after {name} the workers did not save and leave within {limit}: they were killed"

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        """Nobody reads the events. The full ones look this machine's name up for each, which takes seconds where
        name service is down."""
        return Event(state, source=source)


def run_workers(work: Work, num_processes: int, listener: StopListener, restart: Restart | None = None) -> AgentResult:
    """Start the workers of this machine and wait for their end. None is left when this returns.

    Args:
        work: what they run.
        num_processes: number of workers on this machine.
        listener: takes the user's signals.
        restart: what the workers are told of a failure before.
    """
    attempt = restart.number if restart else 0
    handler = _handler(work, listener, attempt)
    is_script = isinstance(work.target, Script)
    spec = WorkerSpec(
        role="worker",
        local_world_size=num_processes,
        entrypoint=script_worker.entry if is_script else worker.entry,
        args=(work.start, work.target, restart),
        rdzv_handler=handler,
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        local_addr=_LOCAL if work.nodes.is_local else None,
    )
    agent = _Agent(spec, listener, work, attempt)
    try:
        result = agent.run()
    finally:
        handler.shutdown()
    values = {} if result.is_failed() else result.return_values
    returned = values[min(values)] if values else None  # of the lowest rank here; rank 0's where it is here
    return AgentResult(
        succeeded=not result.is_failed(),
        returned=returned,
        deaths=agent.deaths,
        stop_failed=agent.stop_failed,
        nothing_to_save=agent.nothing_to_save,
        errors=agent.errors,
        standing=agent.standing,
        failed_at=agent.failed_at,
    )


def _handler(work: Work, listener: StopListener, attempt: int) -> RendezvousHandler:
    """Where the agents of all machines meet, and who is who.

    The dynamic kind deals ranks out by its own order, so several machines use the static one: machine 0, where the
    user looks, has the first ranks.
    """
    if work.nodes.endpoint is not None:
        told = f"nnodes = {work.nodes.count}, devices = {work.devices}"
        return Meeting(work.nodes, told, lambda: listener.signal_name is not None, work.machines, attempt)
    return get_rendezvous_handler(
        RendezvousParameters(
            backend="c10d",
            endpoint=f"{_LOCAL}:0",  # a port of the system's choice, so that jobs do not collide
            run_id=uuid.uuid4().hex,
            min_nodes=1,
            max_nodes=1,
            local_addr=_LOCAL,
        )
    )
