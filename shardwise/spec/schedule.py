"""Pipeline schedules as action lists: the same lists are simulated by the planner and executed.

An action is the forward or the backward pass of one micro-batch on one stage, or one half of a backward pass: the
gradients of inputs, which the stage before waits for, or those of weights, which can wait. Communication is not
listed: it follows from the order (a forward needs its input, a backward its gradient). Imports no torch.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: Kind
    micro_batch: int


ActionLists = dict[int, list[Action]]  # pipeline rank -> its actions in order


def forward_only(num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ActionLists:
    """Evaluation: each rank runs the micro-batches in order, or round by round where it holds several stages."""
    return {rank: _forwards(rank, num_ranks, num_micro_batches, virtual_stages) for rank in range(num_ranks)}


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


def zero_bubble(num_stages: int, num_micro_batches: int) -> ActionLists:
    """ZB-H1 (Qi et al. 2023, arXiv:2401.10241, section 2.3): 1F1B whose backward passes run in two halves.

    Stage s runs the gradients of inputs as 1F1B runs backward passes, and those of weights s micro-batches later; what
    is left of them fills the time in which 1F1B waits at the end. With equal passes the bubble is a third of 1F1B's:
    (p - 1) (F + B - W) in place of (p - 1) (F + B + W). No stage holds more than p micro-batches, in part or whole.
    The first stage has nobody to send to, so it runs whole backward passes.

    Raises:
        ValueError: with fewer micro-batches than stages (the pipeline would never be full).
    """
    if num_micro_batches < num_stages:
        raise ValueError(f"zero_bubble needs at least {num_stages} micro-batches for {num_stages} stages")
    lists = {0: one_f_one_b(num_stages, num_micro_batches)[0]}
    for stage in range(1, num_stages):
        ahead = num_stages - stage
        actions = [Action(stage, "forward", m) for m in range(ahead)]
        for micro_batch in range(num_micro_batches):
            actions.append(Action(stage, "backward_input", micro_batch))
            if micro_batch >= stage:
                actions.append(Action(stage, "backward_weight", micro_batch - stage))
            if micro_batch + ahead < num_micro_batches:
                actions.append(Action(stage, "forward", micro_batch + ahead))
        first_left = max(num_micro_batches - stage, 0)
        lists[stage] = actions + [Action(stage, "backward_weight", m) for m in range(first_left, num_micro_batches)]
    return lists


def splits_backward(schedule: str, stage: int) -> bool:
    """Whether a stage runs its backward passes in two halves under a schedule."""
    return schedule == "zero_bubble" and stage > 0


def interleaved(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> ActionLists:
    """Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473, figure 4, bottom).

    Rank r of p runs stages r, r + p, r + 2 p, ..., ``virtual_stages`` of them. A round of micro-batches passes
    through all stages of a rank before the next round begins. Rank r first runs
    ``(virtual_stages - 1) * n + 2 (p - 1 - r)`` forward passes, n micro-batches being the first round, then one
    backward pass for each forward pass. So at most one activation more than that is alive, however many
    micro-batches a step has, and the bubble is that of 1F1B divided by ``virtual_stages``.

    The paper wants a multiple of p micro-batches. Here any number of at least p will do: rounds are as even as
    they can be and none is shorter than p, since a shorter one would wait for itself at every turn.

    Raises:
        ValueError: with fewer micro-batches than ranks (the pipeline would never be full).
    """
    if num_micro_batches < num_ranks:
        raise ValueError(f"interleaved needs at least {num_ranks} micro-batches for {num_ranks} ranks")
    first_round = len(_rounds(num_ranks, num_micro_batches)[0])
    lists: ActionLists = {}
    for rank in range(num_ranks):
        forwards = _forwards(rank, num_ranks, num_micro_batches, virtual_stages)
        backwards = _backwards(rank, num_ranks, num_micro_batches, virtual_stages)
        ahead = min((virtual_stages - 1) * first_round + 2 * (num_ranks - 1 - rank), len(forwards))
        steady = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
        lists[rank] = [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]
    return lists


def _rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Micro-batches in rounds of at least ``num_ranks``, as even as possible; the first ones are the larger ones."""
    number = max(1, num_micro_batches // num_ranks)
    size, larger = divmod(num_micro_batches, number)
    starts = [index * size + min(index, larger) for index in range(number + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _forwards(rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    stages = range(rank, num_ranks * virtual_stages, num_ranks)
    rounds = _rounds(num_ranks, num_micro_batches)
    return [Action(stage, "forward", m) for micro_batches in rounds for stage in stages for m in micro_batches]


def _backwards(rank: int, num_ranks: int, num_micro_batches: int, virtual_stages: int) -> list[Action]:
    stages = range(rank, num_ranks * virtual_stages, num_ranks)
    rounds = _rounds(num_ranks, num_micro_batches)
    return [
        Action(stage, "backward", m) for micro_batches in rounds for stage in reversed(stages) for m in micro_batches
    ]


def action_lists(schedule: str, num_ranks: int, num_micro_batches: int, virtual_stages: int = 1) -> ActionLists:
    """The lists of a schedule by its name in run.yaml; only ``interleaved`` has several stages on a rank."""
    if schedule == "interleaved":
        return interleaved(num_ranks, num_micro_batches, virtual_stages)
    plain = {"gpipe": gpipe, "1f1b": one_f_one_b, "zero_bubble": zero_bubble}
    return plain[schedule](num_ranks, num_micro_batches)


def peak_activations(actions: list[Action]) -> int:
    """The most passes (of a micro-batch through a stage) whose activations one rank holds at the same time.

    Of a backward pass in halves some are held until the second one.
    """
    alive = peak = 0
    for action in actions:
        alive += {"forward": 1, "backward": -1, "backward_input": 0, "backward_weight": -1}[action.kind]
        peak = max(peak, alive)
    return peak
