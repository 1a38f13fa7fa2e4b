"""Train adapters under a strategy and with plain peft in one process, and compare what comes out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.models.build import build_on_meta
from shardwise.models.lora import Adapters, find_adapters
from shardwise.models.shard import Shard, take
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import Mesh, build_mesh
from shardwise.parallel.model import ParallelModel
from shardwise.spec.run import LoraConfig
from shardwise.train.lr import learning_rate
from shardwise.train.optim import Optimizer
from shardwise.train.step import train_step
from tests.parallel.harness import (
    Case,
    Outcome,
    RankPart,
    _first_gradients,
    _forward,
    _precision,
    known_tables,
    loader_of,
)

PREFIX = "base_model.model."


@dataclass(frozen=True)
class LoraCase(Case):
    """A run whose adapters start from the values in ``adapter``, a folder that plain peft wrote.

    ``kept_tied``: the tied embedding trains too. Plain peft would make two copies of it, so the reference
    trains the base model's own.
    """

    lora: LoraConfig = field(default_factory=LoraConfig)
    adapter: Path = Path()
    kept_tied: bool = False


@dataclass
class LoraPart(RankPart):
    """What one rank saw; gradients and weights of what trains."""

    frozen_kept: bool = True
    num_trainable: int = 0


def make_adapter(base: Path, folder: Path, lora: LoraConfig, seed: int = 1) -> Path:
    """Save an adapter made by plain peft, A as it draws it and a small random B (a zero B hides faults of A)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        target_modules=_for_peft(lora.target_modules),
        modules_to_save=list(lora.modules_to_save) or None,
    )
    peft_model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.05)
    peft_model.save_pretrained(folder)
    return folder


def _for_peft(targets: str | tuple[str, ...] | None) -> str | list[str]:
    return "all-linear" if targets is None else targets if isinstance(targets, str) else list(targets)


def own_name(name: str) -> str:
    """The name that a parameter of a peft model has with us."""
    for part in (".base_layer", ".default", ".modules_to_save"):
        name = name.replace(part, "")
    return name.removeprefix(PREFIX)


def reference(case: LoraCase) -> Outcome:
    """The run in this process by plain peft, transformers and torch."""
    with _precision(case):
        base = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.dtype, experts_implementation="eager")
        model = PeftModel.from_pretrained(base, case.adapter, is_trainable=True).train()
        if case.kept_tied:
            base.get_input_embeddings().weight.requires_grad_(True)
        masters = {own_name(n): p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        for parameter in model.parameters():  # parameters alone: rotary frequencies stay as transformers has them
            parameter.data = parameter.data.to(case.dtype)
        trained = {own_name(n): p for n, p in model.named_parameters() if p.requires_grad}
        # In bf16 what is stepped are fp32 copies; elsewhere the parameters themselves.
        low = case.dtype is torch.bfloat16
        stepped = masters if low else trained
        train, parameters = case.train, list(stepped.values())
        optimizer: torch.optim.Optimizer
        if train.optimizer == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=0.0, foreach=False)
        else:
            groups = [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": train.weight_decay},
                {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
            ]
            betas = (train.adam_beta1, train.adam_beta2)
            optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, foreach=False)
        out = Outcome([], [], {}, {})
        size = case.global_batch_size
        batches = [case.rows[i : i + size] for i in range(0, len(case.rows), size)]
        for step in range(case.steps):
            with torch.no_grad():
                for name, parameter in trained.items():
                    parameter.copy_(stepped[name])
            logits, targets = _forward(model, batches[step % len(batches)])
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / (targets != -100).sum()
            loss.backward()
            for name, parameter in trained.items() if low else []:
                stepped[name].grad, parameter.grad = parameter.grad.float(), None
            if step == 0:
                out.gradients = {n: p.grad.clone() for n, p in stepped.items()}
            norm = torch.nn.utils.clip_grad_norm_(parameters, train.max_grad_norm or math.inf, foreach=False)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(train, step, case.steps)
            optimizer.step()
            optimizer.zero_grad()
            out.losses.append(loss.item())
            out.norms.append(norm.item())
        out.weights = {n: p.detach().clone() for n, p in stepped.items()}
        return out


def build(case: LoraCase) -> tuple[ParallelModel, Mesh, Adapters]:
    """This rank's part of the case's model; adapters as ``case.adapter`` has them."""
    mesh = build_mesh(case.strategy, torch.device("cpu"))
    hf_model = build_on_meta(case.folder, None, case.dtype)
    names = [name for name, _ in hf_model.named_parameters()]
    naming = naming_of_folder(case.folder, hf_model)
    adapters = find_adapters(hf_model, case.lora)
    model, _ = parallelize(hf_model, mesh, adapters, compiled=case.compiled, tables=known_tables())
    load_slices(case.folder, [s for s in model.shards if s.layout.source in names], naming)
    whole = load_file(case.adapter / "adapter_model.safetensors")
    for shard in trained_shards(model):
        if not (case.kept_tied and shard.layout.source in names):
            shard.data.copy_(take(whole[PREFIX + shard.layout.source], shard.layout))
    return model, mesh, adapters


def trained_shards(model: ParallelModel) -> list[Shard]:
    return [shard for shard in model.shards if shard.parameter.requires_grad]


def run_case(case: LoraCase) -> LoraPart:
    with _precision(case):
        model, mesh, adapters = build(case)
        frozen = [(s, s.data.clone()) for s in model.shards if not s.parameter.requires_grad]
        optimizer = Optimizer(model.shards, case.train)
        out = LoraPart([], [], [], [], None, num_trainable=adapters.num_trainable)
        batches = loader_of(case, mesh).batches()
        for step in range(case.steps):
            batch = next(batches)
            if step == 0:
                out.gradients = [item for item in _first_gradients(model, batch) if item[0].source in adapters.shapes]
            rate = learning_rate(case.train, step, case.steps)
            result = train_step(model, optimizer, batch, rate, case.train.max_grad_norm, [])
            out.losses.append(result.loss)
            out.norms.append(result.grad_norm)
        out.weights = [(shard.layout, shard.data.clone()) for shard in trained_shards(model)]
        out.frozen_kept = all(torch.equal(s.data, before) and s.parameter.grad is None for s, before in frozen)
        return out


def run_cases(rank: int, cases: Sequence[LoraCase]) -> list[Any]:
    """All cases of one world size, one after the other, on ranks that are started once."""
    return [run_case(case) for case in cases]
