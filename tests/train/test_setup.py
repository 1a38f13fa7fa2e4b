"""A run builds its model on meta once, whatever has to look at it before the weights are there."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.config import apply_overrides
from shardwise.front.resolve import prepare
from shardwise.spec import compiling
from shardwise.spec.plan import Plan
from shardwise.spec.strategy import Strategy
from shardwise.testing import run_distributed
from shardwise.train import setup
from shardwise.train.context import WorkerContext
from shardwise.train.setup import within_tables
from tests.spec.model_folder import make_spec
from tests.train.runs import make_inputs


class _Never:
    def requested(self) -> str | None:
        return None


def _rank(rank: int, overrides: list[str], output_dir: Path) -> tuple[int, bool]:
    """How often the model was built, and whether the rule compiled its blocks."""
    from shardwise.train.worker import build_parts

    run, plan = prepare(apply_overrides({}, overrides))
    context = WorkerContext(output_dir, rank, rank, 1, _Never(), None)
    with (
        mock.patch.object(setup, "build_on_meta", wraps=setup.build_on_meta) as build,
        mock.patch.object(compiling, "SAVED_SHARE", 1e9),
    ):
        parts = build_parts(run, plan, context, compiler_available=True)
    parts.meter.close()
    return build.call_count, bool(parts.run.train.compile)


def test_rows_of_tables_that_are_not_for_tokens_limit_the_rows(tmp_path: Path) -> None:
    plan = Plan(make_spec(tmp_path), Strategy(stages=(4,)), 4, "cpu")
    words, places = torch.nn.Embedding(132, 4), torch.nn.Embedding(40, 4, padding_idx=1)
    model = torch.nn.ModuleDict({"words": words, "position_embeddings": places})
    assert (plan.model.max_position_embeddings, plan.model.vocab_size) == (64, 132)
    found = within_tables(plan, model).model
    assert (found.max_position_embeddings, found.vocab_size) == (38, 132)
    model.get_output_embeddings = lambda: torch.nn.Linear(4, 130)
    assert within_tables(plan, model).model.vocab_size == 130
    assert within_tables(plan, torch.nn.ModuleDict({"words": words})) == plan


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["use_lora=true"]], ids=["full", "LoRA"])
def test_the_rule_the_adapters_and_the_loading_share_one_model(tmp_path: Path, more: list[str]) -> None:
    inputs, output_dir = make_inputs(tmp_path), tmp_path / "out"
    output_dir.mkdir()
    paths = [f"model={inputs / 'model'}", f"data.train={inputs / 'rows.jsonl'}"]
    overrides = [*paths, "device=cpu", "train.max_steps=1", *more]
    results: list[Any] = run_distributed(_rank, 1, overrides, output_dir)
    assert results == [(1, True)]
