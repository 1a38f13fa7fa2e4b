"""A small copy keeps what a plan relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from shardwise.models.calling import call_model
from shardwise.models.shrink import build_small, shrink
from shardwise.models.sizes import compress_counts, scale_heads, small_experts, small_vocabulary
from shardwise.models.structure import find_structure
from tests.architectures.steps import inputs

COUNTS = st.lists(st.integers(1, 256), min_size=1, max_size=6)


@given(COUNTS, st.integers(2, 8))
def test_counts_keep_what_divides_what(values: list[int], degree: int) -> None:
    small = compress_counts(values, degree)
    for a in values:
        assert (small[a] % degree == 0) == (a % degree == 0)
        assert (small[a] == 1) == (a == 1)
        assert 1 <= small[a] <= a
        for b in values:
            if b % a == 0:
                assert small[b] % small[a] == 0
                assert (small[b] == small[a]) == (a == b)


@given(st.lists(st.integers(1, 64).map(lambda n: 2 * n), min_size=1, max_size=4))
def test_heads_stay_even_and_in_order(values: list[int]) -> None:
    small = scale_heads(values)
    for a in values:
        assert small[a] % 2 == 0
        assert 2 <= small[a] <= a
        assert all(small[a] <= small[b] for b in values if a < b)


@given(st.lists(st.integers(2000, 300000), min_size=1, max_size=3, unique=True), st.integers(2, 32))
@settings(max_examples=50)
def test_vocabularies_keep_remainders_and_order(values: list[int], degree: int) -> None:
    """And leave no rank without a part: GPT-2's 50,257 words over 16 ranks leave a remainder of 1."""
    small = small_vocabulary(values, degree)
    assert all(small[value] % degree == value % degree for value in values)
    assert [small[value] for value in sorted(values)] == sorted(small.values())
    assert all((degree - 1) * -(-value // degree) < value for value in small.values())


@given(st.integers(1, 512), st.integers(2, 8))
def test_experts_are_few_and_as_divisible(value: int, degree: int) -> None:
    small = small_experts(value, degree)
    assert small <= value
    assert (small % degree == 0) == (value % degree == 0)


def small_of(name: str, degree: int = 2, **values: Any) -> Any:
    return shrink(CONFIG_MAPPING[name](**values), degree=degree)


def test_nine_heads_over_three() -> None:
    small = small_of("llama", hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=49153)
    assert (small.num_attention_heads, small.num_key_value_heads) == (9, 3)
    assert small.hidden_size == 9 * small.head_dim
    assert small.vocab_size % 2 == 1


def test_a_head_width_of_its_own() -> None:
    small = small_of("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert small.num_attention_heads == 2 * small.num_key_value_heads
    assert small.hidden_size < small.num_attention_heads * small.head_dim


def test_states_are_not_as_wide_as_heads_by_accident() -> None:
    """Parts of a fused weight are told by their sizes: 64 inner features and 32 of states were 32 and 32."""
    small = small_of("mamba2", hidden_size=32, num_heads=8, head_dim=8, n_groups=2, state_size=16)
    inner = small.num_heads * small.head_dim
    assert inner == small.expand * small.hidden_size
    assert inner not in (small.state_size, small.n_groups * small.state_size)
    alike = small_of("mamba2", hidden_size=32, num_heads=8, head_dim=8, n_groups=2, state_size=32)
    assert alike.n_groups * alike.state_size == alike.num_heads * alike.head_dim


def test_a_wider_copy() -> None:
    narrow, wide = (shrink(CONFIG_MAPPING["qwen3"](), scale=scale) for scale in (1, 2))
    assert wide.hidden_size == 2 * narrow.hidden_size
    assert wide.intermediate_size != narrow.intermediate_size
    assert (wide.num_hidden_layers, wide.num_attention_heads) == (narrow.num_hidden_layers, narrow.num_attention_heads)


def test_two_blocks_of_each_kind() -> None:
    dense_and_sparse = small_of("deepseek_v3", num_hidden_layers=61, first_k_dense_replace=3)
    model = build_small(dense_and_sparse)
    assert find_structure(model).kinds == (0, 0, 0, 1, 1)
    sliding = small_of("gemma3_text", num_hidden_layers=26)
    assert sorted(sliding.layer_types) == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert find_structure(build_small(sliding)).kinds == (0, 0, 1, 1)


def test_lists_of_places_are_cut() -> None:
    small = small_of("qwen3_moe", num_hidden_layers=8, mlp_only_layers=[1, 5])
    assert small.num_hidden_layers == 4
    assert small.mlp_only_layers == [1, 3]


def test_an_indivisible_width_stays_so() -> None:
    even, odd = small_of("llama", intermediate_size=11008), small_of("llama", intermediate_size=11007)
    assert even.intermediate_size % 2 == 0
    assert odd.intermediate_size % 2 == 1


def test_special_tokens_lie_in_the_vocabulary() -> None:
    small = small_of("llama", vocab_size=128256, bos_token_id=128000, eos_token_id=[128001, 128009], pad_token_id=0)
    tokens = [small.bos_token_id, *small.eos_token_id, small.pad_token_id]
    assert all(0 <= token < small.vocab_size for token in tokens)
    assert len(set(tokens)) == 4


def test_the_given_configuration_is_not_changed() -> None:
    config = CONFIG_MAPPING["llama"]()
    before = config.to_dict()
    shrink(config)
    assert config.to_dict() == before


def test_no_weight_is_special() -> None:
    model = build_small(small_of("qwen2"), torch.float32)
    for parameter in model.parameters():
        assert not bool(((parameter == 0) | (parameter == 1)).any())
    assert call_model(model, *inputs()).isfinite().all()


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_degrees(degree: int) -> None:
    small = small_of("llama", degree, num_attention_heads=24, num_key_value_heads=12, hidden_size=3072)
    assert small.num_key_value_heads % degree == 0
    assert small.num_attention_heads == 2 * small.num_key_value_heads
