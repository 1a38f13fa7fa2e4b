"""How the processes of a script come to one plan and one process group. Imports torch.

The plan is made by rank 0 before there is a process group, since the device type, and so the backend, follow from
it; it reaches the other ranks through the job's store, and so does a refusal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, rendezvous

from shardwise import errors
from shardwise.errors import ShardwiseError
from shardwise.launch.place import Place


class JobStore:
    """The job's key-value store, and agreements through it."""

    def __init__(self, place: Place, timeout: timedelta) -> None:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        self._place, self._store, self._timeout = place, store, timeout
        self._agreements = 0

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

    def for_group(self) -> Store:
        """The part of the store that the process group uses."""
        return PrefixStore("group", self._store)


def _outcome(make: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": make()}
    except ShardwiseError as error:
        return {"refusal": [type(error).__name__, error.value, error.rule, error.remedy]}
