"""What the launchers of several machines agree on between two attempts at a job. Imports no torch.

Machine 0 keeps the store at which they have met for as long as its launcher lives. Each launcher leaves word there
when its workers have failed. Machine 0 waits for the others' word, decides, and they do as it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.launch.alive import ANSWER_SECONDS
from shardwise.launch.place import Nodes
from shardwise.train.context import Restart

# From one machine's end of an attempt to the others', which may first wait for what tells their devices.
_WORD_SECONDS = 30.0 + ANSWER_SECONDS
_PLAN_SECONDS = 600.0  # in which machine 0 may plan for fewer devices, before it tells what it has decided
_STEP_SECONDS = 0.1
# From the death of a launcher, whose workers go with it, to the word of another that theirs have failed of it.
_BACK_SECONDS = 20.0


class CameBackError(Exception):
    """This launcher takes the place of one that has died, in a job whose ``attempt`` has failed of that."""

    def __init__(self, attempt: int) -> None:
        super().__init__(attempt)
        self.attempt = attempt


@dataclass(frozen=True)
class Word:
    """What a machine says when its workers have failed.

    Attributes:
        refusal: why it does not begin again; empty if it would.
        left: devices that it could begin with, where they are fewer than it had; None: as many.
    """

    refusal: str = ""
    left: int | None = None


@dataclass(frozen=True)
class Agreement:
    """What comes after a failed attempt, the same on every machine.

    Attributes:
        restart: None for none.
        devices: of all machines together, that the job goes on with.
        refusal: on machine 0, what the reason for no restart is, where it is not machine 0 itself.
    """

    restart: Restart | None = None
    devices: int = 0
    refusal: str = ""


class Machines:
    """One launcher's view of the others.

    Attributes:
        store: the store of the first meeting, on machine 0; None before it.
        attempt_store: that of the attempt under way, which the workers use. It is held until the next: the other
            launchers may still read in it.
    """

    def __init__(self) -> None:
        self.store: Any = None
        self.attempt_store: Any = None

    def begin(self, attempt: int) -> None:
        """Say on machine 0 which attempt begins, to those that come later."""
        self.store.set("attempt", str(attempt))

    def check_back(self, rank: int) -> None:
        """Look whether a launcher whose number was here before takes the place of one that has died.

        Raises:
            CameBackError: it does.
        """
        if not self.store.check(["attempt"]):
            return
        attempt = int(self.store.get("attempt"))
        alive = _wait(lambda: [] if self.store.check([f"failed/{attempt}"]) else [rank], _BACK_SECONDS)
        if not alive and not self.store.check([f"word/{attempt}/{rank}"]):
            raise CameBackError(attempt)

    def tell_failure(self, attempt: int) -> None:
        """Let the launchers of the other machines know that workers of this one have failed."""
        if self.store is not None:
            with suppress(RuntimeError):  # it has gone with machine 0
                self.store.set(f"failed/{attempt}", "")

    def has_failed(self, attempt: int) -> bool:
        """Whether workers of a machine are known to have failed."""
        if self.store is not None:
            with suppress(RuntimeError):
                return bool(self.store.check([f"failed/{attempt}"]))
        return False

    def agree(
        self, nodes: Nodes, attempt: int, own: Restart | None, word: Word, begin: Callable[[int | None], int]
    ) -> Agreement:
        """What comes after a failed attempt.

        Args:
            attempt: 0 for the first.
            own: what machine 0 would do.
            word: this machine's.
            begin: called on machine 0 before any machine begins again, when all have looked at what has failed, with
                the least that a machine has left (None: as many as before); returns how many devices there are to be
                on all machines together, or raises where that cannot be.
        """
        if self.store is None:
            return Agreement()
        try:
            self.store.set(f"word/{attempt}/{nodes.rank}", json.dumps(asdict(word)))
            if nodes.rank:
                return Agreement() if word.refusal else self._decision(attempt)
            decision = Agreement() if own is None or word.refusal else self._decide(nodes, attempt, own, word, begin)
            told = {"restart": decision.restart and asdict(decision.restart), "devices": decision.devices}
            self.store.set(f"decision/{attempt}", json.dumps(told))
            return decision
        except RuntimeError:  # machine 0 has gone, and the store with it
            return Agreement()

    def _decide(
        self, nodes: Nodes, attempt: int, own: Restart, word: Word, begin: Callable[[int | None], int]
    ) -> Agreement:
        """On machine 0, which would begin again: whether all do, and with how many devices."""
        others = [rank for rank in range(nodes.count) if rank != nodes.rank]
        silent = _wait(
            lambda: [rank for rank in others if not self.store.check([f"word/{attempt}/{rank}"])], _WORD_SECONDS
        )
        if silent:
            return Agreement(refusal=f"machine {', '.join(map(str, silent))} does not answer")
        words = {rank: Word(**json.loads(self.store.get(f"word/{attempt}/{rank}"))) for rank in others}
        refusals = [f"machine {rank}: {other.refusal}" for rank, other in words.items() if other.refusal]
        if refusals:
            return Agreement(refusal="; ".join(refusals))
        left = [each.left for each in (word, *words.values()) if each.left is not None]
        try:
            return Agreement(own, begin(min(left, default=None)))
        except Exception as error:  # whatever it is, the others are to hear that nobody begins again
            return Agreement(refusal=str(error) or type(error).__name__)

    def _decision(self, attempt: int) -> Agreement:
        """What machine 0 has decided; it may wait for a third machine first."""
        key = f"decision/{attempt}"
        if _wait(lambda: [] if self.store.check([key]) else [0], 2 * _WORD_SECONDS + _PLAN_SECONDS):
            return Agreement()
        values = json.loads(self.store.get(key))
        restart = values["restart"]
        return Agreement(None if restart is None else Restart(**restart), int(values["devices"]))


def _wait(missing: Callable[[], list[int]], seconds: float) -> list[int]:
    """Who is missing when the time is up, or nobody as soon as nobody is."""
    deadline = time.monotonic() + seconds
    while (absent := missing()) and time.monotonic() < deadline:
        time.sleep(_STEP_SECONDS)
    return absent
