"""One optimizer step, the same under every strategy: count targets, forward_backward, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.data.batch import Batch
from shardwise.parallel.clip import clip_gradients
from shardwise.parallel.model import ParallelModel
from shardwise.train.optim import Optimizer


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite; the weights have not been changed by it."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells every rank.

    ``loss`` and pre-clip ``grad_norm`` are None where it had no supervised token; ``notes`` are the sums
    over the ranks of what each passed as its notes (empty where nothing was summed).
    """

    loss: float | None
    grad_norm: float | None
    notes: list[float]


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sum each value over all ranks, in float64 (fp32 where the device has no float64)."""
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    totals = torch.tensor(values, dtype=dtype, device=device)
    if dist.get_world_size() > 1:
        dist.all_reduce(totals)
    return totals.tolist()


def train_step(
    model: ParallelModel,
    optimizer: Optimizer,
    batch: Batch,
    learning_rate: float,
    max_grad_norm: float | None,
    notes: list[float],
) -> StepResult:
    """Update the weights by one batch.

    A batch without a supervised token changes nothing. One all-reduce tells every rank the loss, the norm
    and whatever else the ranks have to say to each other (``notes``: as many on every rank).

    Raises:
        NonFiniteLossError: before the update, on every rank.
    """
    if batch.num_tokens == 0:  # the same on every rank: the count is of the whole step
        return StepResult(None, None, [])
    real = batch.lengths.to(model.mesh.device), batch.num_input_tokens
    share = model.forward_backward(*to_device(batch, model.mesh.device), batch.num_tokens, real)
    loss, squared_norm, *sums = sum_over_ranks([share, model.squared_norm(), *notes], model.mesh.device)
    norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise NonFiniteLossError(f"loss {loss}, gradient norm {norm}, rows {list(batch.rows)}")
    clip_gradients(model.shards, norm, max_grad_norm)
    optimizer.step(learning_rate)
    model.zero_grad()
    return StepResult(loss, norm, sums)


def to_device(batch: Batch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, targets and position ids of a batch on ``device``."""
    return batch.input_ids.to(device), batch.targets.to(device), batch.position_ids.to(device)


def evaluate(model: ParallelModel, batches: Iterable[Batch]) -> tuple[float, int]:
    """Sum of token losses over ``batches`` divided by their supervised tokens, and that number of tokens."""
    share, num_tokens = 0.0, 0
    for batch in batches:
        if batch.num_tokens:
            share += model.evaluate(*to_device(batch, model.mesh.device))
            num_tokens += batch.num_tokens
    (total,) = sum_over_ranks([share], model.mesh.device)
    return (total / num_tokens if num_tokens else math.nan), num_tokens
