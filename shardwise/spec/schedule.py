"""Pipeline schedules as action lists: the same lists are simulated by the planner and executed.

An action is the forward or the backward pass of one micro-batch on one stage. Communication is not
listed: it follows from the order (a forward needs its input, a backward its gradient). Imports no torch.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Literal["forward", "backward"]
    micro_batch: int


ActionLists = dict[int, list[Action]]  # pipeline rank -> its actions in order


def forward_only(num_stages: int, num_micro_batches: int) -> ActionLists:
    """Evaluation: each stage runs the micro-batches in order."""
    return {s: [Action(s, "forward", m) for m in range(num_micro_batches)] for s in range(num_stages)}


def gpipe(num_stages: int, num_micro_batches: int) -> ActionLists:
    """All forward passes, then all backward passes. Every activation is alive at the turn."""
    forwards = forward_only(num_stages, num_micro_batches)
    return {
        stage: actions + [Action(stage, "backward", m) for m in range(num_micro_batches)]
        for stage, actions in forwards.items()
    }


def one_f_one_b(num_stages: int, num_micro_batches: int) -> ActionLists:
    """1F1B (PipeDream-flush, Narayanan et al. 2021, arXiv:2104.04473, figure 4, top).

    Stage s runs ``num_stages - s`` forward passes ahead, then one backward for each forward, so that
    it never holds more than ``num_stages - s`` activations, however many micro-batches a step has.

    Raises:
        ValueError: with fewer micro-batches than stages (the pipeline would never be full).
    """
    if num_micro_batches < num_stages:
        raise ValueError(f"1f1b needs at least {num_stages} micro-batches for {num_stages} stages")
    lists: ActionLists = {}
    for stage in range(num_stages):
        ahead = num_stages - stage
        actions = [Action(stage, "forward", m) for m in range(ahead)]
        for micro_batch in range(num_micro_batches):
            actions.append(Action(stage, "backward", micro_batch))
            if micro_batch + ahead < num_micro_batches:
                actions.append(Action(stage, "forward", micro_batch + ahead))
        lists[stage] = actions
    return lists


def action_lists(schedule: str, num_stages: int, num_micro_batches: int) -> ActionLists:
    """The lists of a schedule by its name in run.yaml (``gpipe`` or ``1f1b``)."""
    return {"gpipe": gpipe, "1f1b": one_f_one_b}[schedule](num_stages, num_micro_batches)


def peak_activations(actions: list[Action]) -> int:
    """The most micro-batches whose activations one stage holds at the same time."""
    alive = peak = 0
    for action in actions:
        alive += 1 if action.kind == "forward" else -1
        peak = max(peak, alive)
    return peak
