"""Whole runs of ``shardwise train`` on two processes: what they leave behind, how they stop and go on."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.front.compiler import missing_for_compiling
from shardwise.spec.run import TrainConfig
from shardwise.spec.tolerance import BF16_LOSS, EXPORT_LOGITS, FP32_LOSS
from shardwise.train.compiler_cache import compiler_folder
from tests.fixtures import make_model, make_rows
from tests.launch.jobs import Job, command
from tests.parallel.harness import SGD, Case, reference, strategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN_KEYS = {
    *("kind", "step", "epoch", "loss", "grad_norm", "lr", "num_tokens", "num_input_tokens", "num_rows"),
    *("step_seconds", "tokens_per_second", "mfu", "tflops_per_device", "peak_memory_bytes"),
}
STEPS = 6
LONG_STEPS = 120  # some 3 s on two quiet cores: the signal must come in time


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and eight rows."""
    folder = tmp_path_factory.mktemp("inputs")
    make_model(folder / "model", "llama")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    return folder


def _configure(inputs: Path, output_dir: Path, train: dict[str, Any], **more: Any) -> Path:
    data = {"train": str(inputs / "rows.jsonl")} | more.pop("data", {})
    run = {"model": str(inputs / "model"), "data": data, "train": train, "strategy": {"pp": 2}, "device": "cpu"}
    path = output_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(run | {"output_dir": str(output_dir)} | more))
    return path


@contextmanager
def _shardwise(config: Path, *overrides: str) -> Iterator[Job]:
    with command(config.with_suffix(""), "-m", "shardwise.cli", "train", str(config), *overrides) as job:
        yield job


