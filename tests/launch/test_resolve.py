"""What `prepare` hands on is complete, resolves again to itself, and fits this machine's devices and folders."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import apply_overrides, load_yaml
from shardwise.errors import ConfigError
from shardwise.launch import resolve as module
from shardwise.launch.resolve import choose_device, count_devices, prepare
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, dump_run
from tests.spec.model_folder import make_folder


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without accelerators, whatever the tests run on."""
    for name in ("SHARDWISE_DEVICE", "SHARDWISE_MODELS_DIR", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(module, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)


def _prepare(root: Path, *overrides: str, **tree: Any) -> tuple[RunConfig, Plan]:
    make_folder(root / "models" / "tiny")
    (root / "rows.jsonl").write_text("{}\n", encoding="utf-8")
    base = {"model": str(root / "models" / "tiny"), "data": {"train": str(root / "rows.jsonl")}}
    return prepare(apply_overrides(base | {"output_dir": str(root / "out")} | tree, overrides))


def _npus(root: Path, count: int) -> None:
    (root / "dev").mkdir()
    for name in (*(f"davinci{index}" for index in range(count)), "davinci_manager"):
        (root / "dev" / name).touch()


def _gpus(root: Path, count: int) -> None:
    for index in range(count):
        (root / "nvidia" / "gpus" / str(index)).mkdir(parents=True)


def test_every_default_is_filled_in(tmp_path: Path) -> None:
    run, plan = _prepare(tmp_path, "dp=3", "pp=2")
    assert (run.devices, run.device, plan.devices, plan.device_type) == (6, "cpu", 6, "cpu")
    assert (run.train.global_batch_size, plan.global_batch_size) == (9, 9)
    assert (run.train.epochs, run.train.precision, run.data.seed) == (3, "fp32", 42)
    strategy = run.strategy
    assert (strategy.pp, strategy.dp_replicate, strategy.dp_shard, strategy.tp) == (2, 1, 3, 1)
    assert (strategy.stages, strategy.micro_batch_size, strategy.reshard) == ((2, 2), 1, False)
    assert plan.strategy.stages == (2, 2)
    assert plan.model.num_blocks == 4


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["dp=3", "pp=2"],
        ["tp=2", "stages=[1, 3]", "recompute=full"],
        ["train.max_steps=4", "data.seed=7", "train.optimizer=sgd", "train.momentum=0.9"],
        ["micro_batch_size=2", "train.gradient_accumulation_steps=3", "dp_replicate=2", "dp_shard=2"],
        ["dp=4", "dp_replicate=2", "save.strategy=steps", "save.steps=2", "resume=auto"],
    ],
)
def test_a_resolved_run_reads_back_equal_and_resolves_to_itself(tmp_path: Path, overrides: list[str]) -> None:
    run, plan = _prepare(tmp_path, *overrides)
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(run), encoding="utf-8")
    again, same_plan = prepare(load_yaml(path))
    assert again == run
    assert same_plan == plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_max_steps_leaves_epochs_open(tmp_path: Path) -> None:
    run, _ = _prepare(tmp_path, "train.max_steps=4")
    assert run.train.epochs is None
    assert run.train.max_steps == 4


def test_models_dir_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_MODELS_DIR", str(tmp_path / "models"))
    run, _ = _prepare(tmp_path, model="hub/tiny")
    assert run.model == str(tmp_path / "models" / "tiny")


def test_random_weights_need_no_weight_file(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "bare", weights=None)
    assert not _prepare(tmp_path, "model_init=random", model=str(folder))[1].model.has_weights
    with pytest.raises(ConfigError, match="model_init=random"):
        _prepare(tmp_path, model=str(folder))


def test_auto_takes_what_the_machine_has(tmp_path: Path) -> None:
    assert choose_device("auto") == "cpu"
    _npus(tmp_path, 2)
    assert choose_device("auto") == "npu"
    _gpus(tmp_path, 4)
    assert choose_device("auto") == "cuda"
    assert (count_devices("npu"), count_devices("cuda"), count_devices("cpu")) == (2, 4, 1)


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_an_absent_device_is_refused_with_the_override(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=rf"device = '{device}'.*device=cpu or SHARDWISE_DEVICE=cpu"):
        _prepare(tmp_path, f"device={device}")


def test_the_environment_overrides_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    assert _prepare(tmp_path, "device=npu")[0].device == "cpu"
    monkeypatch.setenv("SHARDWISE_DEVICE", "gpu")
    with pytest.raises(ConfigError, match="device = 'gpu'"):
        _prepare(tmp_path)


def test_all_local_devices_are_used_and_no_more(tmp_path: Path) -> None:
    _gpus(tmp_path, 4)
    run, plan = _prepare(tmp_path, "tp=2")
    assert run.train.precision == "bf16"
    assert _prepare(tmp_path, "tp=2", "train.precision=fp32")[0].train.precision == "fp32"
    assert (plan.devices, plan.strategy.tp, plan.strategy.dp_shard, plan.device_type) == (4, 2, 2, "cuda")
    with pytest.raises(ConfigError, match=r"devices = 8.*4 cuda devices.*devices=4"):
        _prepare(tmp_path, "devices=8")
    assert _prepare(tmp_path, "devices=8", "device=cpu")[1].devices == 8


def test_visible_devices_limit_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _gpus(tmp_path, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 2")
    assert count_devices("cuda") == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_devices("cuda") == 0
    assert _prepare(tmp_path)[1].device_type == "cpu"
    with pytest.raises(ConfigError, match=r"device = 'cuda'.*CUDA_VISIBLE_DEVICES"):
        _prepare(tmp_path, "device=cuda")


def test_gpus_are_counted_by_the_tool_where_the_driver_lists_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout="GPU 0: A (UUID: x)\nGPU 1: A (UUID: y)\n")
    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: answer)
    assert (choose_device("auto"), count_devices("cuda")) == ("cuda", 2)

    def fail(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(module.subprocess, "run", fail)
    with pytest.raises(ConfigError, match="nvidia-smi does not answer"):
        count_devices("cuda")


def test_the_output_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _prepare(tmp_path)
    assert not output.exists()
    output.mkdir()
    (output / "status.json").touch()  # a run that was refused leaves no more than this
    _prepare(tmp_path)
    (output / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=r"is not empty.*resume=auto.*overwrite=true"):
        _prepare(tmp_path)
    _prepare(tmp_path, "resume=auto")
    _prepare(tmp_path, "overwrite=true")
    (output / "checkpoints").mkdir()
    _prepare(tmp_path, f"resume={output}/checkpoints")


def test_overwrite_deletes_no_input(tmp_path: Path) -> None:
    export = make_folder(tmp_path / "out" / "export")
    with pytest.raises(ConfigError, match="overwrite would delete model"):
        _prepare(tmp_path, "overwrite=true", model=str(export))
    beside = make_folder(tmp_path / "out" / "mine")
    assert _prepare(tmp_path, "overwrite=true", model=str(beside))[0].model == str(beside)


def test_other_commands_need_no_data_and_no_output_folder(tmp_path: Path) -> None:
    tree = {"model": str(make_folder(tmp_path / "tiny")), "output_dir": str(tmp_path)}
    assert prepare(tree, command="plan")[1].devices == 1
    with pytest.raises(ConfigError, match=r"data\.train: missing"):
        prepare(tree)
