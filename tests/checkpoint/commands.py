"""How the docs' command for an export is checked."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from shardwise import cli
from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.listing import CHECKPOINTS
from shardwise.checkpoint.save_job import save_checkpoint
from shardwise.checkpoint.store import tensor_state
from shardwise.spec.layout import ParamLayout
from shardwise.testing import run_distributed


def save_weights(rank: int, model: Path, folder: Path, run: dict[str, Any]) -> None:
    """A checkpoint of a model's weights times 1.25, as one rank would save it."""
    weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters()
    values = [(ParamLayout(name, tuple(weight.shape)), weight.detach() * 1.25) for name, weight in weights]
    state = {"train": {"step": 3}, "identity": {}, "run": {"model": str(model)} | run}
    save_checkpoint(folder, 3, tensor_state(values, "model"), state, Companions(model))


def exports_a_checkpoint(command: str, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, source, out, *_ = words = shlex.split(command)
    run_distributed(save_weights, 1, workspace / "DIR", workspace / source / CHECKPOINTS, {})
    result = CliRunner().invoke(cli.app, words[1:], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    assert "difference of logits" in result.stderr
    assert (workspace / out / "model.safetensors").is_file()
