"""``shardwise export`` from a checkpoint: the same bytes as the run's own export, by one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import CheckpointError, ConfigError
from shardwise.front.exporting import write_export
from shardwise.testing import run_distributed
from shardwise.train import exporting
from shardwise.train.exporting import export_checkpoint, find_checkpoint
from shardwise.train.memory import MemoryMeter
from tests.checkpoint.commands import save_weights
from tests.checkpoint.fakes import fake_checkpoint
from tests.fixtures import make_model
from tests.parallel.families import make_family
from tests.train.runs import make_inputs, run

MIB = 2**20


def _export(source: Path, out: Path, **options: object) -> object:
    defaults = {"merge": False, "base": None, "verify": False, "max_shard_size": None}
    return write_export(source, out, **(defaults | options))  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_is_what_the_run_itself_exports(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path, "llama-tied")
    saving = ["save.strategy=steps", "save.steps=2", "train.max_steps=2", "train.learning_rate=0.01"]
    result = run(inputs, tmp_path / "run", ["tp=2", "pp=2", *saving])
    assert set(result.errors) == {""}
    comparison = _export(result.output_dir, tmp_path / "out", verify=True)
    assert comparison.agrees  # type: ignore[attr-defined]
    exported = {path.name: path.read_bytes() for path in (result.output_dir / "export").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == exported
    with pytest.raises(ConfigError, match="is not empty"):
        _export(result.output_dir, tmp_path / "out")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a checkpoint of it with other weights."""
    folder = tmp_path_factory.mktemp("saved")
    make_model(folder / "model", "llama")
    run_distributed(save_weights, 1, folder / "model", folder / "checkpoints", {})
    return folder


