"""Compiled blocks whose sequence is cut give the numbers of eager ones in one process, and are compiled once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.launch.compiler import missing_for_compiling
from shardwise.spec import tolerance
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.parallel.harness import Case, RankPart, assemble, compare, reference, run_case, strategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing_for_compiling("cpu") != "", reason="no compiler on this machine"),
]


def _run(rank: int, case: Case, cache: Path) -> tuple[RankPart, int]:
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    return run_case(case), counters["stats"]["unique_graphs"]


def test_equals_one_eager_process_and_compiles_once(tmp_path: Path) -> None:
    """Steps of 10, 16, 9 and 13 positions; half of the blocks are recomputed, and evaluation has no gradients."""
    folder = make_model(tmp_path, "qwen3-tied")
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9, 9, 8, 7, 13)))
    split = strategy(tp=2, recompute=2, sequence_parallel=True)
    case = Case(folder, split, rows, 4, 6, eval_batch_size=5, compiled=True)
    by_rank = run_distributed(_run, 2, case, tmp_path / "cache", timeout=800)
    got, want = assemble([part for part, _ in by_rank]), reference(case)
    errors = compare(got, want)
    assert errors.loss <= tolerance.FP32_LOSS
    assert errors.norm <= tolerance.FP32_NORM
    assert errors.gradient <= tolerance.FP32_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.SGD_WEIGHTS
    assert got.eval_loss == pytest.approx(want.eval_loss, rel=tolerance.FP32_LOSS)
    for _, num_graphs in by_rank:
        # Training, recomputed blocks, evaluation, and one more of each for lengths that the ranks do not divide; and
        # training of a last batch of one row.
        assert num_graphs <= 8
