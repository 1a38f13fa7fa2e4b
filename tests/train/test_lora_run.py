"""Whole runs of ``shardwise train`` with adapters: what they say, what they leave, what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.models.generate import generate
from shardwise.spec import tolerance
from tests.fixtures import make_model, make_rows
from tests.launch.jobs import Job, command
from tests.test_docs import add_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, its tokenizer and eight rows."""
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    add_tokenizer(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return folder


def _run(inputs: Path, output_dir: Path, code: int, *words: str, **keys: Any) -> Job:
    run = {"model": str(inputs / "model"), "data": {"train": str(inputs / "rows.jsonl")}, "device": "cpu"}
    config = output_dir.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(run | {"output_dir": str(output_dir)} | keys))
    with command(output_dir, "-m", "shardwise.cli", "train", str(config), *words) as job:
        assert job.wait() == code, job.stderr
    return job


def _losses(job: Job) -> list[float]:
    return [json.loads(line)["loss"] for line in (job.output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def job(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    output = tmp_path_factory.mktemp("run") / "out"
    train = {"epochs": 2, "global_batch_size": 4, "learning_rate": 1e-2}
    return _run(inputs, output, 0, "tp=2", "pp=2", "save.strategy=epoch", train=train, lora={"r": 4, "dropout": 0.1})


def test_the_header_says_what_trains(job: Job) -> None:
    (line,) = (line for line in job.stderr.splitlines() if line.startswith("LoRA"))
    assert "rank 4, alpha 16, 28 modules (q_proj" in line
    assert "7,424 of 46,880 parameters train (15.84 %)" in line
    assert job.stdout == f"{job.output_dir / 'export'}\n"
    assert "Traceback" not in job.stderr


def test_each_epoch_leaves_an_adapter_checkpoint_that_plain_peft_reads(job: Job, inputs: Path) -> None:
    names = ["step-00000002", "step-00000004"]
    assert sorted(path.name for path in (job.output_dir / "checkpoints").glob("step-*")) == names
    ids = torch.tensor([make_rows()[-1]["input_ids"]])
    seen = []
    with torch.no_grad():
        for folder in [
            *(job.output_dir / "checkpoints" / name / "adapter" for name in names),
            job.output_dir / "export",
        ]:
            base = AutoModelForCausalLM.from_pretrained(inputs / "model")
            seen.append(PeftModel.from_pretrained(base, folder).eval()(ids).logits)
    assert torch.equal(seen[1], seen[2])
    assert (seen[0] - seen[1]).norm() / seen[1].norm() > 100 * tolerance.EXPORT_LOGITS
    assert not list((job.output_dir / "export").glob("model*.safetensors"))


def test_a_resume_repeats_the_uninterrupted_run_dropout_included(job: Job, inputs: Path, tmp_path: Path) -> None:
    first = job.output_dir / "checkpoints" / "step-00000002"
    keys = yaml.safe_load((job.output_dir / "run.yaml").read_text())
    train, lora, strategy = keys["train"], keys["lora"], keys["strategy"]
    again = _run(inputs, tmp_path / "out", 0, f"resume={first}", train=train, lora=lora, strategy=strategy)
    assert _losses(again) == _losses(job)[2:]
    saved = [load_file(j.output_dir / "export" / "adapter_model.safetensors") for j in (job, again)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    other = _run(
        inputs, tmp_path / "other", 2, f"resume={first}", "lora.alpha=8", train=train, lora=lora, strategy=strategy
    )
    assert "alpha 16" in other.stderr
    assert "alpha 8" in other.stderr


def test_an_adapter_answers_and_merges(job: Job, tmp_path: Path) -> None:
    answers = generate(job.output_dir / "export", ["Why is a model split"], 4)
    words = shlex.split(f"-m shardwise.cli export --merge '{job.output_dir}' '{tmp_path / 'merged'}'")
    with command(tmp_path / "job", *words) as merging:
        assert merging.wait() == 0, merging.stderr
    assert "largest difference of logits" in merging.stderr
    assert generate(tmp_path / "merged", ["Why is a model split"], 4) == answers


def test_targets_that_match_nothing_are_refused_with_the_real_names(inputs: Path, tmp_path: Path) -> None:
    job = _run(inputs, tmp_path / "out", 2, "tp=2", lora={"target_modules": ["q_proj", "qkv_proj"]})
    assert "lora.target_modules = 'qkv_proj': matches no module of the model" in job.stderr
    assert "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj" in job.stderr
    assert "Traceback" not in job.stderr
    assert job.stderr.count("matches no module") == 1
    assert job.status()["state"] == "refused"
