"""Faults put into the executor of real processes (the table's proof on threads must not see them), and a check."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from shardwise.check.ranks import work
from shardwise.parallel import model as parallel_model
from shardwise.tensor import forwards
from shardwise.tensor.collectives import sum_forward
from shardwise.tensor.group import ProcessTensorGroup
from shardwise.tensor.table import Style
from shardwise.train.context import WorkerContext


def row_bias_on_each_rank(context: WorkerContext) -> dict[str, Any]:
    right = forwards._FORWARDS[Style.ROW]

    def wrong(layer: Any, place: Any) -> Any:
        if not isinstance(place.group, ProcessTensorGroup):
            return right(layer, place)
        return lambda x: sum_forward(F.linear(x, layer.weight, layer.bias), place.group)

    forwards._FORWARDS[Style.ROW] = wrong
    return work(context)


def partial_gradients_not_summed(context: WorkerContext) -> dict[str, Any]:
    parallel_model.sum_gradients = lambda *_: None
    return work(context)


def input_gradients_not_summed(context: WorkerContext) -> dict[str, Any]:
    right = forwards.SharedInput.__call__

    def wrong(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x if isinstance(self.group, ProcessTensorGroup) else right(self, x)

    forwards.SharedInput.__call__ = wrong
    return work(context)


def a_rank_that_raises(context: WorkerContext) -> dict[str, Any]:
    if context.rank == 1:
        raise RuntimeError("out of luck")
    return work(context)
