"""The small copy that a plan is proved on, and the tables that it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.check import small
from shardwise.check.small import _without_chance, shrink_run
from shardwise.tensor.cache import TableCache
from shardwise.tensor.table import ShardingTable


def test_bounds_hold_for_the_true_table_and_a_forward_may_know_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, vocab_size=64, num_attention_heads=4)
    with torch.device("meta"):
        real = AutoModelForCausalLM.from_config(config)
    given: list[dict[str, Any]] = []
    dtypes = []

    def find(_real: Any, copied: Any, degree: int, **_bounds: Any) -> tuple[None, ShardingTable]:
        dtypes.append(copied.dtype)
        if copied.dtype == torch.float64:
            raise TypeError("float64 is not known")
        return None, ShardingTable(degree)

    monkeypatch.setattr(small, "build_on_meta", lambda *_: real)
    monkeypatch.setattr(small, "proven_table", lambda *_, **bounds: given.append(bounds))
    monkeypatch.setattr(small, "find_tables", find)
    run: Any = SimpleNamespace(
        model="", attn_implementation=None, lora=None, data=SimpleNamespace(packing=False, max_length=None),
        strategy=SimpleNamespace(sequence_parallel=True, tp_whole=0.5),
    )  # fmt: skip
    assert shrink_run(run, 4, 2, 1, TableCache(None)).table == ShardingTable(2)
    assert dtypes == [torch.float64, torch.float32]
    assert given == [{"sequence": True, "whole": 0.5}]


def test_what_is_drawn_in_training_is_left_out_and_said() -> None:
    """One process and the ranks of a plan draw in another order, so a difference would be none of the plan's."""
    config = AutoConfig.for_model("mixtral", attention_dropout=0.1, router_jitter_noise=0.2, output_router_logits=True)
    calm, notes = _without_chance(config)
    assert (calm.attention_dropout, calm.router_jitter_noise, calm.output_router_logits) == (0.0, 0.0, False)
    assert sorted(notes) == [
        "dropout (attention_dropout)",
        "noise (router_jitter_noise)",
        "the balance loss of the experts",
    ]
    assert config.router_jitter_noise == 0.2, "the user's own stays as it is"
