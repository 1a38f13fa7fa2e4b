"""A launcher that died takes its machine's workers along; another in its place joins what follows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import make_model, make_rows
from tests.launch.jobs import command, free_endpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 9
SLOW = """
class Slow(shardwise.Callback):
    def on_step_end(self, step, metrics):
        time.sleep(0.3)
"""


def test_a_launcher_in_the_place_of_one_that_died_goes_on_with_the_job(tmp_path: Path) -> None:
    model, data, out = make_model(tmp_path / "model", "llama"), tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import time, shardwise
{SLOW}
arguments = shardwise.TrainingArguments(
    output_dir={str(out)!r}, global_batch_size=4, max_steps={STEPS}, use_cpu=True, save_strategy="steps", save_steps=1,
    restarts=1)
shardwise.Trainer({str(model)!r}, arguments, train_dataset={str(data)!r}, strategy=dict(dp_shard=4),
                  callbacks=[Slow()]).train()
"""
    )
    endpoint = free_endpoint()

    def start(rank: int) -> Any:
        places = ("nnodes=2", f"node_rank={rank}", f"rdzv_endpoint={endpoint}")
        settings = [part for place in places for part in ("--set", place)]
        return command(out, "-m", "shardwise.cli", "run", "--devices", "4", *settings, str(script))

    with start(0) as first:
        with start(1) as second:
            while not (out / "checkpoints" / "LATEST").exists():
                assert first.process.poll() is None, first.stderr
                time.sleep(0.05)
            second.process.kill()
        with start(1) as other:
            assert other.wait() == 0, other.stderr
            assert first.wait() == 0, first.stderr
    assert "machine 1 of this job was here before" in other.stderr
    for job in (first, other):
        assert "; restart 1 of 1" in job.stderr
    status = first.status()
    assert (status["state"], status["step"], status["restarts"]) == ("done", STEPS, 1)
    assert status["first_step"] > 0, "it went on, and did not begin anew"
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
