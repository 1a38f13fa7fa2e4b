"""How long a step takes at least, whatever the cut into stages of whole blocks."""

from __future__ import annotations

from functools import lru_cache
from math import floor

import numpy as np

_HALVINGS = 24
_SLACK = 1e-9  # of a number of blocks, what rounding may hide


@lru_cache(maxsize=20_000)
def least_blocks(blocks: int, pp: int, number: int, virtual: int, later: float, forward: float, last: float) -> float:
    """Least time of a step in units of a block's forward and backward pass, of any cut into whole blocks.

    Rank r with n_r blocks computes ``number`` n_r. Before its first micro-batch those before it run a forward pass, and
    after its last one their backward pass, so that a block there costs it one unit. Under a time t it can hold so many
    blocks as fit; where even so not all blocks find a rank, no step can take t.

    - Backward passes in two halves: of the second ones, ``later`` of a unit each, rank r has r + 1 left when it sends
      its last gradient; they are no part of what the ranks before it wait for.
    - Several stages a rank: only the first stages of the ranks before are waited for. The cuts that are looked at give
      each stage as many blocks as an even cut does, rounded down, and the first one at least one.

    Args:
        number: micro-batches of a step.
        later: 0 for whole backward passes.
        forward: share of a unit that is the forward pass; needed where ``later`` is not 0.
        last: what the last rank computes behind the blocks, in units.
    """
    each = blocks // (pp * virtual)

    def held(time: float) -> int:
        """Blocks that the ranks can hold under a time."""
        before = 0
        for rank in range(pp):
            waited = min(before, 1 + (rank - 1) * each) if virtual > 1 and rank else before
            rest = time - (number * last if rank == pp - 1 else 0.0)
            most = (rest - (1 - later) * waited) / (number - (rank + 1) * later)
            if later:
                most = min(most, (rest - forward * waited) / number)
            before += max(floor(most + _SLACK), 0)
            if before >= blocks:
                break
        return before

    low, high = number * (blocks + last) / pp, (number + pp) * (-(-blocks // pp) + last)
    if held(low) >= blocks:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if held(middle) >= blocks else (middle, high)
    return low


@lru_cache(maxsize=64)
def held_inverses(most: int, most_virtual: int, even: bool) -> np.ndarray:
    """Sums over the ranks of a pipeline of 1 / micro-batches that a rank holds at least, [stages of a rank - 1, ranks].

    Args:
        most: ranks.
        even: the last stage of a rank has no more blocks than its others.
    """

    def held(pp: int, virtual: int, later: int) -> float:
        """Micro-batches of a rank that ``later`` others follow."""
        if virtual == 1:
            return later + 1
        last = min(pp, 2 * later + 1)
        return ((virtual - 1) * pp + last) / virtual if even else last

    return np.array(
        [[sum(1 / held(pp, v, r) for r in range(pp)) for pp in range(most + 1)] for v in range(1, most_virtual + 1)]
    )
