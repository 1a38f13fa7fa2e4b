"""Data sets of the library ``datasets`` through the Trainer, and stand-ins with its protocol where it is absent."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from shardwise.spec.tolerance import FP32_LOSS
from tests.fixtures import make_model, make_rows
from tests.launch.test_scripts import STEPS, TRAIN, losses, script
from tests.long import EVERYTHING
from tests.parallel.harness import Case, reference, strategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# A map-style one has a length and gives a row by its number and a column by its name; a streamed one is only iterable.
STAND_IN = """
import numpy as np
class Dataset:
    def __init__(self, rows):
        self._rows = rows
    def __len__(self):
        return len(self._rows)
    def __getitem__(self, key):
        return [row[key] for row in self._rows] if isinstance(key, str) else self._rows[key]
    def __iter__(self):
        return iter(self._rows)
    def with_format(self, kind):
        return Dataset([{key: np.array(value) for key, value in row.items()} for row in self._rows])
class Stream:
    def __init__(self, rows):
        self._rows = rows
    def __iter__(self):
        yield from self._rows
table, stream = Dataset(rows), Stream(rows)
"""
LIBRARY = """
from datasets import Dataset
table = Dataset.from_list(rows)
stream = table.to_iterable_dataset()
assert not hasattr(stream, "__len__")
"""
KINDS = [
    pytest.param(STAND_IN, id="stand-in"),
    pytest.param(
        LIBRARY,
        id="datasets",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("datasets") is None, reason="the library datasets is not installed"
        ),
    ),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("train", ["stream", "table.with_format('numpy')", *(["table"] if EVERYTHING else [])])
def test_the_losses_are_those_of_the_same_rows_in_one_process(
    inputs: Path, tmp_path: Path, kind: str, train: str
) -> None:
    given = TRAIN.replace("train_dataset=rows, eval_dataset=rows", f"train_dataset={train}, eval_dataset=stream")
    with script(inputs, tmp_path, kind + given) as job:
        assert job.wait() == 0, job.stderr
    case = Case(inputs / "model", strategy(), tuple(make_rows()), global_batch_size=4, steps=STEPS)
    assert losses(job.output_dir) == pytest.approx(reference(case).losses, rel=FP32_LOSS)
    evaluation = json.loads((job.output_dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert evaluation["kind"] == "eval"
