"""Passes through a model under its tables, as the planner's amounts need them: rank 0 of each tensor degree.

Rank 0 runs on fake tensors as it will in training, on its part of the weights, with collectives that only count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from shardwise.check.amounts import Fit, make_fit
from shardwise.models.meter import Meter, Tally
from shardwise.models.passes import Tallies, metered_pass, thin
from shardwise.models.structure import Structure
from shardwise.spec.layout import ParamLayout
from shardwise.spec.model import ModelSpec
from shardwise.tensor.execute import apply_table
from shardwise.tensor.table import ShardingTable

LENGTHS = (256, 512, 1024)
ByDegree = dict[int, dict[int, Tallies]]  # degree -> length -> tallies


class CountingRank:
    """Rank 0 of a tensor group that is not there: its collectives have the right shapes, and are counted."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size
        self.meter: Meter | None = None

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._sent("all_reduce", tensor.numel())

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._sent("all_gather", self.size * tensor.numel())
        return torch.stack([tensor] * self.size)

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        self._sent("reduce_scatter", tensors.numel())
        return tensors[0].clone()

    def _sent(self, op: str, elements: int) -> None:
        if self.meter is not None:
            self.meter.sent(op, elements)


@dataclass(frozen=True)
class SplitModel:
    """A model on meta, and what its parts are made from."""

    model: PreTrainedModel
    structure: Structure
    spec: ModelSpec
    tables: Mapping[int, ShardingTable]
    sliced: Mapping[int, ShardingTable]  # with the residual stream cut along the sequence, where that can be
    rules: Mapping[int, str]

    @property
    def lowest(self) -> int:
        """The least degree that splits; 1 where none does."""
        return min((degree for degree in self.tables if degree > 1), default=1)


class Passes:
    """Tallies of all passes that the amounts need; ``known``: those of the model under other tables."""

    def __init__(self, whole: SplitModel, known: Passes | None = None) -> None:
        self.lowest = whole.lowest
        tables = {1: whole.tables[1], self.lowest: whole.tables[self.lowest]}
        self.half: ByDegree = self._all(whole, tables, torch.bfloat16, known.half if known else {})
        try:
            self.single: ByDegree = self._all(whole, tables, torch.float32, known.single if known else {})
        except Exception:  # stacks of experts have no product in fp32: then the dtype of each tensor tells
            self.single = {}
        self.collectives = {t: _short(whole, table) for t, table in whole.tables.items() if t > 1}
        self.sliced = {t: _short(whole, table) for t, table in whole.sliced.items()}

    @staticmethod
    def _all(whole: SplitModel, tables: Mapping[int, ShardingTable], dtype: torch.dtype, known: ByDegree) -> ByDegree:
        """By degree; on one rank the tables make no difference."""
        alone = {1: known[1]} if 1 in known else {}
        return alone | {t: _metered(whole, table, dtype, LENGTHS) for t, table in tables.items() if t not in alone}

    def sequence(self, degree: int) -> Tallies | None:
        """With the residual stream cut along the sequence; None where that cannot be."""
        return self.sliced.get(degree)

    @property
    def parts(self) -> list[str]:
        """Names of the parts that ran."""
        return sorted({part for part, _ in self.half[1][LENGTHS[0]]})

    def amount(self, part: str, backward: bool, take: Callable[[Tally, bool], float]) -> tuple[Fit, ...]:
        """Fits of a quantity: (half, single) precision, each (whole model, one rank of the lowest degree).

        ``take(tally, halves)``: its bytes, or of these those of elements of two bytes.
        """

        def fit(passes: Mapping[int, Tallies], halves: bool) -> Fit:
            return make_fit({n: take(found.get((part, backward), Tally()), halves) for n, found in passes.items()})

        half = [fit(self.half[t], False) for t in (1, self.lowest)]
        if self.single:
            return (*half, *(fit(self.single[t], False) for t in (1, self.lowest)))
        # In fp32 what had two bytes has four.
        doubled = [one + fit(self.half[t], True) for one, t in zip(half, (1, self.lowest), strict=True)]
        return (*half, *doubled)


def _metered(whole: SplitModel, table: ShardingTable, dtype: torch.dtype, lengths: Sequence[int]) -> dict[int, Tallies]:
    """Tallies by length, of rank 0 under ``table``."""
    model = thin(whole.model, whole.structure).to(dtype)
    group = CountingRank(table.degree)
    if table.degree > 1:
        layouts = {name: ParamLayout(name, tuple(p.shape)) for name, p in model.named_parameters()}
        apply_table(model, table, group, layouts)

    def connect(meter: Meter) -> None:
        group.meter = meter

    return {n: metered_pass(model, whole.structure, 1, n, connect) for n in lengths}


def _short(whole: SplitModel, table: ShardingTable) -> Tallies:
    return _metered(whole, table, torch.bfloat16, LENGTHS[:1])[LENGTHS[0]]
