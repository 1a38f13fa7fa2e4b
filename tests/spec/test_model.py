"""A model's sizes are read from JSON alone, and a folder that cannot be used is refused by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import NOT_AVAILABLE
from shardwise.errors import CheckpointError, ConfigError
from shardwise.models.build import freeze_stored_buffers
from shardwise.models.describe import describe_folder
from shardwise.spec.model import NO_LIMIT, ModelSpec, check_weights, find_model, read_model
from tests.parallel.families import FAMILIES, family_config, make_family
from tests.spec.model_folder import make_folder, make_spec

_FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    {"model_type": "llama", "head_dim": 16, "num_key_value_heads": None},
    {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 16},
    {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
    {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
    {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    {"model_type": "qwen3"},
]
# What decides how a model can be split, and which rows it takes.
DECISIVE = ["num_blocks", "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "max_position_embeddings", "tied"]
DECISIVE += ["num_experts"]
_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


@pytest.mark.parametrize("changes", _FAMILIES, ids=lambda changes: "-".join(map(str, changes.values())))
def test_sizes_and_number_of_parameters_are_those_of_the_real_module(tmp_path: Path, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture = _CLASSES[changes["model_type"]] + "ForCausalLM"
    make_folder(tmp_path, architectures=[architecture], **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    spec = describe_folder(tmp_path)
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert spec.block_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert spec.head_dim == model.model.layers[0].self_attn.head_dim
    assert spec.num_kv_heads == model.config.num_key_value_heads
    assert spec.tied == model.config.tie_word_embeddings
    assert spec.max_position_embeddings == model.config.max_position_embeddings
    assert spec.architecture == type(model).__name__
    plain = read_model(tmp_path, describe_folder)
    for name in DECISIVE:
        assert getattr(plain, name) == getattr(spec, name), name
    assert plain.measured == (changes.get("num_key_value_heads", 2) is None)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_are_described_by_their_modules(tmp_path: Path, name: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = family_config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(tmp_path)
    freeze_stored_buffers(model)  # what files hold beside the parameters counts
    spec = describe_folder(tmp_path)
    assert spec.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), abs=4)  # rounded a block
    assert spec.tied == config.tie_word_embeddings
    assert (spec.num_experts > 0) == ("moe" in name or name in ("mixtral", "deepseek_v3"))
    assert spec.architecture == type(model).__name__
    plain = read_model(tmp_path, describe_folder)
    for decisive in DECISIVE:
        assert getattr(plain, decisive) == getattr(spec, decisive), decisive


UNUSUAL = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 131},
    "gpt_neo": {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    "xlnet": {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
    "rwkv": {"hidden_size": 32, "num_hidden_layers": 3, "attention_hidden_size": 32},
    # The first two of its 64 positions are not for tokens.
    "roberta": {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", UNUSUAL)
def test_sizes_that_the_file_does_not_name_are_those_of_the_modules(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    sizes = UNUSUAL[family] | {"vocab_size": 131} | ({"is_decoder": True} if family == "roberta" else {})
    AutoConfig.for_model(family, **sizes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: has no "):
        read_model(tmp_path)
    spec = read_model(tmp_path, describe_folder)
    assert spec.num_blocks == next(sizes[key] for key in ("num_hidden_layers", "num_layers", "n_layer") if key in sizes)
    heads = ("num_heads", "n_head", "num_attention_heads")
    assert spec.num_heads == next((sizes[key] for key in heads if key in sizes), 0)
    assert spec.hidden_size == 32
    assert spec.vocab_size == 131
    assert spec.max_position_embeddings == {"gpt_neo": 2048, "rwkv": 1024, "roberta": 62}.get(family, NO_LIMIT)
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


@pytest.mark.parametrize("name", ["nemotron", "stablelm", "qwen2_moe"])
def test_a_model_that_was_not_built_yet_is_counted_in_its_files(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_family(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert read_model(folder).num_parameters == pytest.approx(whole, abs=4)  # a block's share is rounded down


def test_without_files_numbers_of_parameters_are_estimated_by_a_gated_block(tmp_path: Path) -> None:
    changes = {"model_type": "mixtral", "architectures": None, "num_local_experts": 6, "num_experts_per_tok": 2}
    for folder in (make_folder(tmp_path / "dense"), make_folder(tmp_path / "experts", **changes)):
        exact, estimate = describe_folder(folder), read_model(folder)
        assert estimate.num_parameters == exact.num_parameters
        assert estimate.block_matrix_parameters == exact.block_matrix_parameters


def test_the_hash_is_that_of_the_file_and_the_spec_survives_json(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    assert spec.hash == hashlib.sha256((tmp_path / "config.json").read_bytes()).hexdigest()
    assert ModelSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert make_spec(tmp_path, vocab_size=131).hash != spec.hash


def test_a_model_is_found_as_a_path_then_in_models_dir(tmp_path: Path) -> None:
    plain, nested = make_folder(tmp_path / "dir" / "tiny"), make_folder(tmp_path / "dir" / "org" / "other")
    assert find_model(str(plain)) == plain
    assert find_model("tiny", tmp_path / "dir") == plain
    assert find_model("org/other", tmp_path / "dir") == nested
    assert find_model("elsewhere/tiny", tmp_path / "dir") == plain
    with pytest.raises(ConfigError) as error:
        find_model("org/none", tmp_path / "dir")
    for place in (Path("org/none"), tmp_path / "dir" / "org" / "none", tmp_path / "dir" / "none"):
        assert str(place) in str(error.value)
    with pytest.raises(ConfigError, match="is a file"):
        find_model(str(plain / "config.json"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, ["t5", NOT_AVAILABLE, "llama"]),
        ({"model_type": "gemma3", "text_config": {}}, ["gemma3", NOT_AVAILABLE, "text_config"]),
        ({"model_type": None}, ["model_type", "llama"]),
        ({"model_type": ["llama"]}, ["must be text"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, [NOT_AVAILABLE, "LlamaForCausalLM"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", NOT_AVAILABLE]),
        ({"hidden_size": None}, ["has no hidden_size"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers = 0", "above 0"]),
        ({"vocab_size": "132"}, ["vocab_size = '132'", "whole number"]),
        ({"vocab_size": True}, ["vocab_size = True", "whole number"]),
        ({"hidden_size": 34}, ["hidden_size = 34", "32, 36"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads = 3", "1, 2, 4"]),
        ({"head_dim": 7}, ["head_dim = 7", "even"]),
    ],
)
def test_a_configuration_that_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        make_spec(tmp_path, **changes)
    for word in ["config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b"[" * 100_000])
def test_a_broken_config_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model(tmp_path)


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        read_model(tmp_path)


def test_weights_are_checked_by_their_file_names(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, weights=None)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors.*model_init=random"):
        check_weights(folder, read_model(folder))
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"pickled \(pytorch_model\.bin\)"):
        check_weights(folder, read_model(folder))
    (folder / "model-00001-of-00002.safetensors").touch()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"2 weight files, of which 1 are absent: model-00002"):
        check_weights(folder, read_model(folder))
    index.write_text("[]", encoding="utf-8")
    with pytest.raises(CheckpointError, match="not a readable index"):
        check_weights(folder, read_model(folder))
    index.write_text(json.dumps({"weight_map": {"a": names["a"]}}), encoding="utf-8")
    check_weights(folder, read_model(folder))


def test_a_width_for_each_block_counts_as_their_mean(tmp_path: Path) -> None:
    assert make_spec(tmp_path, intermediate_size=[48, 48, 96, 96]).intermediate_size == 72
    with pytest.raises(ConfigError, match="must be a whole number above 0"):
        make_spec(tmp_path, intermediate_size=[48, "48"])
