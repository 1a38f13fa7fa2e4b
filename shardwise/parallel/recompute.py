"""Recompute the activations of a block in the backward pass instead of keeping them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.parallel.deferred import DeferredWeights, recording_again
from shardwise.parallel.dropout import DropoutStreams


def apply_recompute(
    blocks: Sequence[nn.Module], count: int, dropout: DropoutStreams, deferred: DeferredWeights | None = None
) -> None:
    """Recompute the first ``count`` of a stage's ``blocks`` (-1: all); a no-op at 0.

    The block's own ``forward`` is wrapped, inside of any hook: what FSDP gathers before a block is
    gathered before its recomputation too. Only the block's inputs stay in memory. Dropout is that of the
    micro-batch of the first pass: under a pipeline others have run since.

    Args:
        deferred: the stage's, where its backward passes run in two halves.
    """
    contexts = dropout.recompute_contexts
    if deferred is not None:
        contexts = recording_again(contexts, deferred)
    for block in blocks if count < 0 else blocks[:count]:
        block.forward = functools.partial(  # type: ignore[method-assign]
            checkpoint,
            block.forward,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=contexts,
        )
