"""The optimizer, on local slices: torch's own AdamW and SGD know nothing of the split."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.models.shard import Shard
from shardwise.spec.run import TrainConfig

SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Optimizer:
    """AdamW or SGD over the local values of ``shards``.

    Plain tensors that share the parameters' storage are stepped, since DTensors and plain tensors may not
    be mixed in one fused step. All state exists from the start (zeros), so that memory is known before the
    first step and a checkpoint fits in place.
    """

    def __init__(self, shards: Sequence[Shard], train: TrainConfig) -> None:
        self.shards = [shard for shard in shards if shard.parameter.requires_grad and shard.data.numel()]
        self._values = [shard.data for shard in self.shards]
        self.slots = () if train.optimizer == "sgd" and train.momentum == 0.0 else SLOTS[train.optimizer]
        self._optimizer = _build(self._values, train) if self._values else None
        if self._optimizer is not None:
            for value in self._values:
                state = {slot: torch.zeros_like(value) for slot in self.slots}
                if train.optimizer == "adamw":
                    state["step"] = torch.zeros((), dtype=torch.float32, device=value.device)
                if state:
                    self._optimizer.state[value] = state

    def step(self, learning_rate: float) -> None:
        """One update with the gradients that the parameters hold."""
        if self._optimizer is None:  # nothing trainable on this stage
            return
        for shard, value in zip(self.shards, self._values, strict=True):
            value.grad = shard.grad
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        for value in self._values:
            value.grad = None

    def state(self, slot: str) -> list[tuple[Shard, torch.Tensor]]:
        """The local values of one slot (``exp_avg``), shard by shard: writing to them changes the state."""
        states = self._optimizer.state if self._optimizer is not None else {}
        return [(shard, states[value][slot]) for shard, value in zip(self.shards, self._values, strict=True)]

    def set_num_updates(self, count: int) -> None:
        """Set the number of updates so far, on which AdamW's bias correction depends (after a resume)."""
        for value in self._values:
            state = self._optimizer.state[value] if self._optimizer is not None else {}
            if "step" in state:
                state["step"].fill_(count)


def _build(values: list[torch.Tensor], train: TrainConfig) -> torch.optim.Optimizer:
    if train.optimizer == "adamw":
        return torch.optim.AdamW(
            values,
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_eps,
            weight_decay=train.weight_decay,
            fused=True,
        )
    return torch.optim.SGD(
        values, lr=train.learning_rate, momentum=train.momentum, weight_decay=train.weight_decay, fused=True
    )
