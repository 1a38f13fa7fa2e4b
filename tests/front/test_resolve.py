"""What `prepare` hands on is complete, resolves again to itself, and fits this machine's devices and folders."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import apply_overrides, load_yaml, set_key
from shardwise.errors import CheckpointError, ConfigError
from shardwise.front.resolve import prepare
from shardwise.launch import alive
from shardwise.launch.devices import choose_device, count_devices
from shardwise.launch.lock import release_all
from shardwise.launch.output import write_run
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, dump_run
from tests.checkpoint.fakes import fake_checkpoint
from tests.spec.model_folder import make_folder


@pytest.fixture(autouse=True)
def _plain_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without accelerators, whatever the tests run on."""
    for name in ("SHARDWISE_DEVICE", "SHARDWISE_MODELS_DIR", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(alive, "_DEV", tmp_path / "dev")
    monkeypatch.setattr(alive, "_NVIDIA", tmp_path / "nvidia")
    monkeypatch.setattr(alive.shutil, "which", lambda name: None)


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
    assert _prepare(tmp_path, "devices=8", "device=cpu", "tp=1")[1].devices == 8


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
    monkeypatch.setattr(alive.shutil, "which", lambda name: f"/bin/{name}")
    answer = subprocess.CompletedProcess([], 0, stdout="GPU 0: A (UUID: x)\nGPU 1: A (UUID: y)\n")
    monkeypatch.setattr(alive.subprocess, "run", lambda *args, **kwargs: answer)
    assert (choose_device("auto"), count_devices("cuda")) == ("cuda", 2)

    def fail(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(alive.subprocess, "run", fail)
    with pytest.raises(ConfigError, match="nvidia-smi does not answer"):
        count_devices("cuda")


def test_the_output_folder(tmp_path: Path) -> None:
    output = tmp_path / "out"
    _prepare(tmp_path)
    assert not output.exists()
    output.mkdir()
    (output / "status.json").touch()  # a run that was refused leaves no more than this
    _prepare(tmp_path)
    (output / "metrics.jsonl").touch()  # a step was about to be made
    with pytest.raises(ConfigError, match=r"is not empty.*resume=auto.*overwrite=true"):
        _prepare(tmp_path)
    _prepare(tmp_path, "resume=auto")
    _prepare(tmp_path, "overwrite=true")


def test_what_a_refused_run_leaves_is_no_result_and_a_run_yaml_of_the_user_is_one(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "run.yaml").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        _prepare(tmp_path)
    for name in ("status.json", "plan.json"):
        (output / name).touch()
    (output / "logs").mkdir()
    _prepare(tmp_path)


def test_overwrite_deletes_no_input(tmp_path: Path) -> None:
    export = make_folder(tmp_path / "out" / "export")
    (tmp_path / "out" / "plan.json").touch()
    with pytest.raises(ConfigError, match="overwrite would delete model"):
        _prepare(tmp_path, "overwrite=true", model=str(export))
    for name in ("chat_template.jinja", "rows.jsonl"):
        (export / name).touch()
    inputs = {"tokenizer": export, "chat_template": export / "chat_template.jinja", "data.eval": export / "rows.jsonl"}
    for key, path in inputs.items():
        with pytest.raises(ConfigError, match=f"overwrite would delete {key}"):
            _prepare(tmp_path, "overwrite=true", f"{key}={path}")
    beside = make_folder(tmp_path / "out" / "mine")
    assert _prepare(tmp_path, "overwrite=true", model=str(beside))[0].model == str(beside)
    text = "{% for m in messages %}" + "{{ m }}" * 2000 + "{% endfor %}"
    for template in (text, text.replace("%}{{", "%}\n{{")):
        _prepare(tmp_path, "overwrite=true", chat_template=template)


def test_overwrite_wants_to_see_that_the_folder_is_ours(tmp_path: Path) -> None:
    project = tmp_path / "out"
    (project / "export").mkdir(parents=True)
    (project / "logs").mkdir()
    (project / "logs" / "mine.log").touch()
    with pytest.raises(ConfigError, match=r"would delete export in it, and no run has left its status\.json"):
        _prepare(tmp_path, "overwrite=true")
    (project / "export").rmdir()
    run, plan = _prepare(tmp_path, "overwrite=true")  # nothing in it that would go
    try:
        write_run(run, plan)
    finally:
        release_all()
    assert {path.name for path in project.iterdir()} == {"logs", "run.yaml", "plan.json"}
    assert (project / "logs" / "mine.log").exists()


def test_what_a_killed_process_left_half_written_is_no_result_and_goes(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / ".0123.draft").write_text("ha")
    run, plan = _prepare(tmp_path)
    try:
        write_run(run, plan)
    finally:
        release_all()
    assert {path.name for path in folder.iterdir()} == {"run.yaml", "plan.json"}


def test_logs_alone_are_no_results(tmp_path: Path) -> None:
    """Another machine of the same job may have made them, before this one looks."""
    (tmp_path / "out" / "logs").mkdir(parents=True)
    _prepare(tmp_path)


def _checkpoint(folder: Path, step: int, **identity: str) -> Path:
    return fake_checkpoint(folder / "checkpoints", step, {"train": {"step": step}, "identity": identity})


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _, plan = _prepare(tmp_path)
    good = {"model": plan.model.hash, "optimizer": "adamw", "data": "d", "lora": "none"}
    output = tmp_path / "out"
    newest = _checkpoint(output, 5, **good)
    _prepare(tmp_path, "resume=auto")
    _prepare(tmp_path, f"resume={newest}")
    for override, message in (
        ("train.optimizer=sgd", "its optimizer is adamw, that of this run sgd"),
        ("use_lora=true", "its lora is none, that of this run r 8, alpha 16"),
    ):
        with pytest.raises(CheckpointError, match=message):
            _prepare(tmp_path, "resume=auto", override)
    other = make_folder(tmp_path / "other", num_hidden_layers=6)
    with pytest.raises(CheckpointError, match=rf"its model is {plan.model.hash}"):
        _prepare(tmp_path, "resume=auto", model=str(other))
    (newest / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"not a complete checkpoint: it has no \.metadata"):
        _prepare(tmp_path, f"resume={newest}")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole \(step-00000005: it has no \.metadata\)"):
        _prepare(tmp_path, "resume=auto")
    older = _checkpoint(output, 3, **good)
    with pytest.raises(CheckpointError, match=rf"Use resume={older}"):
        _prepare(tmp_path, f"resume={output}/checkpoints")
    (older / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"its state\.json has 1 bytes of \d+"):
        _prepare(tmp_path, f"resume={older}")
    with pytest.raises(CheckpointError, match=r"step-00000005: .*; step-00000003: its state\.json has 1 bytes"):
        _prepare(tmp_path, "resume=auto")


def test_a_checkpoint_with_adapters_wants_their_sizes(tmp_path: Path) -> None:
    _, plan = _prepare(tmp_path)
    lora = "r 8, alpha 16 on 28 modules and 0 whole (12345678)"
    _checkpoint(tmp_path / "out", 5, model=plan.model.hash, optimizer="adamw", data="d", lora=lora)
    _prepare(tmp_path, "resume=auto", "use_lora=true")
    with pytest.raises(CheckpointError, match=r"its lora is r 8.*that of this run r 4, alpha 16"):
        _prepare(tmp_path, "resume=auto", "lora.r=4")


def test_a_checkpoint_of_another_folder_needs_an_empty_output_folder(tmp_path: Path) -> None:
    _, plan = _prepare(tmp_path)
    good = {"model": plan.model.hash, "optimizer": "adamw", "data": "d"}
    elsewhere = _checkpoint(tmp_path / "first", 5, **good)
    _prepare(tmp_path, f"resume={elsewhere}")
    (tmp_path / "out" / "export").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is not empty, and resume = .* is of another run"):
        _prepare(tmp_path, f"resume={elsewhere}")
    _prepare(tmp_path, f"resume={_checkpoint(tmp_path / 'out', 2, **good)}")


PATH_KEYS = ["model", "tokenizer", "models_dir", "data.train", "data.eval", "resume", "output_dir"]


@pytest.mark.parametrize("key", PATH_KEYS)
@pytest.mark.parametrize("name", ["n" * 300, "a/" * 3000, "a\0b"], ids=["name", "path", "zero"])
def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path, key: str, name: str) -> None:
    tree: dict[str, Any] = {"data": {"train": str(tmp_path / "rows.jsonl")}}
    set_key(tree, key, name)
    with pytest.raises(ConfigError, match=rf"^{key} = '.*(too long for a path|zero byte)") as error:
        _prepare(tmp_path, **tree)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("command", [["generate", "NAME", "Why?"], ["export", "--merge", "NAME", "x"], ["run", "NAME"]])
def test_other_commands_refuse_it_too(command: list[str]) -> None:
    from typer.testing import CliRunner

    from shardwise import cli

    words = [word.replace("NAME", "n" * 300) for word in command]
    with pytest.raises(ConfigError, match=r"^(folder|source|script) = 'n+'\.\.\.: is too long for a path"):
        CliRunner().invoke(cli.app, words, catch_exceptions=False)


def test_a_folder_that_takes_no_file_is_refused_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = _prepare(tmp_path, "overwrite=true")
    output = tmp_path / "out"
    output.mkdir()
    (output / "plan.json").write_text("old")

    def full(self: Plan, path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Plan, "save", full)
    try:
        with pytest.raises(ConfigError, match=r"cannot be written to \(No space left on device\)"):
            write_run(run, plan)
    finally:
        release_all()
    assert [(path.name, path.read_text()) for path in output.iterdir()] == [("plan.json", "old")]


def test_a_number_of_processes_that_no_machine_starts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"devices = 1000000000000: .*4096 is the most"):
        _prepare(tmp_path, "dp_shard=1000000000000")


def test_other_commands_need_no_data_and_no_output_folder(tmp_path: Path) -> None:
    tree = {"model": str(make_folder(tmp_path / "tiny")), "output_dir": str(tmp_path)}
    assert prepare(tree, command="plan")[1].devices == 1
    with pytest.raises(ConfigError, match=r"data\.train: missing"):
        prepare(tree)
