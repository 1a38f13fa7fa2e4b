"""How the processes of a script come to one plan and one process group. Imports torch.

The plan is made by rank 0 before there is a process group, since the device type, and so the backend, follow from
it; it reaches the other ranks through the job's store, and so does a refusal.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous

from shardwise import errors
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.place import Place
from shardwise.log import say

_SILENT_SECONDS = 10.0  # ranks that come within this time are not spoken of
_POLL_SECONDS = (0.002, 0.2)  # the first pause of a waiting rank, and the longest
_LEFT = "left"  # how many ranks have come to the end of their script; with a number, whether that rank has
_MAX_LISTED = 8


class JobStore:
    """The job's key-value store, and agreements through it."""

    def __init__(self, place: Place, timeout: timedelta) -> None:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        self._place, self._store, self._timeout = place, store, timeout
        self._agreements = self._meetings = 0

    def agree(self, make: Callable[[], Any]) -> Any:
        """What rank 0's ``make`` returns (as JSON carries it), on every rank.

        Raises:
            ShardwiseError: rank 0's refusal, on every rank.
        """
        key = f"agreement/{self._agreements}"
        self._agreements += 1
        if self._place.rank == 0:
            self._store.set(key, json.dumps(_outcome(make)))
        self._store.wait([key], self._timeout)
        outcome = json.loads(self._store.get(key))
        if "refusal" in outcome:
            kind, value, rule, remedy = outcome["refusal"]
            raise getattr(errors, kind)(value, rule, remedy)
        return outcome["value"]

    def meet(self, call: str) -> None:
        """Wait until every rank makes this call.

        What follows are collectives: a rank that makes a call alone would wait in them until the time is up, with a
        message that names nobody.

        Args:
            call: what messages name, such as ``"train()"``.

        Raises:
            LaunchError: a rank has come to the end of its script without this call, or makes another one, or does
                not come within the time that ranks wait for each other.
        """
        key, rank = f"meeting/{self._meetings}", self._place.rank
        self._meetings += 1
        first = self._store.compare_set(f"{key}/call", "", call).decode()
        if first != call:
            raise LaunchError(f"{call} on rank {rank}", f"another rank calls {first}", "Call the same on every rank")
        self._store.set(f"{key}/{rank}", "")
        if self._store.add(f"{key}/count", 1) == self._place.world_size:
            self._store.set(f"{key}/all", "")
        self._wait_for_all(call, key)

    def _wait_for_all(self, call: str, key: str) -> None:
        began, told, pause = time.monotonic(), False, _POLL_SECONDS[0]
        remedy = "Call it on every rank: each holds a part of the model"
        while not self._store.check([f"{key}/all"]):
            waited = time.monotonic() - began
            gone = self._absent(key, _LEFT) if self._store.check([_LEFT]) else []
            if gone:
                rule = f"{_ranks(gone)} came to the end of the script without it"
                raise LaunchError(f"{call} on rank {self._place.rank}", rule, remedy)
            if waited > self._timeout.total_seconds():
                rule = f"{_ranks(self._absent(key))} did not come within {self._timeout.total_seconds():.0f} s"
                raise LaunchError(f"{call} on rank {self._place.rank}", rule, remedy)
            if waited > _SILENT_SECONDS and not told:
                say(f"{call}: waiting for {_ranks(self._absent(key))}")
                told = True
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])

    def _absent(self, key: str, marked: str | None = None) -> list[int]:
        """The ranks that have not come to a meeting; of those with a mark alone, if one is named."""
        ranks = [rank for rank in range(self._place.world_size) if not self._store.check([f"{key}/{rank}"])]
        return ranks if marked is None else [rank for rank in ranks if self._store.check([f"{marked}/{rank}"])]

    def leave(self) -> None:
        """Leave word for ranks that wait in :meth:`meet`: this one's script has come to its end."""
        self._store.set(f"{_LEFT}/{self._place.rank}", "")
        self._store.add(_LEFT, 1)

    def for_group(self) -> Store:
        """The part of the store that the process group uses."""
        return PrefixStore("group", self._store)


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - _MAX_LISTED} others" if len(ranks) > _MAX_LISTED else ""
    return f"rank {', '.join(map(str, ranks[:_MAX_LISTED]))}{more}"


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except ShardwiseError as error:
        return {"refusal": [type(error).__name__, error.value, error.rule, error.remedy]}
