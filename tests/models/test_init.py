"""Initial values that follow no distribution: computed by a model's own code, or left by a constructor."""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.apertus import modeling_apertus

from shardwise.errors import PlanError
from shardwise.models import own_init
from shardwise.models.build import freeze_stored_buffers
from shardwise.models.init import Distribution, distributions, fill_random
from shardwise.models.shard import Shard
from shardwise.models.shrink import shrink
from shardwise.spec.layout import ParamLayout
from tests.architectures.survey import default_config


def on_meta(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    freeze_stored_buffers(model)
    return model


def filled(model, dists, seed, cut=None):
    """Initial values by name, whole or the columns or rows that one of two ranks holds."""
    values = {}
    for name, parameter in model.named_parameters():
        layout = ParamLayout(name, tuple(parameter.shape), shard_range=cut and (0, max(parameter.shape[0] // 2, 1)))
        shard = Shard(layout, torch.nn.Parameter(torch.full(layout.local_shape, torch.nan), requires_grad=False))
        fill_random([shard], dists, seed)
        values[name] = shard.data
    return values


# Decays that formulas give; slopes in a buffer that files hold; a constructor's constants, one of them without dims.
@pytest.mark.parametrize(
    ("name", "fixed"),
    [("bamba", "A_log"), ("minimax", "slope_rate"), ("apertus", "alpha_p"), ("mamba2", "A_log"), ("apertus", "beta")],
)
def test_what_the_model_computes_is_what_transformers_starts_from(name, fixed):
    small = shrink(default_config(name))
    model = on_meta(small)
    dists = distributions(model)
    got, other = filled(model, dists, 1), filled(model, dists, 2)
    want = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    freeze_stored_buffers(want)
    found = {n: p for n, p in want.named_parameters() if n.endswith(f".{fixed}")}
    assert found
    for parameter_name, parameter in found.items():
        assert torch.equal(got[parameter_name], parameter), parameter_name
        assert torch.equal(other[parameter_name], parameter), parameter_name
    assert all(values.isfinite().all() for values in got.values())


def test_values_of_own_code_depend_on_the_seed_and_not_on_the_layout():
    model = on_meta(shrink(default_config("mamba2")))
    dists = distributions(model)
    names = [n for n, initial in dists.items() if not isinstance(initial, Distribution) and n.endswith("dt_bias")]
    assert names
    whole, part, other = filled(model, dists, 7), filled(model, dists, 7, cut=True), filled(model, dists, 8)
    for name in names:
        assert torch.equal(part[name], whole[name][: len(part[name])])
        assert not torch.equal(whole[name], other[name])


def test_truncated_values_lie_in_their_interval_and_spread():
    dist = Distribution(0.5, 1.0, cut=(0.0, 1.5))
    shard = Shard(ParamLayout("w", (3000, 8)), torch.nn.Parameter(torch.empty(3000, 8), requires_grad=False))
    fill_random([shard], {"w": dist}, seed=3)
    assert 0.0 <= float(shard.data.min()) < 0.01
    assert 1.49 < float(shard.data.max()) <= 1.5
    assert float(shard.data.mean()) == pytest.approx(0.7066, abs=0.01)  # of a normal cut at -0.5 and 1 deviations


def test_what_a_constructor_makes_of_a_width_is_refused(monkeypatch):
    """The copies that it is seen on are narrower than the model."""
    own = modeling_apertus.ApertusMLP.__init__

    def by_width(self, config):
        own(self, config)
        with torch.no_grad():
            self.act_fn.alpha_p.fill_(config.hidden_size**-0.5)

    monkeypatch.setattr(modeling_apertus.ApertusMLP, "__init__", by_width)
    with pytest.raises(PlanError, match=r"alpha_p.*its initial distribution is not known"):
        distributions(on_meta(default_config("apertus")))


def test_constants_are_known_where_no_wider_copy_can_be_built(monkeypatch):
    """Those of the model's own shape: of others nothing shows whether they depend on a width."""
    known = distributions(on_meta(shrink(default_config("apertus"))))

    def one_width(config, *, scale=1):
        if scale > 1:
            raise ValueError("no such width")
        return shrink(config)

    monkeypatch.setattr(own_init, "shrink", one_width)
    model = on_meta(shrink(default_config("apertus")))
    got, want = filled(model, distributions(model), 1), filled(model, known, 1)
    assert all(torch.equal(got[name], want[name]) for name in want)
    own = modeling_apertus.ApertusMLP.__init__

    def by_width(self, config):
        own(self, config)
        self.act_fn.alpha_p = torch.nn.Parameter(torch.full((config.hidden_size,), config.hidden_size**-0.5))

    monkeypatch.setattr(modeling_apertus.ApertusMLP, "__init__", by_width)
    with pytest.raises(PlanError, match=r"alpha_p.*its initial distribution is not known"):
        distributions(on_meta(default_config("apertus")))


def test_what_a_constructor_draws_is_refused():
    with pytest.raises(PlanError, match="its initial distribution is not known"):
        distributions(on_meta(shrink(CONFIG_MAPPING["openai-gpt"]())))
