"""Runs the action lists of a schedule on paper: when each pass starts, how long each rank waits.

The lists are those that the runtime executes (:mod:`shardwise.spec.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.spec.schedule import Action, ActionLists

Send = Callable[[int, int], float]


@dataclass(frozen=True)
class Timeline:
    """When what happened, in seconds from the start of the step.

    Args:
        finish: of each pipeline rank, the end of its last action.
        busy: seconds of each rank in actions.
        ends: the end of each action.
    """

    finish: tuple[float, ...]
    busy: tuple[float, ...]
    ends: dict[Action, float]

    @property
    def seconds(self) -> float:
        """From the start to the end of the last action."""
        return max(self.finish)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait for each other."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(lists: ActionLists, forward: Sequence[float], backward: Sequence[float], send: Send) -> Timeline:
    """Execute every list in its order; an action starts when its rank is free and its input has arrived.

    Args:
        forward: seconds of a pass through each stage, ``backward`` likewise.
        send: seconds from one pipeline rank to another, in which neither computes less.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    num_ranks, last = len(lists), len(forward) - 1
    place, free, busy = [0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    ends: dict[Action, float] = {}
    hops = {(a, b): send(a, b) for a in range(num_ranks) for b in ((a + 1) % num_ranks, (a - 1) % num_ranks) if a != b}
    left = sum(len(actions) for actions in lists.values())
    while left:
        before = left
        for rank, actions in lists.items():
            while place[rank] < len(actions):
                action = actions[place[rank]]
                source = _source(action, last)
                if source is None:
                    ready = 0.0
                elif source in ends:
                    other = source.stage % num_ranks
                    ready = ends[source] + (hops[other, rank] if other != rank else 0.0)
                else:
                    break
                seconds = (forward if action.kind == "forward" else backward)[action.stage]
                free[rank] = max(free[rank], ready) + seconds
                busy[rank] += seconds
                ends[action] = free[rank]
                place[rank] += 1
                left -= 1
        if left == before:
            raise ValueError("the action lists wait for each other")
    return Timeline(tuple(free), tuple(busy), ends)


def _source(action: Action, last: int) -> Action | None:
    """The action whose result this one needs."""
    if action.kind == "forward":
        return Action(action.stage - 1, "forward", action.micro_batch) if action.stage else None
    if action.stage == last:
        return Action(last, "forward", action.micro_batch)
    return Action(action.stage + 1, "backward", action.micro_batch)


def peak_bytes(actions: Sequence[Action], stage_bytes: Sequence[float]) -> float:
    """The most bytes of activations that one rank holds, with ``stage_bytes`` for a pass through each stage."""
    alive = peak = 0.0
    for action in actions:
        alive += stage_bytes[action.stage] * (1 if action.kind == "forward" else -1)
        peak = max(peak, alive)
    return peak
