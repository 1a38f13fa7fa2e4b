"""Tables of runs: the rows of a world size share ranks that are started once, and each is held to one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from shardwise.spec import tolerance
from shardwise.testing import RankError, run_distributed
from tests.long import EVERYTHING
from tests.parallel.harness import Outcome, RankPart, assemble, compare, run_cases

Run = Callable[[int, list[Any]], Sequence[RankPart]]


class Table:
    """Cases by key; what each comes to is found together with the others of its world size.

    Where every row is asked for, those of different kinds run apart: together they would take minutes. A run that
    fails is not started again for each of its rows: its error is that of all of them.

    Args:
        cases: by key; the last part of a key names the kind.
        run: runs a list of cases on a rank.
    """

    def __init__(self, cases: Mapping[tuple[str, ...], Any], run: Run = run_cases) -> None:
        self.cases, self._run = cases, run
        self._together = cache(self._run_together)

    def __getitem__(self, key: tuple[str, ...]) -> Outcome:
        found = self._together(self._group(key))
        if isinstance(found, RankError):
            raise found
        return found[key]

    def _group(self, key: tuple[str, ...]) -> tuple[int, str]:
        return self.cases[key].strategy.world_size, key[-1] if EVERYTHING else ""

    def _run_together(self, group: tuple[int, str]) -> dict[tuple[str, ...], Outcome] | RankError:
        cases = {key: case for key, case in self.cases.items() if self._group(key) == group}
        try:
            by_rank = run_distributed(self._run, group[0], list(cases.values()), timeout=280)
        except RankError as error:
            return error
        return {key: assemble([rank[i] for rank in by_rank]) for i, key in enumerate(cases)}


def assert_equal(got: Outcome, want: Outcome, note: Callable[[str, float], None], label: str, optimizer: str) -> None:
    """The parity rule, in the precision of the run; the errors are noted under ``label``."""
    errors = compare(got, want)
    for name in ("loss", "norm", "gradient", "weight"):
        note(f"{label} {name}", getattr(errors, name))
    sharp = next(iter(want.weights.values())).dtype is torch.float64
    assert errors.loss <= (tolerance.FLOAT64_LOSS if sharp else tolerance.FP32_LOSS)
    assert errors.norm <= (tolerance.FLOAT64_GRADIENT if sharp else tolerance.FP32_NORM)
    assert errors.gradient <= (tolerance.FLOAT64_GRADIENT if sharp else tolerance.FP32_GRADIENT), errors.worst_gradient
    weights = tolerance.ADAMW_WEIGHTS if optimizer == "adamw" else tolerance.SGD_WEIGHTS
    assert errors.weight <= (tolerance.FLOAT64_GRADIENT if sharp else weights)
    assert got.eval_loss is not None
    assert got.eval_loss == pytest.approx(want.eval_loss, rel=tolerance.FLOAT64_LOSS if sharp else tolerance.FP32_LOSS)
