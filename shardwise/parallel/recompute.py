"""Recompute the activations of a block in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_recompute(blocks: Sequence[nn.Module], count: int) -> None:
    """Recompute the first ``count`` of a stage's ``blocks`` (-1: all); a no-op at 0.

    The block's own ``forward`` is wrapped, inside of any hook: what FSDP gathers before a block is
    gathered before its recomputation too. Only the block's inputs stay in memory.
    """
    for block in blocks if count < 0 else blocks[:count]:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=True
        )
