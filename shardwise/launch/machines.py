"""What the launchers of several machines agree on between two attempts at a job. Imports no torch.

Machine 0 keeps the store at which they have met for as long as its launcher lives. Each launcher leaves word there
when its workers have failed. Machine 0 waits for the others' word, decides, and they do as it says.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise.launch.alive import ANSWER_SECONDS
from shardwise.launch.place import Nodes
from shardwise.train.context import Restart

WOULD_GO_ON = ""  # the word of a machine that could begin again
# From one machine's end of an attempt to the others', which may first wait for what tells their devices.
_WORD_SECONDS = 30.0 + ANSWER_SECONDS
_STEP_SECONDS = 0.1


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
        self, nodes: Nodes, attempt: int, own: Restart | None, word: str, clear: Callable[[], None]
    ) -> tuple[Restart | None, str]:
        """What comes after a failed attempt, the same on every machine.

        Args:
            attempt: 0 for the first.
            own: what machine 0 would do.
            word: why this machine does not begin again, :data:`WOULD_GO_ON` if it would.
            clear: called on machine 0 before any machine begins again, when all have looked at what has failed.

        Returns:
            The restart, None for none; and on machine 0 which other machine is the reason for that, if one is.
        """
        if self.store is None:
            return None, ""
        try:
            self.store.set(f"word/{attempt}/{nodes.rank}", word)
            if nodes.rank:
                return (self._decision(attempt) if word == WOULD_GO_ON else None), ""
            refusal = "" if own is None or word != WOULD_GO_ON else self._refusal(nodes, attempt)
            following = None if refusal or word != WOULD_GO_ON else own
            if following is not None:
                clear()
            self.store.set(f"decision/{attempt}", json.dumps(following and asdict(following)))
            return following, refusal
        except RuntimeError:  # machine 0 has gone, and the store with it
            return None, ""

    def _refusal(self, nodes: Nodes, attempt: int) -> str:
        """What keeps another machine from beginning again; empty if nothing does."""
        others = [rank for rank in range(nodes.count) if rank != nodes.rank]
        silent = _wait(
            lambda: [rank for rank in others if not self.store.check([f"word/{attempt}/{rank}"])], _WORD_SECONDS
        )
        if silent:
            return f"machine {', '.join(map(str, silent))} does not answer"
        words = {rank: self.store.get(f"word/{attempt}/{rank}").decode() for rank in others}
        return "; ".join(f"machine {rank}: {word}" for rank, word in words.items() if word != WOULD_GO_ON)

    def _decision(self, attempt: int) -> Restart | None:
        """What machine 0 has decided; it may wait for a third machine first."""
        key = f"decision/{attempt}"
        if _wait(lambda: [] if self.store.check([key]) else [0], 2 * _WORD_SECONDS):
            return None
        values = json.loads(self.store.get(key))
        return None if values is None else Restart(**values)


def _wait(missing: Callable[[], list[int]], seconds: float) -> list[int]:
    """Who is missing when the time is up, or nobody as soon as nobody is."""
    deadline = time.monotonic() + seconds
    while (absent := missing()) and time.monotonic() < deadline:
        time.sleep(_STEP_SECONDS)
    return absent
