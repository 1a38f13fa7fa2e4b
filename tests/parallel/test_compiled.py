"""Compiled blocks give the numbers of eager ones, and are compiled once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from shardwise.front.compiler import missing_for_compiling
from shardwise.parallel.compiled import CompileClock
from shardwise.spec import tolerance
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import Case, RankPart, assemble, compare, reference, run_case, strategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(missing_for_compiling("cpu") != "", reason="no compiler on this machine"),
]


def _run(rank: int, case: Case, cache: Path) -> tuple[RankPart, float, float, int]:
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)  # nothing is compiled already, or broken by a killed run
    clock = CompileClock()
    part = run_case(case)
    return part, clock.take(), clock.take(), counters["stats"]["unique_graphs"]


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "recompute": 2},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": 1},
    "sequence": {"tp": 2, "sequence_parallel": True, "recompute": 2},
}


@pytest.mark.parametrize(
    "degrees", [pytest.param(LAYOUTS[name], id=name) for name in LAYOUTS if name == "tp2" or EVERYTHING]
)
def test_equals_one_eager_process_and_compiles_once(tmp_path: Path, degrees: dict[str, Any]) -> None:
    """Lengths differ from step to step; half of the blocks are recomputed, and evaluation has no gradients."""
    folder = make_model(tmp_path, "qwen3-tied")
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    case = Case(folder, strategy(**degrees), rows, 4, 6, eval_batch_size=5, compiled=True)
    by_rank = run_distributed(_run, 2, case, tmp_path / "cache", timeout=800)
    got, want = assemble([part for part, _, _, _ in by_rank]), reference(case)
    errors = compare(got, want)
    assert errors.loss <= tolerance.FP32_LOSS
    assert errors.norm <= tolerance.FP32_NORM
    assert errors.gradient <= tolerance.FP32_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.SGD_WEIGHTS
    assert got.eval_loss == pytest.approx(want.eval_loss, rel=tolerance.FP32_LOSS)
    for _, seconds, after, num_graphs in by_rank:
        assert seconds > 1.0
        assert after == 0.0
        # Training, recomputed blocks, evaluation: not one a block, a stage, a length or a step. A sequence that is cut
        # has others for lengths that the ranks do not divide.
        assert num_graphs <= (6 if degrees.get("sequence_parallel") else 3)
