"""Adapters on disk: resumed under any layout, read by plain PEFT, merged (fault cases 43, 49, 61, 62)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from shardwise import cli
from shardwise.checkpoint.adapter import find_adapter, write_adapter
from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.listing import complete_checkpoints
from shardwise.checkpoint.merge import merge
from shardwise.checkpoint.save_job import save_checkpoint
from shardwise.checkpoint.store import load_checkpoint
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.init import fill_random
from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from shardwise.train.lr import learning_rate
from shardwise.train.optim import Optimizer
from shardwise.train.saving import all_tensors
from shardwise.train.step import train_step
from tests.checkpoint.fakes import fake_checkpoint
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import ADAMW, loader_of, strategy
from tests.parallel.lora_harness import LoraCase, build, make_adapter, own_name, reference

STEPS, SAVED_AT = 5, 2
ROWS = tuple(make_rows())
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp_shard2": {"dp_shard": 2},
    "dp_replicate2": {"dp_replicate": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "hsdp2x2": {"dp_replicate": 2, "dp_shard": 2},
}
SAVED = LoraConfig(r=4, alpha=8.0, target_modules=("q_proj", "down_proj"), modules_to_save=("lm_head", "norm"))
TIED = LoraConfig(r=4, alpha=8.0, modules_to_save=("embed_tokens", "lm_head"))
TIED_HEAD = LoraConfig(r=4, alpha=8.0, target_modules=("v_proj", "lm_head"))
KINDS = {
    "all": ("llama", LoraConfig(r=4, alpha=8.0)),
    "saved": ("llama", SAVED),
    "tied": ("llama-tied", TIED),
    "tied-head": ("llama-tied", TIED_HEAD),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapter")
    for model in ("llama", "llama-tied"):
        make_model(root / model, model)
        (root / model / "tokenizer_config.json").write_text("{}")
    for kind, (model, lora) in KINDS.items():
        make_adapter(root / model, root / f"start-{kind}", lora)
    return root


def _case(root: Path, kind: str, layout: str) -> LoraCase:
    model, lora = KINDS[kind]
    split = strategy(**LAYOUTS[layout])
    adapter = root / f"start-{kind}"
    return LoraCase(root / model, split, ROWS, 4, steps=STEPS, train=ADAMW, lora=lora, adapter=adapter)


def _train(rank: int, case: LoraCase, folder: Path, resume: bool) -> list[float | None]:
    """Two steps and a save, or a load into other values and the steps that follow."""
    model, mesh, adapters = build(case)
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    if resume:
        for shard in model.shards:
            if shard.parameter.requires_grad:  # what is loaded must replace all of it
                shard.data.fill_(float("nan"))
        load_checkpoint(complete_checkpoints(folder)[-1], all_tensors(model, optimizer))
        optimizer.set_num_updates(SAVED_AT)
    losses = []
    for step in range(STEPS if resume else SAVED_AT):
        batch = next(batches)
        if resume and step < SAVED_AT:
            continue
        rate = learning_rate(case.train, step, STEPS)
        losses.append(train_step(model, optimizer, batch, rate, case.train.max_grad_norm, []).loss)
    if resume:
        write_adapter(Companions(case.folder), folder / "final", adapters, model.shards)
    else:
        save_checkpoint(folder, SAVED_AT, all_tensors(model, optimizer), {}, Companions(case.folder))
    return losses


def _logits(model: Any) -> torch.Tensor:
    ids = torch.tensor([row["input_ids"][:4] for row in ROWS])
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=ids).logits
    return logits


def _live_logits(case: LoraCase) -> torch.Tensor:
    """Logits after the run, from the reference's own final weights in plain transformers modules."""
    outcome = reference(case)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(case.folder), case.adapter)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(outcome.weights[own_name(name)])
    return _logits(model)