def test_files_of_another_size(saved: Path, tmp_path: Path) -> None:
    _export(saved, tmp_path / "out", max_shard_size="20kB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert all((tmp_path / "out" / file).stat().st_size < 20_000 + 4_000 for file in files)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = load_file(saved / "model" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], value * 1.25) for name, value in before.items())
    with pytest.raises(ConfigError, match=r"\w+.weight alone has 16896 bytes. Use 1MB at least"):
        _export(saved, tmp_path / "other", max_shard_size="10kB")
    assert not list(tmp_path.glob("*other*"))


def _peak_of_export(rank: int, checkpoint: Path, out: Path, batch_bytes: int) -> int:
    """In a process that holds no memory of other tests, which would be taken again without a trace."""
    exporting._BATCH_BYTES = batch_bytes
    meter = MemoryMeter(torch.device("cpu"))
    export_checkpoint(checkpoint, out, 16 * MIB)
    peak = meter.peak_bytes()
    meter.close()
    return peak


@pytest.mark.slow
def test_an_export_needs_the_memory_of_a_shard_and_no_more(tmp_path: Path) -> None:
    """A model of 48 MiB in files of 16 MiB, its largest tensor 3 MiB; one that holds all of it would be found."""
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    make_model(tmp_path / "model", "llama", **sizes)
    run_distributed(save_weights, 1, tmp_path / "model", tmp_path / "checkpoints", {})
    checkpoint = find_checkpoint(tmp_path)
    (peak,) = run_distributed(_peak_of_export, 1, checkpoint, tmp_path / "out", 8 * MIB)
    files = list((tmp_path / "out").glob("model-*.safetensors"))
    assert sum(path.stat().st_size for path in files) > 46 * MIB
    (at_once,) = run_distributed(_peak_of_export, 1, checkpoint, tmp_path / "at-once", 2**30)
    assert peak < 28 * MIB
    assert at_once > 42 * MIB


def test_a_difference_is_found(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(checkpoint: Path, out: Path, max_file_bytes: int | None = None) -> None:
        export_checkpoint(checkpoint, out, max_file_bytes)
        weights = load_file(out / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 0.5
        save_file(weights, out / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr("shardwise.train.exporting.export_checkpoint", spoil)
    result = CliRunner().invoke(cli.app, ["export", str(saved), str(tmp_path / "out"), "--verify"])
    assert result.exit_code == 4


def test_names_and_shapes_of_files_are_those_of_the_family(tmp_path: Path) -> None:
    """Experts lie one by one in the files and stacked in the module."""
    make_family(tmp_path / "model", "qwen3_moe")
    run_distributed(save_weights, 1, tmp_path / "model", tmp_path / "checkpoints", {})
    comparison = _export(tmp_path / "checkpoints" / "step-00000003", tmp_path / "out", verify=True)
    assert comparison.agrees  # type: ignore[attr-defined]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value * 1.25) for name, value in before.items())


def test_of_a_lora_run_the_adapter_is_written(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama")
    run_distributed(save_weights, 1, tmp_path / "model", tmp_path / "checkpoints", {"lora": {"r": 8}})
    checkpoint = find_checkpoint(tmp_path)
    (checkpoint / "adapter").mkdir()
    (checkpoint / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds an adapter"):
        _export(tmp_path, tmp_path / "out", verify=True)
    _export(tmp_path, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["adapter_config.json"]


def test_the_checkpoint_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older, newer = (fake_checkpoint(tmp_path / "checkpoints", step, {}) for step in (3, 6))
    (newer / "state.json").unlink()
    assert find_checkpoint(tmp_path) == find_checkpoint(tmp_path / "checkpoints") == older
    note = f"passed over {newer.name}: it has no state.json\nexporting {older}\n"
    assert capsys.readouterr().err == 2 * note
    assert find_checkpoint(older) == older
    with pytest.raises(CheckpointError, match=r"step-00000006: not a complete checkpoint: it has no state\.json"):
        find_checkpoint(newer)


def test_one_without_a_list_of_its_files_is_taken_where_it_is_named(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As ``resume=PATH`` takes it, and with the same comparison of sizes."""
    copy = tmp_path / "checkpoints" / "step-00000003"
    shutil.copytree(saved / "checkpoints" / copy.name, copy)
    (copy / "files.json").unlink()
    assert find_checkpoint(copy) == copy
    _export(copy, tmp_path / "out")
    assert f"{copy.name} has no files.json: its files are as long as its index says" in capsys.readouterr().err
    _export(saved, tmp_path / "listed")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "listed" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        find_checkpoint(tmp_path)
    part = next(copy.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"is damaged: its {part.name} has \d+ bytes of"):
        _export(copy, tmp_path / "short")
    assert not (tmp_path / "short").exists()


def test_the_model_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "here" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    state = {"train": {}, "identity": {}, "run": {"model": "model"}, "model_folder": str(model)}
    run = exporting._saved_run(fake_checkpoint(tmp_path, 3, state))
    assert exporting._model_folder(tmp_path, run) == model
    monkeypatch.setattr(exporting, "default_naming", lambda *arguments: "default")
    monkeypatch.setattr(exporting, "declared_dtype", lambda folder: torch.float32)
    assert exporting._naming(model, run, None) == "default"  # type: ignore[comparison-overlap,arg-type]
    assert capsys.readouterr().err == f"no weights at {model}: tensors are named as transformers does\n"


def test_what_cannot_be_exported(saved: Path, tmp_path: Path) -> None:
    torn = tmp_path / "step-00000003"
    shutil.copytree(saved / "checkpoints" / torn.name, torn)
    (torn / "generation_config.json").write_text((torn / "generation_config.json").read_text().replace(" ", "\t"))
    with pytest.raises(CheckpointError, match=r"the content of its generation_config\.json is not what was written"):
        _export(torn, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        _export(saved / "model", tmp_path / "out")
    with pytest.raises(ConfigError, match="belongs to --merge"):
        _export(saved, tmp_path / "out", base=saved / "model")
    with pytest.raises(ConfigError, match="--merge always compares"):
        _export(saved, tmp_path / "out", merge=True, verify=True)
