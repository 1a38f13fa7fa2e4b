"""One data rank's part of one step, as tensors of one static shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardwise.data.format import IGNORED
from shardwise.data.rows import Row

_PAD = 0  # any valid id does: padding follows its row, so nothing that counts attends to it


@dataclass(frozen=True)
class LoaderState:
    """Where an epoch stands, counted in rows, so that a run goes on at the next row with any batch size."""

    epoch: int = 0
    rows_seen: int = 0

    def to_json(self) -> dict[str, int]:
        return {"epoch": self.epoch, "rows_seen": self.rows_seen}

    @classmethod
    def from_json(cls, data: dict[str, int]) -> LoaderState:
        return cls(int(data["epoch"]), int(data["rows_seen"]))


START = LoaderState()


@dataclass(frozen=True)
class Batch:
    """One data rank's rows of a step: M micro-batches of m places, padded to the length L.

    A place holds one row, or with packing several one behind the other: the positions of each are its own, which is
    how a model tells them apart. M, m and L are the same on every data rank; what is missing is filled with places
    that are not supervised. The counts and ``rows`` speak of the whole step, over all data ranks, and are equal on
    all of them.

    Attributes:
        input_ids: int64 [M, m, L].
        targets: int64 [M, m, L]; the token that follows each position, -100 where there is none to learn.
        position_ids: int64 [M, m, L]; a row's own, else 0, 1, 2, ... through the padding.
        lengths: int64 [M, m]; tokens of each place that are no padding.
        num_tokens: supervised tokens, the divisor of the loss.
        num_input_tokens: tokens without padding.
        num_computed_tokens: tokens with padding.
        num_rows: rows without filler.
        rows: indices of the rows in their global order.
        row_hashes: of each of ``rows``; None unless asked for.
        epoch, step_in_epoch: both from 0.
        next_state: where to go on after this step; ``rows_seen`` is 0 at the end of an epoch.
    """

    input_ids: Tensor
    targets: Tensor
    position_ids: Tensor
    lengths: Tensor
    num_tokens: int
    num_input_tokens: int
    num_computed_tokens: int
    num_rows: int
    rows: tuple[int, ...]
    row_hashes: tuple[str, ...] | None
    epoch: int
    step_in_epoch: int
    next_state: LoaderState

    @property
    def fill_rate(self) -> float:
        """Share of the step's tokens that are no padding."""
        return self.num_input_tokens / self.num_computed_tokens


def stack_rows(
    places: Sequence[Sequence[Row]], num_micro_batches: int, micro_batch_size: int, length: int
) -> tuple[Tensor, ...]:
    """``(input_ids, targets, position_ids, lengths)`` of one data rank; int64.

    Args:
        places: at most M m, each with the rows that lie in it one behind the other, together at most L tokens.

    Returns:
        The first three are [M, m, L], the last is [M, m]. No row's first token is a target of the row before it.
    """
    total = num_micro_batches * micro_batch_size
    ids = np.full((total, length), _PAD, dtype=np.int64)
    targets = np.full((total, length), IGNORED, dtype=np.int64)
    positions = np.tile(np.arange(length, dtype=np.int64), (total, 1))
    lengths = np.zeros(total, dtype=np.int64)
    for place, rows in enumerate(places):
        end = 0
        for row in rows:
            start, end = end, end + len(row.input_ids)
            ids[place, start:end] = row.input_ids
            targets[place, start : end - 1] = row.labels[1:]
            if row.position_ids is not None:
                positions[place, start:] = _extended(row.position_ids, length - start)
            elif start:
                positions[place, start:] = np.arange(length - start)
        lengths[place] = end
    shape = (num_micro_batches, micro_batch_size, length)
    tensors = [torch.from_numpy(array.reshape(shape)) for array in (ids, targets, positions)]
    return (*tensors, torch.from_numpy(lengths.reshape(shape[:2])))


def _extended(positions: np.ndarray, length: int) -> np.ndarray:
    """Position ids that go on through the padding, but never beyond what the batch's rows need anyway.

    A row may end on a high position; counting on from there could leave a learned position table.
    """
    last = int(positions[-1])
    padding = np.arange(last + 1, last + 1 + length - len(positions))
    return np.concatenate([positions, np.minimum(padding, max(last, length - 1))])
