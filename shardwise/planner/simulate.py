"""Runs the action lists of a schedule on paper: when each pass starts, how long each rank waits.

The lists are those that the runtime executes (:mod:`shardwise.spec.schedule`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.spec.schedule import Action, ActionLists, Kind, action_lists

Send = Callable[[int, int], float]
StageSeconds = Sequence[Sequence[float]]  # forward, backward, and what of backward can wait (empty: nothing)
_Step = tuple[list[float], float, float, list[float]]
_ROUNDS = {"1f1b": 2, "interleaved": 4, "zero_bubble": 3}  # rounds after which a pipeline repeats itself


@dataclass(frozen=True)
class Timeline:
    """When what happened, in seconds from the start of the step.

    Args:
        finish: of each pipeline rank, the end of its last action.
        busy: seconds of each rank in actions.
        ends: of forward passes, of backward passes (or their first halves) and of their second halves, the end of
            each: [stage][micro-batch].
    """

    finish: tuple[float, ...]
    busy: tuple[float, ...]
    ends: tuple[list[list[float]], list[list[float]], list[list[float]]]

    @property
    def seconds(self) -> float:
        """From the start to the end of the last action."""
        return max(self.finish)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait for each other."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.seconds) if self.seconds else 0.0


def simulate(
    lists: ActionLists,
    forward: Sequence[float],
    backward: Sequence[float],
    send: Send,
    waiting: Sequence[float] = (),
) -> Timeline:
    """Execute every list in its order; an action starts when its rank is free and its input has arrived.

    Args:
        forward: seconds of a pass through each stage, ``backward`` likewise.
        waiting: what of ``backward`` the second half of a backward pass in two takes.
        send: seconds from one pipeline rank to another, in which neither computes less.

    Raises:
        ValueError: the lists wait for each other for ever.
    """
    num_ranks, num_stages = len(lists), len(forward)
    number = 1 + max(action.micro_batch for action in lists[0])
    none = float("inf")
    ends = _no_ends(num_stages, number), _no_ends(num_stages, number), _no_ends(num_stages, number)
    steps = _steps(ends, (forward, backward, waiting or [0.0] * num_stages), send, num_ranks)
    place, free, busy = [0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
    left = sum(len(actions) for actions in lists.values())
    while left:
        before = left
        for rank, actions in lists.items():
            now, start = free[rank], place[rank]
            for index in range(start, len(actions)):
                stage, kind, micro_batch = actions[index]
                needed, hop, seconds, into = steps[kind][stage]
                ready = needed[micro_batch] + hop
                if ready == none:
                    break
                now = (ready if ready > now else now) + seconds
                busy[rank] += seconds
                into[micro_batch] = now
                place[rank] += 1
            free[rank] = now
            left -= place[rank] - start
        if left == before:
            raise ValueError("the action lists wait for each other")
    return Timeline(tuple(free), tuple(busy), ends)


def _no_ends(num_stages: int, number: int) -> list[list[float]]:
    return [[float("inf")] * number for _ in range(num_stages)]


def _steps(
    ends: tuple[list[list[float]], list[list[float]], list[list[float]]],
    times: tuple[Sequence[float], Sequence[float], Sequence[float]],
    send: Send,
    num_ranks: int,
) -> dict[Kind, list[_Step]]:
    """Of each kind of action on each stage: ends of what it needs, seconds until that is here, its own, its ends."""
    forward, backward, waiting = times
    stages = range(len(forward))
    hops = [[send(a, b) if a != b else 0.0 for b in range(num_ranks)] for a in range(num_ranks)]
    there = [0.0] * len(ends[0][0])  # the input of the first stage
    needed = [(there, 0.0), *((ends[0][s], hops[s % num_ranks][(s + 1) % num_ranks]) for s in stages[:-1])]
    back = [*((ends[1][s], hops[s % num_ranks][(s - 1) % num_ranks]) for s in stages[1:]), (ends[0][-1], 0.0)]
    return {
        "forward": [(*needed[s], forward[s], ends[0][s]) for s in stages],
        "backward": [(*back[s], backward[s], ends[1][s]) for s in stages],
        "backward_input": [(*back[s], backward[s] - waiting[s], ends[1][s]) for s in stages],
        "backward_weight": [(ends[1][s], 0.0, waiting[s], ends[2][s]) for s in stages],
    }


def simulate_schedule(
    schedule: str, num_micro_batches: int, virtual_stages: int, stage_seconds: StageSeconds, send: Send
) -> Timeline:
    """:func:`simulate` for a schedule by its name, quick also for thousands of micro-batches.

    Once a pipeline is full, each further round of as many micro-batches as ranks takes the same time, so a long step
    is a short one and a number of rounds; ``ends`` then are those of the short one. Stages of a rank that differ
    take longer to settle, so an interleaved step is simulated at two lengths.
    """
    forward, backward, *rest = stage_seconds
    waiting = rest[0] if rest else ()
    num_ranks = len(forward) // virtual_stages
    lists = short_lists(schedule, num_ranks, num_micro_batches, virtual_stages)
    short = simulate(lists, forward, backward, send, waiting)
    simulated = len(short.ends[0][0])
    rounds = (num_micro_batches - simulated) / num_ranks
    if not rounds:
        return short
    if virtual_stages == 1:
        first = short.ends[1][0]
        per_round = [first[-num_ranks] - first[-2 * num_ranks]] * num_ranks
    else:
        before = simulate(_lists(schedule, num_ranks, simulated - num_ranks, virtual_stages), forward, backward, send)
        per_round = [a - b for a, b in zip(short.finish, before.finish, strict=True)]
    # Once full, no round is shorter than the slowest rank's work; what has not settled yet may look so.
    least = num_ranks * max(short.busy) / simulated
    per_round = [max(more, least) for more in per_round]
    return Timeline(
        finish=tuple(a + rounds * more for a, more in zip(short.finish, per_round, strict=True)),
        busy=tuple(busy * num_micro_batches / simulated for busy in short.busy),
        ends=short.ends,
    )


def short_lists(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> ActionLists:
    """The lists of a step, or of a shorter one that holds as many activations and repeats in the same way."""
    enough = _ROUNDS.get(schedule, num_micro_batches) * num_ranks + num_micro_batches % num_ranks
    return _lists(schedule, num_ranks, min(num_micro_batches, enough), virtual_stages)


@lru_cache(maxsize=256)
def _lists(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> ActionLists:
    return action_lists(schedule, num_ranks, num_micro_batches, virtual_stages)


def peak_bytes(actions: Sequence[Action], stage_bytes: Sequence[float], waiting_bytes: Sequence[float] = ()) -> float:
    """The most bytes of activations that one rank holds.

    Args:
        stage_bytes: of a pass through each stage.
        waiting_bytes: what the first half of a backward pass leaves for the second.
    """
    alive = peak = 0.0
    for stage, kind, _ in actions:
        if kind == "forward":
            alive += stage_bytes[stage]
        elif kind == "backward_input":
            alive += waiting_bytes[stage] - stage_bytes[stage]
        elif kind == "backward_weight":
            alive -= waiting_bytes[stage]
        else:
            alive -= stage_bytes[stage]
        if alive > peak:
            peak = alive
    return peak
