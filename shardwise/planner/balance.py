"""Where to cut the blocks of a model into stages."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_stages(seconds: Sequence[float], num_stages: int, before: float, after: float) -> tuple[int, ...]:
    """The number of blocks of each stage, so that the slowest stage is as fast as can be.

    Exact: the least bound on a stage is found by bisection, and stages that are filled up to a bound in turn need no
    more stages than any other cut under that bound.

    Args:
        seconds: of each block in order.
        before: of the embedding, on the first stage; ``after``: of the head, on the last.
    """
    low, high = max(seconds), before + sum(seconds) + after
    for _ in range(50):
        bound = (low + high) / 2
        if _filled(seconds, num_stages, before, after, bound) is None:
            low = bound
        else:
            high = bound
    found = _filled(seconds, num_stages, before, after, high * (1 + 1e-9))
    assert found is not None, "the whole model fits the largest bound"
    return found


def _filled(
    seconds: Sequence[float], num_stages: int, before: float, after: float, bound: float
) -> tuple[int, ...] | None:
    """Stages that are filled up from the last to the first; None where they do not suffice."""
    stages: list[int] = []
    position = len(seconds)
    for stage in reversed(range(num_stages)):
        used = after if stage == num_stages - 1 else 0.0
        used += before if stage == 0 else 0.0
        size = 0
        # Each stage before this one needs a block of its own.
        while position - size > stage and used + seconds[position - size - 1] <= bound:
            used += seconds[position - size - 1]
            size += 1
        if size == 0 or used > bound:
            return None
        stages.append(size)
        position -= size
    return tuple(reversed(stages)) if position == 0 else None