# tests/checkpoint/test_matrix.py has more pairs of layouts.
FEW_CHANGES = [("all", "hsdp2x2", "one"), ("all", "dp_shard2", "tp2-pp2"), ("saved", "tp2-pp2", "dp_replicate2")]
CHANGES = [*FEW_CHANGES, ("all", "tp2", "pp2"), ("all", "tp2-pp2", "dp_shard2"), ("saved", "one", "tp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before", "after"), CHANGES if EVERYTHING else FEW_CHANGES)
def test_resumed_under_another_layout_and_read_by_plain_peft(
    kind: str, before: str, after: str, root: Path, tmp_path: Path
) -> None:
    first, second = _case(root, kind, before), _case(root, kind, after)
    (head, *_) = run_distributed(_train, first.strategy.world_size, first, tmp_path, False)
    (tail, *_) = run_distributed(_train, second.strategy.world_size, second, tmp_path, True)
    expected = reference(replace(first, strategy=strategy()))
    assert [*head, *tail] == pytest.approx(expected.losses, rel=tolerance.FP32_LOSS)
    saved = load_file(tmp_path / "final" / "adapter_model.safetensors")
    plain = load_file(first.adapter / "adapter_model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {name: value.shape for name, value in plain.items()}
    base = AutoModelForCausalLM.from_pretrained(first.folder)
    logits = _logits(PeftModel.from_pretrained(base, tmp_path / "final"))
    live = _live_logits(first)
    assert (logits - live).norm() / live.norm() < 10 * tolerance.EXPORT_LOGITS  # AdamW's own drift included
    assert {p.name for p in (tmp_path / "final").iterdir()} >= {"adapter_config.json", "tokenizer_config.json"}
    assert not (tmp_path / "final" / "config.json").exists()


@pytest.mark.slow
def test_a_checkpoint_holds_no_frozen_weight(root: Path, tmp_path: Path) -> None:
    case = _case(root, "all", "one")
    run_distributed(_train, 1, case, tmp_path, False)
    metadata = dcp.FileSystemReader(complete_checkpoints(tmp_path)[-1]).read_metadata()
    trained = {own_name(name) for name in load_file(case.adapter / "adapter_model.safetensors")}
    prefixes = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    assert set(metadata.state_dict_metadata) == {f"{prefix}.{name}" for prefix in prefixes for name in trained}


def _export(rank: int, case: LoraCase, folder: Path, steps: int) -> torch.Tensor:
    """Train and write the adapter; the live model's logits (one rank)."""
    model, mesh, adapters = build(case)
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    for _ in range(steps):
        train_step(model, optimizer, next(batches), 1e-2, 1.0, [])
    write_adapter(Companions(case.folder), folder, adapters, model.shards)
    if case.strategy.world_size > 1:
        return torch.zeros(())
    ids = torch.tensor([row["input_ids"][:4] for row in ROWS])
    with torch.no_grad():
        return model.stages[0].eval()(ids, position_ids=torch.arange(4).expand(len(ids), 4))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_merged_logits_are_those_of_the_live_model(kind: str, root: Path, tmp_path: Path) -> None:
    """Case 49: trained ends of a tied embedding, or an adapter on one of them, survive merging and reloading."""
    case = _case(root, kind, "one")
    (live,) = run_distributed(_export, 1, case, tmp_path / "adapter", 3)
    base = AutoModelForCausalLM.from_pretrained(case.folder)
    start = _logits(base)
    assert (start - live).norm() / live.norm() > 1e-3
    beside = _logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(case.folder), tmp_path / "adapter"))
    assert (beside - live).norm() / live.norm() < tolerance.EXPORT_LOGITS
    comparison = merge(tmp_path / "adapter", tmp_path / "merged")
    assert comparison.agrees, str(comparison)
    reloaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (_logits(reloaded) - live).norm() / live.norm() < tolerance.EXPORT_LOGITS
    config = AutoConfig.from_pretrained(tmp_path / "merged")
    assert config.tie_word_embeddings == (kind == "tied")
    tensors = load_file(tmp_path / "merged" / "model.safetensors")
    assert ("lm_head.weight" in tensors) == (kind != "tied")
    assert not any("lora" in name or "base_layer" in name for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", "tp2-pp2"), ("saved", "dp_shard2")]
    + ([("tied", "dp_shard2"), ("saved", "tp2-pp2")] if EVERYTHING else []),
)
def test_every_rank_writes_its_part_of_one_adapter(kind: str, layout: str, root: Path, tmp_path: Path) -> None:
    one, split = _case(root, kind, "one"), _case(root, kind, layout)
    run_distributed(_export, 1, one, tmp_path / "one", 0)
    run_distributed(_export, split.strategy.world_size, split, tmp_path / "split", 0)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "split")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("one", "split")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]


