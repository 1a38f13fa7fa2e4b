"""The action lists are complete, in order, free of deadlock, and 1F1B holds as few activations as it promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardwise.spec.schedule import (
    Action,
    ActionLists,
    action_lists,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    peak_activations,
    zero_bubble,
)

stages = st.integers(1, 9)
extra = st.integers(0, 20)  # micro-batches beyond the number of stages, which 1F1B needs
ranks, virtual = st.integers(2, 6), st.integers(2, 4)


def _simulate(lists: ActionLists, num_stages: int) -> int:
    """Run all lists at once, an action a tick and rank; the number of ticks. Fails when none can go on."""
    done: set[Action] = set()
    queues = {stage: list(actions) for stage, actions in lists.items()}
    ticks = 0
    while any(queues.values()):
        ready = [queue.pop(0) for queue in queues.values() if queue and _needed(queue[0], num_stages) <= done]
        assert ready, f"nobody can go on after {len(done)} actions"
        done |= set(ready)
        ticks += 1
    return ticks


def _needed(action: Action, num_stages: int) -> set[Action]:
    stage, kind, micro_batch = action
    if kind == "forward":
        return {Action(stage - 1, "forward", micro_batch)} if stage else set()
    after = {Action(stage + 1, "backward", micro_batch)} if stage + 1 < num_stages else set()
    return after | {Action(stage, "forward", micro_batch)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@hypothesis_settings(deadline=None)
@given(num_stages=stages, more=extra)
def test_every_pass_once_forward_before_backward_and_no_deadlock(name: str, num_stages: int, more: int) -> None:
    num_micro_batches = num_stages + more
    lists = action_lists(name, num_stages, num_micro_batches)
    assert sorted(lists) == list(range(num_stages))
    for stage, actions in lists.items():
        expected = {Action(stage, kind, m) for kind in ("forward", "backward") for m in range(num_micro_batches)}
        assert len(actions) == len(expected)
        assert set(actions) == expected
        for kind in ("forward", "backward"):
            order = [action.micro_batch for action in actions if action.kind == kind]
            assert order == list(range(num_micro_batches))
        for micro_batch in range(num_micro_batches):
            forward = actions.index(Action(stage, "forward", micro_batch))
            assert forward < actions.index(Action(stage, "backward", micro_batch))
    # Both fill the pipeline once on the way in and once on the way out: the bubble of the published formula.
    assert _simulate(lists, num_stages) == 2 * (num_micro_batches + num_stages - 1)


@hypothesis_settings(deadline=None)
@given(stages, extra)
def test_1f1b_holds_one_activation_a_stage_behind_it_however_many_micro_batches(num_stages: int, more: int) -> None:
    for stage, actions in one_f_one_b(num_stages, num_stages + more).items():
        assert peak_activations(actions) == min(num_stages - stage, num_stages + more) == num_stages - stage


@hypothesis_settings(deadline=None)
@given(ranks, extra, virtual)
def test_interleaved_has_every_pass_once_no_deadlock_and_the_published_bubble(
    num_ranks: int, more: int, virtual_stages: int
) -> None:
    num_micro_batches, num_stages = num_ranks + more, num_ranks * virtual_stages
    lists = interleaved(num_ranks, num_micro_batches, virtual_stages)
    assert sorted(lists) == list(range(num_ranks))
    for rank, actions in lists.items():
        assert {action.stage for action in actions} == set(range(rank, num_stages, num_ranks))
        assert len(actions) == len(set(actions)) == 2 * virtual_stages * num_micro_batches
        for stage in range(rank, num_stages, num_ranks):
            for kind in ("forward", "backward"):
                order = [m for s, k, m in actions if (s, k) == (stage, kind)]
                assert order == list(range(num_micro_batches))
    # A tick is the pass of one stage, 1 / virtual_stages of a rank's blocks: the bubble of 2 (p - 1) ticks is that
    # much shorter than 1F1B's, also where the micro-batches are no multiple of the ranks.
    ticks = _simulate(lists, num_stages)
    assert ticks == 2 * (virtual_stages * num_micro_batches + num_ranks - 1)


@hypothesis_settings(deadline=None)
@given(ranks, extra, virtual)
def test_interleaved_holds_a_bounded_number_of_activations(num_ranks: int, more: int, virtual_stages: int) -> None:
    num_micro_batches = num_ranks + more
    first_round = -(-num_micro_batches // (num_micro_batches // num_ranks))
    for rank, actions in interleaved(num_ranks, num_micro_batches, virtual_stages).items():
        ahead = (virtual_stages - 1) * first_round + 2 * (num_ranks - 1 - rank)
        assert peak_activations(actions) == min(ahead + 1, virtual_stages * num_micro_batches)


@hypothesis_settings(deadline=None)
@given(ranks, st.integers(1, 20), virtual)
def test_evaluation_of_several_stages_a_rank_is_complete_and_ends(num_ranks: int, number: int, v: int) -> None:
    lists = forward_only(num_ranks, number, v)
    assert sorted(a for actions in lists.values() for a in actions) == [
        Action(stage, "forward", m) for stage in range(num_ranks * v) for m in range(number)
    ]
    if number >= num_ranks:
        assert _simulate(lists, num_ranks * v) == v * number + num_ranks - 1


@hypothesis_settings(deadline=None)
@given(stages, st.integers(1, 20))
def test_gpipe_holds_every_activation_and_needs_no_full_pipeline(num_stages: int, num_micro_batches: int) -> None:
    lists = gpipe(num_stages, num_micro_batches)
    assert {peak_activations(actions) for actions in lists.values()} == {num_micro_batches}
    _simulate(lists, num_stages)


@hypothesis_settings(deadline=None)
@given(stages, st.integers(1, 20))
def test_evaluation_has_forward_passes_only(num_stages: int, num_micro_batches: int) -> None:
    lists = forward_only(num_stages, num_micro_batches)
    assert {action.kind for actions in lists.values() for action in actions} == {"forward"}
    assert _simulate(lists, num_stages) == num_micro_batches + num_stages - 1


def test_1f1b_with_fewer_micro_batches_than_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 micro-batches"):
        one_f_one_b(4, 3)


def test_interleaved_with_fewer_micro_batches_than_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 micro-batches"):
        interleaved(4, 3, 2)


def test_interleaved_of_two_ranks_written_out() -> None:
    lists = interleaved(2, 5, 2)  # rounds of 3 and of 2 micro-batches
    written = {rank: " ".join(f"{a.kind[0]}{a.stage}.{a.micro_batch}" for a in lists[rank]) for rank in lists}
    assert written == {
        0: "f0.0 f0.1 f0.2 f2.0 f2.1 f2.2 b2.0 f0.3 b2.1 f0.4 b2.2 f2.3 b0.0 f2.4 b0.1 b0.2 b2.3 b2.4 b0.3 b0.4",
        1: "f1.0 f1.1 f1.2 f3.0 b3.0 f3.1 b3.1 f3.2 b3.2 f1.3 b1.0 f1.4 b1.1 f3.3 b1.2 f3.4 b3.3 b3.4 b1.3 b1.4",
    }


def test_1f1b_of_three_stages_written_out() -> None:
    lists = one_f_one_b(3, 4)
    written = {s: " ".join(f"{a.kind[0]}{a.micro_batch}" for a in actions) for s, actions in lists.items()}
    assert written == {
        0: "f0 f1 f2 b0 f3 b1 b2 b3",
        1: "f0 f1 b0 f2 b1 f3 b2 b3",
        2: "f0 b0 f1 b1 f2 b2 f3 b3",
    }


@hypothesis_settings(deadline=None)
@given(stages, extra)
def test_zero_bubble_has_every_pass_once_in_order_and_holds_no_more_than_1f1b(num_stages: int, more: int) -> None:
    num_micro_batches = num_stages + more
    lists = zero_bubble(num_stages, num_micro_batches)
    assert lists[0] == one_f_one_b(num_stages, num_micro_batches)[0]
    for stage in range(1, num_stages):
        actions = lists[stage]
        places = {action: place for place, action in enumerate(actions)}
        assert len(places) == len(actions) == 3 * num_micro_batches
        for kind in ("forward", "backward_input", "backward_weight"):
            assert [a.micro_batch for a in actions if a.kind == kind] == list(range(num_micro_batches))
        for m in range(num_micro_batches):
            order = [places[Action(stage, kind, m)] for kind in ("forward", "backward_input", "backward_weight")]  # type: ignore[arg-type]
            assert order == sorted(order)
        # 1F1B without second halves.
        plain = [Action(stage, "backward", a.micro_batch) if a.kind == "backward_input" else a for a in actions]
        assert [a for a in plain if a.kind != "backward_weight"] == one_f_one_b(num_stages, num_micro_batches)[stage]
        assert peak_activations(actions) <= num_stages


def test_zero_bubble_of_three_stages_written_out() -> None:
    short = {"forward": "f", "backward": "b", "backward_input": "i", "backward_weight": "w"}
    written = {
        s: " ".join(f"{short[a.kind]}{a.micro_batch}" for a in actions) for s, actions in zero_bubble(3, 4).items()
    }
    assert written == {
        0: "f0 f1 f2 b0 f3 b1 b2 b3",
        1: "f0 f1 i0 f2 i1 w0 f3 i2 w1 i3 w2 w3",
        2: "f0 i0 f1 i1 f2 i2 w0 f3 i3 w1 w2 w3",
    }


def test_zero_bubble_with_fewer_micro_batches_than_stages_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4 micro-batches"):
        zero_bubble(4, 3)
