"""Costs from sizes: numbers of weights of well-known models, and what a block saves."""

from __future__ import annotations

import pytest

from shardwise.planner.compute import amount_bytes
from shardwise.planner.layout import Layout, Work
from shardwise.planner.shape import Experts, Latent, Shape, model_costs

LLAMA_7B = Shape("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000)
KNOWN = [
    (LLAMA_7B, 6738415616),
    (Shape("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000), 68976648192),
    (Shape("mixtral", 32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336)), 46702792704),
    # DeepSeek-V3's report counts 671 B; its norms of latents are not counted here.
    (
        Shape("v3", 61, 7168, 128, 128, 128, 18432, 129280, experts=Experts(256, 8, 2048, 2048), num_dense=3,
              latent=Latent()),
        671026000000,
    ),
    # Biases are not counted.
    (Shape("gpt3", 96, 12288, 96, 96, 128, 49152, 50257, gated=False, tied=True, positions=2048), 174600000000),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "parameters"), KNOWN, ids=[shape.name for shape, _ in KNOWN])
def test_number_of_weights(shape: Shape, parameters: int) -> None:
    assert model_costs(shape).num_parameters == pytest.approx(parameters, rel=2e-4)


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_saved_bytes_of_a_gpt_block(tp: int, sequence_parallel: bool) -> None:
    """Korthikanti et al. 2022, equations 2 and 4: s b h (10 + 24 / t + 5 a s / (h t)), or all of it over t.

    An output projection and its fp32 normaliser aside: theirs keeps no output of the core besides its input.
    """
    hidden, heads, length, rows = 1024, 16, 512, 2
    shape = Shape("gpt", 4, hidden, heads, heads, 64, 4 * hidden, 1000, gated=False, eager=True, dropout=True)
    block = model_costs(shape).kinds[0]
    layout = Layout(tp=tp, micro_batch=rows, sequence_parallel=sequence_parallel)
    saved = amount_bytes(block.saved["none"], layout, Work(length))
    whole = 10 / (tp if sequence_parallel else 1)
    paper = length * rows * hidden * (whole + 24 / tp + 5 * heads * length / (hidden * tp))
    assert saved == pytest.approx(paper + 4 * heads * length * rows / tp)


def test_recomputation_keeps_less() -> None:
    block, layout = model_costs(LLAMA_7B).kinds[0], Layout()
    none, selective, full = (amount_bytes(block.saved[level], layout, Work(2048)) for level in block.saved)
    assert full < selective < none
    assert full == 2048 * 4096 * 2


def test_experts_cost_what_a_token_uses() -> None:
    shape = Shape("moe", 2, 64, 4, 4, 16, 128, 100, experts=Experts(8, 2, 32))
    dense, experts = model_costs(shape).kinds
    assert model_costs(shape).order == (1, 1)
    assert experts.dispatched == 2 * 64
    used = {product.name: product.uses / product.copies for product in experts.products}
    assert used["experts_up"] == pytest.approx(2 / 8)
    assert dense.parameters.expert == 0
    assert experts.parameters.expert == 8 * 3 * 64 * 32