def _fresh(rank: int, case: LoraCase, folder: Path) -> None:
    """Write adapters as a run starts with them."""
    model, _, adapters = build(case)
    added = [shard for shard in model.shards if shard.parameter.requires_grad]
    fill_random(added, adapters.distributions, 42)
    write_adapter(Companions(case.folder), folder, adapters, model.shards)


@pytest.mark.slow
def test_initial_values_do_not_depend_on_the_layout(root: Path, tmp_path: Path) -> None:
    files = {}
    for layout in ("one", "tp2-pp2", "hsdp2x2"):
        case = _case(root, "all", layout)
        run_distributed(_fresh, case.strategy.world_size, case, tmp_path / layout)
        files[layout] = load_file(tmp_path / layout / "adapter_model.safetensors")
    for name, value in files["one"].items():
        assert bool(value.any()) == ("lora_A" in name)
        assert all(torch.equal(value, other[name]) for other in files.values())


def test_a_merge_that_rounds_is_told_from_one_that_is_wrong(root: Path, tmp_path: Path) -> None:
    """A bf16 base: files in bf16, a limit of that precision, and exit status 4 for a difference above it."""
    model = AutoModelForCausalLM.from_pretrained(root / "llama", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "base")
    make_adapter(tmp_path / "base", tmp_path / "adapter", KINDS["all"][1])
    comparison = merge(tmp_path / "adapter", tmp_path / "merged")
    assert comparison.agrees, str(comparison)
    assert comparison.dtype == "bfloat16"
    assert load_file(tmp_path / "merged" / "model.safetensors")["model.norm.weight"].dtype is torch.bfloat16
    assert not replace(comparison, difference=comparison.scale).agrees


def test_the_command_exits_with_4_where_logits_differ(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tolerance, "EXPORT_LOGITS", 0.0)
    result = CliRunner().invoke(cli.app, ["export", "--merge", str(root / "start-all"), str(tmp_path / "merged")])
    assert result.exit_code == cli.EXIT_DIFFERENT == 4
    assert "largest difference of logits" in result.stderr


def test_what_cannot_be_merged_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("")
    with pytest.raises(ConfigError, match="holds no adapter"):
        find_adapter(tmp_path)
    with pytest.raises(ConfigError, match="whole model"):
        merge(root / "llama", tmp_path / "out")
    with pytest.raises(ConfigError, match="is not empty"):
        merge(root / "start-all", tmp_path / "full")
    with pytest.raises(ConfigError, match="no such model folder"):
        merge(root / "start-all", tmp_path / "out", base=tmp_path / "gone")
    make_model(tmp_path / "wider", "llama", hidden_size=64)
    with pytest.raises(CheckpointError, match="does not fit"):
        merge(root / "start-all", tmp_path / "out", base=tmp_path / "wider")
    torn = tmp_path / "torn"
    shutil.copytree(root / "start-all", torn)
    tensors = load_file(torn / "adapter_model.safetensors")
    tensors.pop(next(iter(tensors)))
    save_file(tensors, torn / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="missing adapter keys"):
        merge(torn, tmp_path / "out")
    make_model(tmp_path / "random", "llama")
    (tmp_path / "random" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        merge(root / "start-all", tmp_path / "out", base=tmp_path / "random")
    assert not (tmp_path / "out").exists()


def test_the_newest_adapter_of_a_run_is_found(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        fake_checkpoint(tmp_path / "checkpoints", step, {}, "adapter/adapter_config.json")
    (tmp_path / "checkpoints" / "step-00000011" / "state.json").unlink()
    assert find_adapter(tmp_path).parent.name == "step-00000010"
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "adapter_config.json").write_text("{}")
    assert find_adapter(tmp_path) == tmp_path / "export"
