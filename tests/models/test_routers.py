"""What a balance loss needs to know of a model, by whatever name its configuration gives it."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.routers import take_routers
from tests.parallel.families import family_config


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    """A Mixtral on meta whose configuration does not have its usual name for the experts of a token."""
    config = family_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    with torch.device("meta"):
        built: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    del built.config.num_experts_per_tok
    monkeypatch.delattr(type(config), "num_experts_per_tok")  # the default of the class
    return built


@pytest.mark.parametrize("name", ["num_experts_per_tok", "moe_topk"])
def test_the_experts_of_a_token_by_any_known_name(model: PreTrainedModel, name: str) -> None:
    setattr(model.config, name, 3)
    routers = take_routers(model)
    assert routers is not None
    assert (routers.top_k, routers.coefficient, len(routers.modules)) == (3, 0.5, 4)
    assert not model.config.output_router_logits


def test_a_configuration_that_does_not_say_is_refused_by_the_names_that_would(model: PreTrainedModel) -> None:
    with pytest.raises(PlanError, match=r"output_router_logits = true: .*none of num_experts_per_tok, .*Set it to fal"):
        take_routers(model)


def test_the_coefficient_by_its_other_name() -> None:
    config = family_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.0)
    config.aux_loss_coef = 0.25  # JetMoE's
    with torch.device("meta"):
        routers = take_routers(AutoModelForCausalLM.from_config(config))
    assert routers is not None
    assert routers.coefficient == 0.25


def test_a_loss_of_the_logits_size_is_refused_and_not_left_out() -> None:
    config = family_config("mixtral")
    config.z_loss_coefficient = 1e-4  # Bamba's
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(PlanError, match=r"z_loss_coefficient = 0.0001: .*Set it to 0"):
        take_routers(model)
    config.z_loss_coefficient = 0.0
    assert take_routers(model) is None
