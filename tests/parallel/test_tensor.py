"""A table is found and proven before weights are read, for models of true size too; what cannot be kept is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.build import build_on_meta
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.tensor import agree_on_table, proven_table
from shardwise.tensor.table import ShardingTable, Style
from shardwise.testing import run_distributed
from tests.parallel.families import make_family
from tests.parallel.harness import strategy

# Of true size: what decides is the numbers of heads, and what the configurations switch on.
SIZES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
    "phi": {"hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 48,
            "long_factor": [1.0] * 48,
            "original_max_position_embeddings": 4096,
        }
    },
    "gemma3_text": {},
    "gpt_neox": {},
    "qwen3_moe": {"num_hidden_layers": 4},
}


@pytest.mark.parametrize("name", SIZES)
def test_true_sizes(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES[name]))
    table = proven_table(model, 2)
    styles = {split.style for split in table.modules.values()}
    assert {Style.COLUMN, Style.ROW, Style.VOCAB_EMBEDDING, Style.VOCAB_HEAD} <= styles
    assert table.cost is not None
    assert table.cost.whole < 0.01 * table.cost.total


def test_the_latent_projections_of_deepseek_stay_whole_and_the_heads_are_split() -> None:
    config = AutoConfig.for_model("deepseek_v3", num_hidden_layers=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    table = proven_table(model, 2)
    attention = "model.layers.0.self_attn"
    assert table.style(f"{attention}.q_b_proj") is Style.COLUMN
    assert table.style(f"{attention}.kv_b_proj") is Style.COLUMN
    assert table.style(f"{attention}.kv_a_proj_with_mqa") is Style.SUM_OUTPUT  # its rotary part meets all heads
    assert table.style("model.layers.3.mlp.experts") is Style.EXPERTS


def _agreed(rank: int, folder: Path) -> ShardingTable | str:
    mesh = build_mesh(strategy(4, tp=2), torch.device("cpu"))
    try:
        return agree_on_table(build_on_meta(folder, None), mesh)
    except PlanError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"residual_dropout": 0.1}, {"embedding_dropout": 0.1}, {}])
def test_dropout_by_function_on_replicated_tensors_is_refused(tmp_path: Path, changes: dict[str, float]) -> None:
    """Its masks would differ between tensor ranks, and their copies of a weight would drift apart."""
    folder = make_family(tmp_path / "m", "starcoder2", **changes)
    first, second = run_distributed(_agreed, 2, folder)
    assert first == second
    assert isinstance(first, str) is bool(changes)
    if changes:
        assert "masks would differ" in first
        assert "tp=1" in first
