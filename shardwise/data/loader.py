"""The batches of a run: every rank walks the same global order and keeps its own part of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.data.batch import START, Batch, LoaderState, stack_rows
from shardwise.data.order import epoch_order, group_by_length, step_rows, steps_per_epoch
from shardwise.data.pack import StepSplit, lay_out
from shardwise.data.rows import Row, row_hash
from shardwise.data.store import first_late, row_sizes
from shardwise.errors import ConfigError


@dataclass(frozen=True)
class LoaderSettings:
    """How rows become batches.

    ``global_batch_size`` counts the rows of a step over all data ranks, ``micro_batch_size`` those of one forward on
    one of them; ``min_micro_batches`` is what the pipeline needs; ``log_rows`` adds the rows' hashes to a batch.
    ``packing`` lays rows one behind the other, up to ``pack_length`` tokens (None: those of the longest row);
    a micro-batch then has at most ``micro_batch_size`` such places. ``group_by_length`` puts rows of about the same
    length near each other.
    """

    global_batch_size: int
    micro_batch_size: int
    data_rank: int = 0
    num_data_ranks: int = 1
    min_micro_batches: int = 1
    shuffle: bool = True
    seed: int = 42
    drop_last: bool = False
    log_rows: bool = False
    packing: bool = False
    pack_length: int | None = None
    group_by_length: bool = False


class Loader:
    """Cuts ``rows`` into the batches of one data rank. No communication: each rank computes the step's counts."""

    def __init__(self, rows: Sequence[Row], settings: LoaderSettings) -> None:
        self.rows, self.settings = rows, settings
        self._lengths, self._supervised = row_sizes(rows)
        if settings.packing:
            _refuse_late_beginnings(rows)
        longest = int(self._lengths.max(initial=1))
        self._split = StepSplit(
            settings.micro_batch_size,
            settings.num_data_ranks,
            settings.min_micro_batches,
            max(settings.pack_length or 0, longest) if settings.packing else None,
        )

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.rows), self.settings.global_batch_size, self.settings.drop_last)

    @property
    def dropped_rows(self) -> int:
        """Rows that each epoch leaves out (which ones changes with the order); 0 unless ``drop_last``."""
        return len(self.rows) % self.settings.global_batch_size if self.settings.drop_last else 0

    def num_steps(self, epochs: int, state: LoaderState = START) -> int:
        """Steps from ``state`` to the end of epoch number ``epochs`` (counted from 1).

        Raises:
            ConfigError: as :meth:`batches`.
        """
        state = self._checked(state)
        if state.epoch >= epochs:
            return 0
        left = len(self.rows) - state.rows_seen
        rest = steps_per_epoch(left, self.settings.global_batch_size, self.settings.drop_last)
        return rest + (epochs - state.epoch - 1) * self.steps_per_epoch

    def batches(self, state: LoaderState = START) -> Iterator[Batch]:
        """Batches from ``state`` on, over epoch after epoch without end.

        Raises:
            ConfigError: no step in an epoch, or a state that is beyond this data set.
        """
        return self._endless(self._checked(state))

    def eval_batches(self, batch_size: int) -> Iterator[Batch]:
        """One pass in file order, each row once, ``batch_size`` rows at a time over all data ranks."""
        order = np.arange(len(self.rows), dtype=np.int64)
        for seen in range(0, len(self.rows), batch_size):
            chosen = step_rows(order, seen, batch_size)
            yield self._batch(chosen, 0, seen // batch_size, LoaderState(0, seen + len(chosen)))

    def _checked(self, state: LoaderState) -> LoaderState:
        settings, num_rows = self.settings, len(self.rows)
        if not self.steps_per_epoch:
            value = f"data.drop_last with train.global_batch_size = {settings.global_batch_size}"
            rule = f"the data set has {num_rows} rows, so no step would be left"
            raise ConfigError(value, rule, f"Use data.drop_last=false or train.global_batch_size={max(num_rows, 1)}")
        if state.rows_seen > num_rows:
            rule = f"the data set has {num_rows} rows; it is not the one that the run began with"
            raise ConfigError(f"{state.rows_seen} rows seen in epoch {state.epoch}", rule, "Resume with the same data")
        return self._normal(state)

    def _normal(self, state: LoaderState) -> LoaderState:
        """The same place, written as the beginning of the next epoch if this one has no step left."""
        left = steps_per_epoch(
            len(self.rows) - state.rows_seen, self.settings.global_batch_size, self.settings.drop_last
        )
        return state if left else LoaderState(state.epoch + 1, 0)

    def _endless(self, state: LoaderState) -> Iterator[Batch]:
        settings = self.settings
        while True:
            epoch = state.epoch
            order = self._order(epoch)
            while state.epoch == epoch:
                chosen = step_rows(order, state.rows_seen, settings.global_batch_size)
                step = -(-state.rows_seen // settings.global_batch_size)
                state = self._normal(LoaderState(epoch, state.rows_seen + len(chosen)))
                yield self._batch(chosen, epoch, step, state)

    def _order(self, epoch: int) -> np.ndarray:
        order = epoch_order(len(self.rows), self.settings.shuffle, self.settings.seed, epoch)
        return group_by_length(order, self._lengths) if self.settings.group_by_length else order

    def fill_rates(self, max_steps: int = 100) -> tuple[float, float]:
        """Share of the tokens of the first epoch's first steps that are no padding: as they are laid out, and unpacked.

        Both are equal without packing.
        """
        order, size = self._order(0), self.settings.global_batch_size
        real, laid_out, unpacked = 0, 0, 0
        for seen in range(0, min(len(order), max_steps * size), size):
            lengths = self._lengths[step_rows(order, seen, size)]
            real += int(lengths.sum())
            laid_out += lay_out(lengths, self._split).num_tokens
            unpacked += lay_out(lengths, replace(self._split, capacity=None)).num_tokens
        return real / max(laid_out, 1), real / max(unpacked, 1)

    def _batch(self, chosen: np.ndarray, epoch: int, step: int, next_state: LoaderState) -> Batch:
        settings = self.settings
        layout = lay_out(self._lengths[chosen], self._split)
        own = layout.places[settings.data_rank]
        input_ids, targets, position_ids, lengths = stack_rows(
            [[self.rows[chosen[number]] for number in numbers] for numbers in own],
            layout.num_micro_batches,
            layout.micro_batch_size,
            layout.length,
        )
        return Batch(
            input_ids=input_ids,
            targets=targets,
            position_ids=position_ids,
            lengths=lengths,
            num_tokens=int(self._supervised[chosen].sum()),
            num_input_tokens=int(self._lengths[chosen].sum()),
            num_computed_tokens=layout.num_tokens,
            num_rows=len(chosen),
            rows=tuple(chosen.tolist()),
            row_hashes=tuple(row_hash(self.rows[index]) for index in chosen) if settings.log_rows else None,
            epoch=epoch,
            step_in_epoch=step,
            next_state=next_state,
        )


def _refuse_late_beginnings(rows: Sequence[Row]) -> None:
    """Models tell packed rows apart by positions that do not go on; one that begins later could just go on."""
    row = first_late(rows)
    if row is not None and row.position_ids is not None:
        rule = f"its positions begin at {row.position_ids[0]}, and rows are packed that begin at 0"
        raise ConfigError(f"row of line {row.line}", rule, "Leave position_ids out, or use data.packing=false")
