"""Where adapters go, what is refused, and their names and initial values, on models that are on meta."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import ConfigError, PlanError
from shardwise.models.build import build_on_meta
from shardwise.models.init import draw
from shardwise.models.lora import find_adapters, inject, is_adapter, plain_name
from shardwise.spec.run import LoraConfig
from shardwise.tensor.adapter import pieces
from shardwise.tensor.table import ModuleSplit, Style
from tests.fixtures import make_model

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make_model(root / name, name) for name in ("llama", "llama-tied", "qwen2")}


@pytest.fixture
def model(folders: dict[str, Path]) -> PreTrainedModel:
    return build_on_meta(folders["llama"], "sdpa")


@pytest.fixture
def tied(folders: dict[str, Path]) -> PreTrainedModel:
    return build_on_meta(folders["llama-tied"], "sdpa")


@pytest.mark.parametrize("targets", [None, "all-linear", LINEAR])
def test_by_default_every_linear_layer_but_the_head(
    model: PreTrainedModel, targets: str | tuple[str, ...] | None
) -> None:
    adapters = find_adapters(model, LoraConfig(target_modules=targets))
    assert len(adapters.targets) == 4 * len(LINEAR)
    assert adapters.config.target_modules == set(LINEAR)
    assert "lm_head" not in adapters.targets
    assert adapters.config.modules_to_save is None


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        (("q_proj",), [f"model.layers.{i}.self_attn.q_proj" for i in range(4)]),
        (("layers.1.mlp.up_proj", "lm_head"), ["model.layers.1.mlp.up_proj", "lm_head"]),
        (r".*layers\.[02]\..*v_proj", ["model.layers.0.self_attn.v_proj", "model.layers.2.self_attn.v_proj"]),
    ],
)
def test_targets_are_ends_of_names_or_a_pattern(
    model: PreTrainedModel, targets: str | tuple[str, ...], found: list[str]
) -> None:
    assert list(find_adapters(model, LoraConfig(target_modules=targets)).targets) == found


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ("qproj",)}, ["lora.target_modules = 'qproj'", "Did you mean q_proj?", "down_proj"]),
        ({"target_modules": ("q_proj", "nothing")}, ["'nothing'", "matches no module", "q_proj"]),
        ({"target_modules": ("proj",)}, ["'proj'", "matches no module"]),
        ({"target_modules": "q_proj"}, ["write [q_proj]", "pattern"]),
        ({"target_modules": ".*attn.proj"}, ["'.*attn.proj'", "matches no module", "o_proj"]),
        ({"target_modules": ("embed_tokens",)}, ["Embedding", "linear layer", "modules_to_save=[embed_tokens]"]),
        ({"target_modules": ("self_attn",)}, ["LlamaAttention", "q_proj"]),
        ({"modules_to_save": ("lm_heat",)}, ["lora.modules_to_save = 'lm_heat'", "Did you mean lm_head?"]),
        ({"target_modules": ("q_proj",), "modules_to_save": ("q_proj",)}, ["q_proj", "trains whole"]),
        ({"modules_to_save": ("self_attn", "mlp")}, ["no linear layer"]),
    ],
)
def test_what_fits_nothing_is_refused_with_the_names_that_there_are(
    model: PreTrainedModel, lora: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        find_adapters(model, LoraConfig.model_validate(lora))
    for word in words:
        assert word in str(error.value)


def test_only_the_adapters_train_and_the_base_keeps_its_names(model: PreTrainedModel) -> None:
    before = {name for name, _ in model.named_parameters()}
    adapters = find_adapters(model, LoraConfig(r=4, modules_to_save=("lm_head",)))
    inject(model, adapters)
    after = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    assert {name for name in after if not is_adapter(name)} == before
    assert {name for name, p in after.items() if p.requires_grad} == set(adapters.shapes)
    assert {name: tuple(after[name].shape) for name in adapters.shapes} == adapters.shapes
    assert adapters.num_parameters == sum(p.numel() for p in after.values())
    assert all(p.device.type == "meta" for p in after.values())


def test_trainable_count_and_names_are_those_of_plain_peft(folders: dict[str, Path]) -> None:
    base = AutoModelForCausalLM.from_pretrained(folders["qwen2"])
    peft_model = get_peft_model(base, PeftLoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapters = find_adapters(build_on_meta(folders["qwen2"], "sdpa"), LoraConfig(r=4))
    assert (adapters.num_trainable, adapters.num_parameters) == peft_model.get_nb_trainable_parameters()
    names = {
        plain_name(n).removeprefix("base_model.model.") for n, p in peft_model.named_parameters() if p.requires_grad
    }
    assert names == set(adapters.shapes)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_a_tied_embedding_stays_tied_and_trains_once(tied: PreTrainedModel, end: str) -> None:
    adapters = find_adapters(tied, LoraConfig(target_modules=("q_proj",), modules_to_save=(end,)))
    assert adapters.saved == ("model.embed_tokens", "lm_head")
    assert adapters.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in adapters.shapes
    inject(tied, adapters)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert tied.lm_head.weight.requires_grad


def test_norms_are_named_as_in_peft(model: PreTrainedModel) -> None:
    adapters = find_adapters(model, LoraConfig(modules_to_save=("norm",)))
    assert len(adapters.saved) == 2 * 4 + 1
    assert adapters.config.modules_to_save == ["input_layernorm", "post_attention_layernorm", "norm"]


def test_initial_values_have_the_distribution_of_peft(model: PreTrainedModel) -> None:
    """A as kaiming_uniform with a = sqrt(5) draws it, B zero; each chunk of rows by its own generator."""
    dists = find_adapters(model, LoraConfig(r=4)).distributions
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    shape = (3000, 48)
    drawn = draw(shape, (0, 3000), name, 7, dists[name])
    expected = torch.empty(shape)
    torch.nn.init.kaiming_uniform_(expected, a=5**0.5)
    limit = float(expected.abs().max())
    assert np.abs(drawn).max() == pytest.approx(limit, rel=1e-3)
    assert drawn.std() == pytest.approx(float(expected.std()), rel=2e-2)
    assert abs(drawn.mean()) < 0.01 * limit
    assert np.array_equal(drawn[1500:2500], draw(shape, (1500, 2500), name, 7, dists[name]))
    assert not np.array_equal(drawn, draw(shape, (0, 3000), name, 8, dists[name]))
    assert not draw((48, 4), (0, 48), name.replace("_A", "_B"), 7, dists[name.replace("_A", "_B")]).any()


def test_an_adapter_on_a_layer_split_in_another_way_is_refused(model: PreTrainedModel) -> None:
    inject(model, find_adapters(model, LoraConfig(target_modules=("q_proj",))))
    with pytest.raises(PlanError, match="vocab_embedding"):
        pieces(model.model.layers[0].self_attn.q_proj, ModuleSplit(Style.VOCAB_EMBEDDING))
