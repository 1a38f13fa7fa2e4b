"""A whole run under the interleaved schedule, then on under others: nobody can tell from what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.spec import tolerance
from shardwise.spec.plan import Plan
from shardwise.spec.tolerance import relative_error
from tests.train.runs import make_inputs, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
INTERLEAVED = ("pp=2", "schedule=interleaved")


def _words(inputs: Path, steps: int) -> tuple[str, ...]:
    evaluation = (f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", "eval.steps=1")
    train = ("train.global_batch_size=5", "train.learning_rate=1e-3", "train.lr_scheduler=constant")
    return (*train, *evaluation, f"train.max_steps={steps}", "save.strategy=steps", "save.steps=2")


@pytest.mark.parametrize("layouts", [(INTERLEAVED, ("pp=2",)), (("pp=2", "schedule=zero_bubble"), INTERLEAVED)])
def test_a_run_goes_on_under_another_schedule(tmp_path: Path, layouts: tuple[tuple[str, ...], ...]) -> None:
    inputs = make_inputs(tmp_path, "llama-tied")
    whole = run(inputs, tmp_path / "whole", _words(inputs, 4))
    before, after = layouts
    run(inputs, tmp_path / "out", [*_words(inputs, 2), *before])
    got = run(inputs, tmp_path / "out", [*_words(inputs, 4), *after, "resume=auto"])
    assert got.errors == [""] * 2
    if after is INTERLEAVED:
        assert Plan.load(got.output_dir / "plan.json").strategy.virtual_stages == 2
    for kind, key in (("train", "loss"), ("train", "grad_norm"), ("eval", "eval_loss")):
        values, want = ([line[key] for line in result.metrics(kind)] for result in (got, whole))
        assert len(want) == 4
        assert values == pytest.approx(want, rel=tolerance.FP32_LOSS)
    weights, plain = (load_file(result.output_dir / "export" / "model.safetensors") for result in (got, whole))
    assert weights.keys() == plain.keys()
    for name, values in plain.items():
        error = relative_error(float((weights[name] - values).norm()), float(values.norm()))
        assert error <= tolerance.ADAMW_WEIGHTS, name
    assert not torch.equal(
        plain["model.norm.weight"], load_file(inputs / "model/model.safetensors")["model.norm.weight"]
    )
