"""One optimizer step, the same under every strategy: count targets, forward_backward, clip, step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from shardwise.data.batch import Batch
from shardwise.parallel.clip import clip_gradients
from shardwise.parallel.model import ParallelModel
from shardwise.train.optim import Optimizer

MAX_SKIPS_IN_A_ROW = 10  # with train.on_nan = skip: after more, the weights themselves are past saving


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient of a step is NaN or infinite; the weights have not been changed by it."""


@dataclass(frozen=True)
class StepResult:
    """What a step tells every rank.

    ``loss`` and pre-clip ``grad_norm`` are None where the step changed nothing, and ``skipped`` says why:
    it had no supervised token, or (``finite`` is False then) one of the two is not a finite number.
    ``notes`` are the sums over the ranks of what each passed as its notes (empty where nothing was summed).
    """

    loss: float | None
    grad_norm: float | None
    notes: list[float]
    skipped: str | None = None
    finite: bool = True


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

    A batch without a supervised token, and one whose loss or norm is not finite, changes nothing. One
    all-reduce tells every rank the loss, the norm and whatever else the ranks have to say to each other
    (``notes``: as many on every rank), so all decide alike.
    """
    if batch.num_tokens == 0:  # the same on every rank: the count is of the whole step
        return StepResult(None, None, [], "no supervised token")
    real = batch.lengths.to(model.mesh.device), batch.num_input_tokens
    share = model.forward_backward(*to_device(batch, model.mesh.device), batch.num_tokens, real)
    loss, squared_norm, *sums = sum_over_ranks([share, model.squared_norm(), *notes], model.mesh.device)
    norm = math.sqrt(squared_norm) if squared_norm >= 0 else math.nan
    if not (math.isfinite(loss) and math.isfinite(norm)):
        model.zero_grad()
        return StepResult(None, None, sums, f"loss {loss}, gradient norm {norm}", finite=False)
    clip_gradients(model.shards, norm, max_grad_norm)
    optimizer.step(learning_rate)
    model.zero_grad()
    return StepResult(loss, norm, sums)


class NonFinitePolicy:
    """``train.on_nan``: what follows from a step whose loss or norm is not finite."""

    def __init__(self, on_nan: Literal["stop", "skip"]) -> None:
        self._limit = MAX_SKIPS_IN_A_ROW if on_nan == "skip" else 0
        self._num_in_a_row = 0

    def check(self, result: StepResult, step: int, where: str) -> None:
        """Let step number ``step`` pass, or end the run; ``where`` names its rows.

        Raises:
            NonFiniteLossError: on every rank, before anything is saved.
        """
        if result.finite:
            self._num_in_a_row = 0 if result.loss is not None else self._num_in_a_row
            return
        self._num_in_a_row += 1
        if self._num_in_a_row > self._limit:
            more = f"; {self._limit} steps before it were skipped in a row" if self._limit else ""
            raise NonFiniteLossError(f"step {step}: {result.skipped} in {where}{more}")


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
