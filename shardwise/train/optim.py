"""The optimizer, on local slices: torch's own AdamW and SGD know nothing of the split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.models.shard import Shard
from shardwise.spec.decay import decays
from shardwise.spec.run import TrainConfig

SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}


class Optimizer:
    """AdamW or SGD over the local values of ``shards``.

    Plain tensors that share the storage of parameters or masters are stepped, since DTensors and plain tensors may not
    be mixed in one fused step. All state exists from the start (zeros), so that memory is known before the
    first step and a checkpoint fits in place.
    """

    def __init__(self, shards: Sequence[Shard], train: TrainConfig) -> None:
        self.shards = [shard for shard in shards if shard.parameter.requires_grad and shard.data.numel()]
        self._values = [shard.data for shard in self.shards]
        self.slots = () if train.optimizer == "sgd" and train.momentum == 0.0 else SLOTS[train.optimizer]
        self._optimizer = _build(self.shards, self._values, train) if self._values else None
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
        # Torch's fused steps leave the version counters as they are; masters are followed by them.
        torch.autograd.graph.increment_version(self._values)
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


def _build(shards: Sequence[Shard], values: Sequence[torch.Tensor], train: TrainConfig) -> torch.optim.Optimizer:
    decaying = [decays(shard.layout.source, shard.layout.shape) for shard in shards]
    groups: list[dict[str, Any]] = [
        {
            "params": [value for value, is_one in zip(values, decaying, strict=True) if is_one is wanted],
            "weight_decay": train.weight_decay if wanted else 0.0,
        }
        for wanted in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adamw":
        betas = (train.adam_beta1, train.adam_beta2)
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_eps, fused=True)
    return torch.optim.SGD(groups, lr=train.learning_rate, momentum=train.momentum, fused=True)
