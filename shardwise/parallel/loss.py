"""Sum of the token losses over logits that stay split over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

IGNORED = -100


class _TokenLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, start: int, group: dist.ProcessGroup | None
    ) -> torch.Tensor:
        mask = targets != IGNORED
        supervised = None if bool(mask.all()) else mask.nonzero().squeeze(1)
        scores = logits
        if supervised is not None:
            scores, targets = logits[supervised], targets[supervised]
        if scores.dtype in (torch.bfloat16, torch.float16):
            scores = scores.float()
        local_targets = targets - start
        foreign = (local_targets < 0) | (local_targets >= scores.shape[1])
        local_targets = local_targets.masked_fill(foreign, 0).unsqueeze(1)
        top = scores.amax(dim=1)
        if group is not None:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
        # Out of place only where the scores still are the caller's logits.
        scores = scores - top.unsqueeze(1) if scores is logits else scores.sub_(top.unsqueeze(1))
        target_scores = scores.gather(1, local_targets).squeeze(1).masked_fill(foreign, 0.0)
        sums = torch.stack([scores.exp_().sum(dim=1), target_scores])
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.save_for_backward(scores, sums[0], supervised, local_targets, foreign)
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return (sums[0].log() - sums[1]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # The saved scores become the gradient in place; a second backward is refused by autograd's version check.
        scores, sums, supervised, local_targets, foreign = ctx.saved_tensors
        scores.mul_((grads[0] / sums).unsqueeze(1))
        scores.scatter_add_(1, local_targets, (~foreign).to(scores.dtype).mul_(-grads[0]).unsqueeze(1))
        if supervised is None:
            return scores.to(ctx.dtype), None, None, None
        grad = scores.new_zeros(ctx.shape, dtype=ctx.dtype)
        grad[supervised] = scores.to(ctx.dtype)
        return grad, None, None, None


def token_loss_sum(
    logits: torch.Tensor, targets: torch.Tensor, vocab_start: int = 0, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sum over the supervised tokens of -log softmax(logits)[target], computed in fp32 (float64 for float64).

    Args:
        logits: [rows, length, local vocabulary], this rank's slice of the vocabulary.
        targets: [rows, length] ids of the whole vocabulary, already shifted; -100 is not supervised.
        vocab_start: first id of this rank's slice.
        group: the tensor ranks, None where the logits are whole.

    Returns:
        A scalar, equal on all tensor ranks; 0 without supervised tokens. Two all-reduces of one number
        a token and no gathered logits; formula of Shoeybi et al. 2019 (arXiv:1909.08053, section 3).
    """
    return _TokenLossSum.apply(logits.flatten(0, -2), targets.flatten(), vocab_start, group)