def _metrics(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def short(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A finished run of six steps, with evaluation, by plain SGD."""
    train = {"global_batch_size": 4, "max_steps": STEPS, "optimizer": "sgd", "learning_rate": SGD.learning_rate}
    evaluation = {"strategy": "steps", "steps": 3}
    data = {"shuffle": False, "eval": str(inputs / "rows.jsonl")}
    config = _configure(inputs, tmp_path_factory.mktemp("short") / "out", train, data=data, eval=evaluation)
    with _shardwise(config) as job:
        assert job.wait() == 0, job.stderr
    return job


def test_a_run_leaves_what_the_contract_says(short: Job) -> None:
    lines = _metrics(short.output_dir)
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert all(set(line) == TRAIN_KEYS for line in steps)
    assert [line["num_rows"] for line in steps] == [4] * STEPS
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6]
    assert all({"eval_loss", "eval_tokens"} <= set(line) for line in lines if line["kind"] == "eval")
    nothing = {"rank": None, "error": None, "checkpoint": None, "reason": None, "ended_at": None, "first_step": 0}
    nothing |= {"restarts": 0, "restart_seconds": None, "prediction": None}
    assert short.status() == {"state": "done", "exit_code": 0, "step": STEPS} | nothing
    names = {"run.yaml", "plan.json", "metrics.jsonl", "status.json", "report.html", "logs", "export"}
    assert {path.name for path in short.output_dir.iterdir()} == names
    assert short.stdout == f"{short.output_dir / 'export'}\n"
    assert "Traceback" not in short.stderr


def test_loss_and_export_are_those_of_plain_transformers(short: Job, inputs: Path) -> None:
    rows = tuple(make_rows())
    case = Case(inputs / "model", strategy(), rows, global_batch_size=4, steps=STEPS)
    expected = reference(case)
    losses = [line["loss"] for line in _metrics(short.output_dir) if line["kind"] == "train"]
    assert losses == pytest.approx(expected.losses, rel=FP32_LOSS)
    exported = AutoModelForCausalLM.from_pretrained(short.output_dir / "export")
    plain = AutoModelForCausalLM.from_pretrained(inputs / "model")
    ids = torch.tensor([rows[-1]["input_ids"]])
    with torch.no_grad():
        before = plain(ids).logits
        plain.load_state_dict(expected.weights)
        after = plain(ids).logits
        difference = (exported(ids).logits - after).norm() / after.norm()
    assert difference < EXPORT_LOGITS
    assert (before - after).norm() / after.norm() > 1000 * EXPORT_LOGITS, "the run has changed next to nothing"


def test_a_job_of_torchrun_makes_the_same_run(short: Job, tmp_path: Path) -> None:
    output_dir = tmp_path / "out"
    output_dir.mkdir()
    for name in ("run.yaml", "plan.json"):  # as they are: the folder that is named counts, not the key output_dir
        (output_dir / name).write_bytes((short.output_dir / name).read_bytes())
    before = (short.output_dir / "metrics.jsonl").read_bytes()
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
    where = ("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1")
    with command(output_dir, *torchrun, *where, "-m", "shardwise.launch.worker", str(output_dir)) as job:
        assert job.wait() == 0, job.stderr
    assert job.status() == short.status()
    assert (short.output_dir / "metrics.jsonl").read_bytes() == before
    assert _weights(output_dir) == _weights(short.output_dir)


def test_a_loss_that_is_no_number_fails_the_job_by_step_and_rows(inputs: Path, tmp_path: Path) -> None:
    train = {"global_batch_size": 4, "max_steps": 9, "optimizer": "sgd", "learning_rate": 1e30, "max_grad_norm": None}
    with _shardwise(_configure(inputs, tmp_path / "out", train, data={"shuffle": False})) as job:
        assert job.wait() == 3
    status = job.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 3, 1)
    assert "NonFiniteLossError: step 2: loss " in status["error"]
    assert "rows of lines 5-8" in status["error"]
    assert status["error"] in job.stderr
    assert "Traceback" not in job.stderr


def test_early_stopping_is_a_regular_end_and_says_why(inputs: Path, tmp_path: Path) -> None:
    train = {"global_batch_size": 4, "max_steps": 9, "learning_rate": 0.0, "early_stopping_patience": 2}
    evaluation = {"strategy": "steps", "steps": 1}
    config = _configure(inputs, tmp_path / "out", train, data={"eval": str(inputs / "rows.jsonl")}, eval=evaluation)
    with _shardwise(config) as job:
        assert job.wait() == 0, job.stderr
    status = job.status()
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 3)
    assert status["reason"].startswith("early stopping: 2 evaluations in a row")
    assert f"ended: {status['reason']}" in job.stderr
    assert job.stdout == f"{job.output_dir / 'export'}\n"


def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(inputs: Path, tmp_path: Path) -> None:
    train = {"global_batch_size": 3, "max_steps": LONG_STEPS, "learning_rate": 1e-4}
    whole, stopped = (_configure(inputs, tmp_path / name, train) for name in ("whole", "stopped"))
    with _shardwise(whole) as reference_job:
        assert reference_job.wait() == 0, reference_job.stderr

    metrics = tmp_path / "stopped" / "metrics.jsonl"
    with _shardwise(stopped) as job:
        job.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 5)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143, job.stderr
    status = job.status()
    step = status["step"]
    assert 5 <= step < LONG_STEPS
    assert (status["state"], status["exit_code"]) == ("stopped", 143)
    assert status["checkpoint"] == f"checkpoints/step-{step:08d}"
    assert (job.output_dir / status["checkpoint"]).is_dir()
    assert not (job.output_dir / "export").exists()

    with _shardwise(stopped, "resume=auto") as job:
        assert job.wait() == 0, job.stderr
    assert f"after step {step}" in job.stderr
    assert (job.status()["state"], job.status()["step"]) == ("done", LONG_STEPS)
    lines, expected = _metrics(job.output_dir), _metrics(reference_job.output_dir)
    assert [line["step"] for line in lines] == list(range(1, LONG_STEPS + 1))
    same = ("epoch", "loss", "grad_norm", "lr", "num_tokens", "num_rows")
    assert [[line[key] for key in same] for line in lines] == [[line[key] for key in same] for line in expected]
    assert _weights(job.output_dir) == _weights(reference_job.output_dir)


def test_64_a_bf16_run_exports_the_dtype_of_its_input(inputs: Path, tmp_path: Path) -> None:
    """TorchSpec PR 39, AReaL PR 1369: neither masters in the export, nor a config that says something else."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.bfloat16).save_pretrained(folder)
    train = {"global_batch_size": 4, "max_steps": STEPS, "precision": "bf16"}
    config = _configure(inputs, tmp_path / "out", train, data={"shuffle": False}, model=str(folder))
    with _shardwise(config) as job:
        assert job.wait() == 0, job.stderr
    before, after = folder / "model.safetensors", job.output_dir / "export" / "model.safetensors"
    assert {tensor.dtype for tensor in load_file(after).values()} == {torch.bfloat16}
    assert json.loads((after.parent / "config.json").read_text())["dtype"] == "bfloat16"
    assert after.stat().st_size == pytest.approx(before.stat().st_size, rel=0.01)
    assert "bf16 with fp32 masters" in job.stderr
    rows = tuple(make_rows())
    adamw = TrainConfig(optimizer="adamw", learning_rate=5e-5)
    want = reference(Case(folder, strategy(), rows, 4, STEPS, adamw, torch.bfloat16))
    losses = [line["loss"] for line in _metrics(job.output_dir) if line["kind"] == "train"]
    assert losses == pytest.approx(want.losses, rel=BF16_LOSS)


def test_64_random_weights_are_exported_as_config_json_says(inputs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((inputs / "model" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    train = {"global_batch_size": 4, "max_steps": 1}
    path = _configure(inputs, tmp_path / "out", train, model=str(folder), model_init="random")
    with _shardwise(path) as job:
        assert job.wait() == 0, job.stderr
    exported = load_file(job.output_dir / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}


@pytest.mark.skipif(missing_for_compiling("cpu") != "", reason="no compiler on this machine")
def test_compilation_is_reported_apart_from_the_steps(inputs: Path, tmp_path: Path) -> None:
    train = {"global_batch_size": 4, "max_steps": 3, "compile": True, "optimizer": "sgd", "learning_rate": 0.05}
    data = {"shuffle": False, "eval": str(inputs / "rows.jsonl")}
    more = {"strategy": {"pp": 1}, "eval": {"strategy": "steps", "steps": 1}}  # evaluation compiles too
    with _shardwise(_configure(inputs, tmp_path / "out", train, data=data, **more)) as job:
        assert job.wait(500) == 0, job.stderr
    lines = [line for line in _metrics(job.output_dir) if line["kind"] == "train"]
    assert 1.0 < lines[0]["compile_seconds"] < lines[0]["step_seconds"]
    running = lines[0]["step_seconds"] - lines[0]["compile_seconds"]
    assert lines[0]["tokens_per_second"] == pytest.approx(lines[0]["num_input_tokens"] / running)
    assert all("compile_seconds" not in line for line in lines[1:])
    assert "went into compiling blocks" in job.stderr
    assert not compiler_folder(job.output_dir).exists()
    assert "compiled blocks" in job.stderr
    case = Case(inputs / "model", strategy(), tuple(make_rows()), 4, 3)
    assert [line["loss"] for line in lines] == pytest.approx(reference(case).losses, rel=FP32_LOSS)


def _weights(output_dir: Path) -> dict[str, list[Any]]:
    """The exported weights as lists: equal lists are equal bits (but for the sign of zero)."""
    tensors: dict[str, torch.Tensor] = {}
    for path in (output_dir / "export").glob("*.safetensors"):
        tensors |= load_file(path)
    assert tensors
    return {name: tensor.tolist() for name, tensor in tensors.items()}
