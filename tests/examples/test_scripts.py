"""The example scripts, run as their first lines say, with a small model of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.jobs import Job, command
from tests.llama2 import make_llama2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SECONDS = 800.0  # eight processes on two busy cores


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_llama2(folder / "llama2-7b-chat")
    return folder


def metrics(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.output_dir / "metrics.jsonl").read_text().splitlines()]


def test_the_script_in_mindspore_style_trains_on_eight_processes_in_four_stages(models: Path, tmp_path: Path) -> None:
    run = ("-m", "shardwise.cli", "run", "--device", "cpu", "--models-dir", str(models))
    output = ("--output-dir", str(tmp_path / "out"))
    with command(tmp_path / "out", *run, *output, str(EXAMPLES / "mindspore_style.py")) as job:
        assert job.wait(SECONDS) == 0, job.stderr
    lines = metrics(job)
    assert [(line["kind"], line["step"], line["num_rows"]) for line in lines] == [("train", 1, 4), ("train", 2, 4)]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert job.stdout == f"rank 0 of 8 is here\nfinal loss {lines[1]['loss']:.4f}\n"
    shown = job.stderr.splitlines()
    assert len([line for line in shown if line.startswith("step ")]) == 2
    assert any("blocks run eagerly" in line for line in shown)
    assert any("device_target='Ascend'): the device is cpu" in line for line in shown)
    assert any(line.startswith("strategy") and "pp 4 x dp_shard 2" in line for line in shown)
    assert any(line.startswith("filled") and "dp_shard 2" in line and "tp 1" in line for line in shown)
    assert any("4 rows are fewer than the global batch of 16" in line for line in shown)
    assert any("no chat template" in line for line in shown)
    names = [path.name for path in sorted((job.output_dir / "checkpoints").glob("step-*"))]
    assert names == ["step-00000001", "step-00000002"]
    for name in names:
        assert (job.output_dir / "checkpoints" / name / "adapter" / "adapter_model.safetensors").is_file()
    assert (job.output_dir / "export" / "adapter_config.json").is_file()
    plan = json.loads((job.output_dir / "plan.json").read_text())
    assert (plan["devices"], plan["strategy"]["pp"], plan["strategy"]["dp_shard"]) == (8, 4, 2)
    assert (plan["global_batch_size"], plan["strategy"]["micro_batch_size"]) == (16, 2)
    assert job.status()["state"] == "done"
    assert len(list((job.output_dir / "logs").glob("rank-*.log"))) == 8


def test_the_script_in_hugging_face_style_trains_evaluates_and_exports(models: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "completion": f"It is {n + 1}."} for n in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(models / "llama2-7b-chat"), str(tmp_path / "rows.jsonl"), "--max-steps", "2"]
    output = ("--output-dir", str(tmp_path / "out"))
    script = str(EXAMPLES / "train.py")
    with command(tmp_path / "out", script, *arguments, *output, SHARDWISE_DEVICE="cpu") as job:
        assert job.wait(SECONDS) == 0, job.stderr
    *lines, evaluation = metrics(job)
    assert [(line["kind"], line["step"], line["num_rows"]) for line in lines] == [("train", 1, 8), ("train", 2, 8)]
    assert (evaluation["kind"], evaluation["step"]) == ("eval", 2)
    told = f"final loss {lines[-1]['loss']}, loss on held-out rows {evaluation['eval_loss']:.4f}\n"
    assert job.stdout == told
    assert {path.name for path in (job.output_dir / "export").iterdir()} >= {"config.json", "tokenizer.json"}
