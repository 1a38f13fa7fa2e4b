"""A stop that comes in an evaluation, or before a due one: saved at once, and the evaluation made up for later."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import Result, make_inputs, run

pytestmark = pytest.mark.slow
STEPS = 4
EVAL_BATCHES = 4  # eight rows, two at a time
EVERY = 2  # steps between evaluations


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def _run(inputs: Path, output_dir: Path, *more: str, stop_at_look: int = 0) -> Result:
    evaluation = [f"data.eval={inputs / 'rows.jsonl'}", "eval.strategy=steps", f"eval.steps={EVERY}"]
    batch = ["train.global_batch_size=4", "eval.batch_size=2", f"train.max_steps={STEPS}", "train.learning_rate=0.01"]
    result = run(inputs, output_dir, [*batch, *evaluation, "pp=2", *more], stop_at_look=stop_at_look)
    assert not any(result.errors), result.errors
    return result


@pytest.fixture(scope="module")
def whole(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return _run(inputs, tmp_path_factory.mktemp("whole") / "out")


def _lines(result: Result) -> list[tuple[int, float]]:
    return [(line["step"], line["eval_loss"]) for line in result.metrics("eval")]


# Rank 0 looks once a step and once an evaluation batch.
@pytest.mark.parametrize(
    ("look", "step"),
    [
        (EVERY, EVERY),  # in the step before a due evaluation
        (EVERY + EVAL_BATCHES, EVERY),  # before the last
        (STEPS + 2 * EVAL_BATCHES, STEPS),  # in the evaluation after the last step
    ],
)
def test_the_run_saves_without_evaluating_on_and_goes_on_as_if_nothing_had_been(
    inputs: Path, whole: Result, tmp_path: Path, look: int, step: int
) -> None:
    stopped = _run(inputs, tmp_path / "out", stop_at_look=look)
    assert [returned["stopped"] for returned in stopped.returned] == ["SIGTERM", "stop"]
    assert stopped.status().checkpoint == f"checkpoints/step-{step:08d}"
    assert [number for number, _ in _lines(stopped)] == list(range(EVERY, step, EVERY))
    assert not (stopped.output_dir / "export").exists()

    going_on = _run(inputs, tmp_path / "out", "resume=auto")
    assert going_on.returned == [{}, {}]
    assert _lines(going_on) == _lines(whole)
    losses = [[line["loss"] for line in result.metrics()] for result in (going_on, whole)]
    assert losses[0] == losses[1]


def test_a_stop_in_the_evaluation_that_was_made_up_for_leaves_it_owed(inputs: Path, tmp_path: Path) -> None:
    _run(inputs, tmp_path / "out", stop_at_look=EVERY)
    again = _run(inputs, tmp_path / "out", "resume=auto", stop_at_look=2)
    assert again.returned[0] == {"stopped": "SIGTERM"}
    assert _lines(again) == []
    assert [step for step, _ in _lines(_run(inputs, tmp_path / "out", "resume=auto"))] == [EVERY, STEPS]
