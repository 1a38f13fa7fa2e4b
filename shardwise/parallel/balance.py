"""The auxiliary loss that keeps experts evenly used (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6).

For one block and one micro-batch, over its T tokens that are no padding, E experts and k of them a token:

    f_e = (tokens that have e among their k) / T        P_e = (sum of their router probabilities for e) / T
    balance = E * sum_e f_e P_e

The step's auxiliary loss, which is added to the token loss, is

    router_aux_loss_coef * sum over micro-batches (T / tokens of the step) * mean over blocks of balance

Fractions are those of a micro-batch, not of the step: a step whose micro-batches are cut in another way is
another sum. Everything else (data ranks, stages, recomputation) leaves it as it is. transformers multiplies
the fractions averaged over all blocks, which no stage of a pipeline knows; with one block the two agree.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.models.routers import Routers
from shardwise.tensor.positions import Positions


class _AddGradient(torch.autograd.Function):
    """The values of ``hidden``; in the backward pass ``loss`` receives the gradient 1.

    A copy and no view: FSDP's hook on a view is lost without a word if the next block changes it in place.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return grads[0], ctx.saved_tensors[0]


def balance_loss(logits: torch.Tensor, mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """``E sum_e f_e P_e`` of one block; see the module's docstring.

    Args:
        logits: [tokens, experts] of the router.
        mask: bool [tokens], True for a token that is no padding; at least one.
    """
    probabilities = torch.softmax(logits if logits.dtype is torch.float64 else logits.float(), dim=-1)
    chosen = torch.zeros_like(probabilities).scatter_(1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    counted = mask.to(probabilities.dtype).unsqueeze(1)
    num_tokens = counted.sum()
    used = (chosen * counted).sum(0) / num_tokens
    expected = (probabilities * counted).sum(0) / num_tokens
    return logits.shape[-1] * (used * expected).sum()


class Balance:
    """Adds the auxiliary loss of the blocks of one stage to their gradient, and sums its value.

    Hooks on a block's routers keep their logits; a hook on the block then attaches the loss to its output.
    The latter stands outside of recomputation, so the value counts once. Where the residual stream is cut along the
    sequence (``positions``) the logits of all positions are gathered: the fractions are those of whole rows.
    """

    def __init__(
        self, model: nn.Module, blocks: list[nn.Module], routers: Routers, positions: Positions | None = None
    ) -> None:
        self._routers, self._logits = routers, list[torch.Tensor]()
        self._positions = positions
        self._lengths: torch.Tensor | None = None
        self._step_tokens, self._micro_batch, self._total = 1, -1, 0.0
        self._mask: torch.Tensor | None = None
        self._open = False
        targets = [model.get_submodule(name) for name in routers.modules if _has(model, name)]
        for router in targets:
            router.register_forward_hook(self._keep)
        for block in blocks:
            if any(router in set(block.modules()) for router in targets):
                block.register_forward_pre_hook(self._enter)
                block.register_forward_hook(self._leave)

    def begin(self, lengths: torch.Tensor, step_tokens: int) -> None:
        """A step begins.

        Args:
            lengths: [micro-batches, rows], tokens of each row that are no padding.
            step_tokens: their sum over all data ranks.
        """
        self._lengths, self._step_tokens, self._micro_batch, self._total = lengths, step_tokens, -1, 0.0

    def next_micro_batch(self, length: int) -> None:
        """The forward pass of the next micro-batch begins, on rows of ``length`` tokens with padding."""
        self._micro_batch += 1
        self._mask = None
        if self._lengths is not None:
            lengths = self._lengths[self._micro_batch]
            self._mask = torch.arange(length, device=lengths.device) < lengths.unsqueeze(1)

    def finish(self) -> float:
        """The sum of what this stage's blocks added since :meth:`begin`; passes that follow add nothing."""
        self._lengths = self._mask = None
        return float(self._total)

    def _enter(self, *_: Any) -> None:
        self._logits.clear()
        self._open = True

    def _keep(self, _module: nn.Module, _args: Any, out: Any) -> None:
        if self._open:  # closed while a block is recomputed
            self._logits.append(out[self._routers.output] if isinstance(out, tuple | list) else out)

    def _leave(self, _module: nn.Module, _args: Any, out: Any) -> Any:
        kept, self._open = list(self._logits), False
        self._logits.clear()
        if self._mask is None or not bool(self._mask.any()):
            return out
        mask = self._mask.flatten()
        share = float(mask.sum()) / self._step_tokens
        if self._positions is not None:
            kept = [self._positions.whole(logits) for logits in kept]
        weight = self._routers.coefficient * share / len(self._routers.modules)
        loss = sum(balance_loss(logits.flatten(0, -2), mask, self._routers.top_k) for logits in kept) * weight
        assert isinstance(loss, torch.Tensor)
        self._total += float(loss.detach())
        if isinstance(out, tuple | list):
            told = (_AddGradient.apply(out[0], loss), *out[1:])
            return list(told) if isinstance(out, list) else told
        return _AddGradient.apply(out, loss)


def _has(model: nn.Module, name: str) -> bool:
    try:
        model.get_submodule(name)
    except AttributeError:  # the block is another stage's
        return False
    return True
