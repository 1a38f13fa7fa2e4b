"""A tensor plan that does not fit is refused before weights are read, whatever the architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shardwise.parallel.proof import prove_tensor_plan, small_config
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.errors import PlanError
from shardwise.models.build import build_on_meta
from shardwise.parallel.mesh import build_mesh
from shardwise.testing import run_distributed
from tests.parallel.families import family_config, make_family
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
}


def _proven(rank: int, configs: list[Any]) -> list[str]:
    mesh = build_mesh(strategy(4, tp=2), torch.device("cpu"))
    answers = []
    for config in configs:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        try:
            prove_tensor_plan(model, mesh)
            answers.append("")
        except PlanError as error:
            answers.append(str(error))
    return answers


def _plan_without(model_type: str, part: str) -> Any:
    config = family_config(model_type)
    config.base_model_tp_plan = {k: v for k, v in config.base_model_tp_plan.items() if not k.endswith(part)}
    return config


@pytest.mark.slow
def test_true_sizes_pass_and_wrong_plans_are_refused_on_every_rank() -> None:
    right = [AutoConfig.for_model(name, **sizes) for name, sizes in SIZES.items()]
    right += [family_config("cohere", use_qk_norm=False)]
    wrong = {
        "differs from one process (": _plan_without("gemma3_text", "q_norm"),  # its gradient stays a share
        "does not run on a small copy": family_config("cohere"),  # a norm for each head, and all heads on each rank
        "small copy": _plan_without("starcoder2", "c_proj"),
    }
    for answers in run_distributed(_proven, 2, [*right, *wrong.values()]):
        assert answers[: len(right)] == [""] * len(right)
        for words, answer in zip(wrong, answers[len(right) :], strict=True):
            assert words in answer
            assert "strategy.tp = 2" in answer
            assert "tp=1" in answer


def test_the_small_copy_keeps_what_the_degree_divides(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", intermediate_size=11007, vocab_size=32001, num_hidden_layers=4)
    small = small_config(config, 4)
    assert small.num_attention_heads == config.num_attention_heads
    assert (small.intermediate_size % 4 > 0, small.vocab_size % 4) == (True, 1)
    assert small.hidden_size == 8 * config.num_attention_heads
    assert config.num_hidden_layers == 4  # the original is untouched


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"residual_dropout": 0.1}, {"embedding_dropout": 0.1}, {}])
def test_dropout_by_function_on_replicated_tensors_is_refused(tmp_path, changes):
    """Its masks would differ between tensor ranks, and their copies of a weight would drift apart."""
    folder = make_family(tmp_path / "m", "starcoder2", **changes)
    (first, second) = run_distributed(_refusal_of_dropout, 2, folder)
    assert first == second
    assert ("masks would differ" in first and "tp=1" in first) if changes else first == ""


def _refusal_of_dropout(rank, folder):
    mesh = build_mesh(strategy(4, tp=2), torch.device("cpu"))
    try:
        prove_tensor_plan(build_on_meta(folder, None), mesh)
    except PlanError as error:
        return str(error)
    return ""
