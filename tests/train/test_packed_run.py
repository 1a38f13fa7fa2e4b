"""Whole runs with packed rows: the numbers of the run without, and a resume that goes on at the next row."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.spec.tolerance import FP32_LOSS, FP32_NORM
from tests.train.runs import make_inputs, run

pytestmark = pytest.mark.slow
COMMON = ("train.global_batch_size=6", "train.epochs=2", "train.optimizer=sgd", "train.learning_rate=0.05")


def test_a_packed_run_makes_the_steps_of_the_unpacked_one_also_when_it_is_resumed(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    common = [*COMMON, "log.rows=true", f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=epoch"]
    plain = run(inputs, tmp_path / "plain", common)
    packed = [*common, "data.packing=true", "data.max_length=24", "save.strategy=steps", "save.steps=1"]
    # Stopped in the first epoch, and gone on with on two ranks.
    stopped = run(inputs, tmp_path / "packed", [*packed, "save.export=false"], stop_at_look=1)
    assert stopped.returned == [{"stopped": "SIGTERM"}]
    resumed = run(inputs, tmp_path / "packed", [*packed, "pp=2", "resume=auto"])
    assert resumed.errors == ["", ""]
    want, got = plain.metrics(), resumed.metrics()
    same = ("step", "epoch", "lr", "num_tokens", "num_input_tokens", "num_rows", "row_hashes")
    assert [[line[key] for key in same] for line in got] == [[line[key] for key in same] for line in want]
    assert [line["loss"] for line in got] == pytest.approx([line["loss"] for line in want], rel=FP32_LOSS)
    assert [line["grad_norm"] for line in got] == pytest.approx([line["grad_norm"] for line in want], rel=FP32_NORM)
    losses = ([line["eval_loss"] for line in result.metrics("eval")] for result in (plain, resumed))
    assert next(losses) == pytest.approx(next(losses), rel=FP32_LOSS)
    assert all(0.5 < line["fill_rate"] <= 1 for line in got)
    assert "of the tokens of a step are no padding" in stopped.terminal


def test_a_model_that_mixes_rows_is_refused_before_any_row_is_read(tmp_path: Path) -> None:
    from tests.parallel.families import make_family

    make_family(tmp_path / "model", "bloom")
    (tmp_path / "rows.jsonl").write_text("no rows\n")
    result = run(tmp_path, tmp_path / "out", ["data.packing=true"])
    assert "BloomForCausalLM mixes rows" in result.errors[0]
