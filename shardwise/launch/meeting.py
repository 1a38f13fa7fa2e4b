"""How the launchers of several machines find each other before they start workers. Imports torch.

Torch's static rendezvous knows which machine is which, but waits where no signal reaches it. This one waits in short
steps, looks for a signal between them, says whom it waits for, and compares what the machines were told to run. While
machine 0 prepares data it is waited for as long as it gets on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from shardwise.errors import ConfigError, LaunchError
from shardwise.launch.beacon import preparing_rows
from shardwise.launch.machines import Machines
from shardwise.launch.place import Nodes
from shardwise.log import say

_RUN_ID = "shardwise"
_LIMIT_SECONDS = 600.0
_STEP_SECONDS = 0.2
_CONNECT_SECONDS = 2.0
_JOIN_SECONDS = 3.0  # a try at the store, in which no signal is heard
_SILENCES = 3  # one answer may be late on a busy machine
_SILENT_SECONDS = 3.0  # machines that come within this time are not spoken of


class InterruptedMeetingError(Exception):
    """A signal came while machines were waited for."""


class Meeting(StaticTCPRendezvous):
    """The machines of a job at the endpoint on machine 0.

    Args:
        nodes: this machine's place among them.
        told: what this machine runs; the same text on all of them.
        interrupted: whether the user wants to leave.
        machines: keeps the store of the first meeting.
        attempt: how often the job has failed before. Each attempt has a store of its own, since keys of the one before
            would be taken for those of this one: the first at the endpoint, later ones at a free port of machine 0.
    """

    def __init__(
        self,
        nodes: Nodes,
        told: str,
        interrupted: Callable[[], bool],
        machines: Machines | None = None,
        attempt: int = 0,
    ) -> None:
        assert nodes.endpoint is not None
        host, _, port = nodes.endpoint.rpartition(":")
        super().__init__(host, int(port), nodes.rank, nodes.count, _RUN_ID, int(_LIMIT_SECONDS))
        self._nodes, self._told, self._interrupted = nodes, told, interrupted
        self._machines, self._attempt = machines or Machines(), attempt
        self._prepared: int | None = None  # rows of machine 0, as it last said
        self._moved = 0.0  # when that changed

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until all machines are here.

        Raises:
            ConfigError: two machines with one number, or machines that were told different things.
            CameBackError: this one was here before, and its launcher has died.
            LaunchError: not all came in time.
            InterruptedMeetingError: a signal came first.
        """
        store = self._open() if self.rank == 0 else self._connect()
        store.set_timeout(timedelta(seconds=_LIMIT_SECONDS))
        self._store = self._machines.attempt_store = store
        if not self._attempt:
            self._machines.store = store
        if store.add(f"machine/{self.rank}/count", 1) > 1:
            if not self._attempt:
                say(f"machine {self.rank} of this job was here before; waiting whether the job has failed of its end")
                self._machines.check_back(self.rank)
            rule = "another machine of this job has the same number"
            raise ConfigError(f"node_rank = {self.rank}", rule, "Give each its own, from 0")
        store.set(f"machine/{self.rank}", self._told)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        self._wait(lambda: [rank for rank in others if not store.check([f"machine/{rank}"])])
        for rank in others:
            told = store.get(f"machine/{rank}").decode()
            if told != self._told:
                rule = f"machine {rank} was told {told}"
                raise ConfigError(f"machine {self.rank} with {self._told}", rule, "Start all with the same command")
        where = RendezvousStoreInfo(self.master_addr, self.master_port)
        if self.rank == 0 and self._machines.store is not None:
            self._machines.begin(self._attempt)
        return RendezvousInfo(PrefixStore(_RUN_ID, store), self.rank, self.world_size, where)

    def _open(self) -> TCPStore:
        limit = timedelta(seconds=_LIMIT_SECONDS)
        if self._attempt:
            store = TCPStore(self.master_addr, 0, None, True, limit, wait_for_workers=False)
            self.master_port = store.port
            self._machines.store.set(self._port_key(), str(store.port))
            return store
        try:
            return TCPStore(
                self.master_addr, self.master_port, None, True, limit, wait_for_workers=False, multi_tenant=True
            )
        except (DistNetworkError, DistStoreError, RuntimeError) as error:
            rule = f"cannot be opened on this machine, which is machine 0 ({str(error).splitlines()[0][:200]})"
            raise ConfigError(f"rdzv_endpoint = {self._nodes.endpoint!r}", rule, "Name a free port of it") from None

    def _port_key(self) -> str:
        return f"port/{self._attempt}"

    def _connect(self) -> TCPStore:
        if self._attempt:
            self._wait(lambda: [] if self._machines.store.check([self._port_key()]) else [0])
            self.master_port = int(self._machines.store.get(self._port_key()))
        found: list[TCPStore] = []

        def missing() -> list[int]:
            found.extend(self._joined())
            return [] if found else [0]

        self._wait(missing)
        return found[0]

    def _joined(self) -> list[TCPStore]:
        """The store, or nothing while it is not there."""
        if not self._answers():
            return []
        limit = timedelta(seconds=_JOIN_SECONDS)
        try:
            return [TCPStore(self.master_addr, self.master_port, None, False, limit, wait_for_workers=False)]
        except RuntimeError:  # what is there is no store yet
            return []

    def _answers(self) -> bool:
        """Whether machine 0 is there; a store would fill the terminal with traces while it is not."""
        try:
            for _ in range(1 if self._attempt else _SILENCES):  # data are prepared before the first attempt alone
                rows = preparing_rows(self.master_addr, self.master_port, _CONNECT_SECONDS)
                if rows is not None:
                    break
        except OSError:
            return False
        if rows is not None and rows != self._prepared:
            if self._prepared is None:
                say("machine 0 prepares its data")
            self._prepared, self._moved = rows, time.monotonic()
        return rows is None

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Until no machine is missing."""
        start, told = time.monotonic(), False
        while absent := missing():
            waited = time.monotonic() - max(start, self._moved)
            if self._interrupted():
                raise InterruptedMeetingError
            names = ", ".join(map(str, absent))
            if waited > _LIMIT_SECONDS:
                value = f"rdzv_endpoint = {self._nodes.endpoint!r}"
                remedy = f"Start it with node_rank={absent[0]}, and look whether it reaches the endpoint"
                raise LaunchError(value, f"machine {names} has not come within {_LIMIT_SECONDS:.0f} s", remedy)
            if waited > _SILENT_SECONDS and not told:
                say(f"waiting for machine {names} at {self._nodes.endpoint}")
                told = True
            time.sleep(_STEP_SECONDS)
