"""Schedules on paper: the closed forms of the bubble, and lists that wait for each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.planner.simulate import peak_bytes, simulate, simulate_schedule
from shardwise.spec.schedule import Action, action_lists, gpipe, interleaved, one_f_one_b, zero_bubble


def no_time(first: int, second: int) -> float:
    return 0.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 8), (4, 13), (8, 64)])
def test_the_bubble_of_plain_schedules(schedule: str, ranks: int, micro_batches: int) -> None:
    """(p - 1) / (M + p - 1) (Narayanan et al. 2021, section 2.2.1)."""
    timeline = simulate(action_lists(schedule, ranks, micro_batches), [1.0] * ranks, [2.0] * ranks, no_time)
    assert timeline.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1))
    assert timeline.seconds == pytest.approx(3 * (micro_batches + ranks - 1))


@pytest.mark.parametrize(("ranks", "micro_batches", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 16, 3), (8, 32, 4)])
def test_the_bubble_of_interleaved_stages(ranks: int, micro_batches: int, virtual: int) -> None:
    """The time of the bubble is that of 1F1B over v (the same paper, section 2.2.2)."""
    stages = ranks * virtual
    lists = interleaved(ranks, micro_batches, virtual)
    timeline = simulate(lists, [1.0 / virtual] * stages, [2.0 / virtual] * stages, no_time)
    assert timeline.seconds == pytest.approx(3 * micro_batches + 3 * (ranks - 1) / virtual)


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(1, 8), more=st.integers(0, 20), forward=st.integers(1, 6), first=st.integers(1, 6))
def test_the_bubble_of_zero_bubble(ranks: int, more: int, forward: int, first: int) -> None:
    """(p - 1) (F + B - W) where W is no longer than the others (Qi et al. 2023, table 1, ZB-H1)."""
    second = min(forward, first)
    number = 2 * ranks + more
    lists = zero_bubble(ranks, number)
    timeline = simulate(lists, [forward] * ranks, [first + second] * ranks, no_time, [second] * ranks)
    work = number * (forward + first + second)
    assert timeline.busy == tuple([work] * ranks)
    assert timeline.seconds == work + (ranks - 1) * (forward + first - second)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 6), more=st.integers(0, 60), share=st.floats(0.1, 0.5), last=st.floats(1.0, 1.5))
def test_a_long_step_of_zero_bubble_is_simulated_by_a_short_one(
    ranks: int, more: int, share: float, last: float
) -> None:
    forward = [1.0] * (ranks - 1) + [last]
    backward = [2 * time for time in forward]
    stages = (forward, backward, [share * time for time in backward])
    whole = simulate(zero_bubble(ranks, ranks + more), forward, backward, lambda a, b: 0.01, stages[2])
    short = simulate_schedule("zero_bubble", ranks + more, 1, stages, lambda a, b: 0.01)
    assert short.finish == pytest.approx(whole.finish, rel=5e-3)
    assert short.busy == pytest.approx(whole.busy)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(1, 6), more=st.integers(0, 60), seconds=st.floats(1.0, 2.0), last=st.floats(1.0, 1.5))
def test_a_long_step_is_simulated_by_short_ones(ranks: int, more: int, seconds: float, last: float) -> None:
    forward = [seconds] * (ranks - 1) + [seconds * last]
    stages = (forward, [2 * time for time in forward])
    whole = simulate(one_f_one_b(ranks, ranks + more), *stages, lambda a, b: 0.01)
    short = simulate_schedule("1f1b", ranks + more, 1, stages, lambda a, b: 0.01)
    assert short.finish == pytest.approx(whole.finish, rel=5e-3)
    assert short.busy == pytest.approx(whole.busy)


def test_a_slow_stage_sets_the_pace() -> None:
    timeline = simulate(one_f_one_b(4, 40), [1, 1, 1, 3], [2, 2, 2, 6], no_time)
    assert timeline.busy[3] == 9 * 40
    assert 9 * 40 <= timeline.seconds <= 9 * 40 + 9


def test_lists_that_wait_for_each_other() -> None:
    lists = {
        0: [Action(0, "backward", 0), Action(0, "forward", 0)],
        1: [Action(1, "forward", 0), Action(1, "backward", 0)],
    }
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(lists, [1.0, 1.0], [1.0, 1.0], no_time)


def test_1f1b_holds_as_many_activations_whatever_the_number_of_micro_batches() -> None:
    for micro_batches in (4, 8, 16):
        lists = one_f_one_b(4, micro_batches)
        assert [peak_bytes(lists[rank], [10.0] * 4) for rank in range(4)] == [40, 30, 20, 10]
        assert peak_bytes(gpipe(4, micro_batches)[0], [10.0] * 4) == 10 * micro_batches


def test_zero_bubble_holds_inputs_and_gradients_until_the_second_half() -> None:
    lists = zero_bubble(4, 8)
    held = [peak_bytes(lists[rank], [10.0] * 4, [4.0] * 4) for rank in range(4)]
    # Whole micro-batches as 1F1B, and one more half for each stage before.
    assert held == [40, 30 + 4, 20 + 2 * 4, 10 + 3 * 4]
