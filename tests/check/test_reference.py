"""The one process that a plan is compared with, and in which precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardwise.check import reference
from shardwise.check.exact import Exact, Rounding
from shardwise.check.findings import limits
from shardwise.check.small import SmallModel, build_meta, build_whole, make_rows
from shardwise.errors import PlanError
from shardwise.models.shrink import shrink
from shardwise.spec import tolerance
from shardwise.spec.run import TrainConfig

TRAIN = TrainConfig(optimizer="sgd", momentum=0.9)


def small() -> SmallModel:
    return SmallModel(shrink(AutoConfig.for_model("llama", num_hidden_layers=2)), None, 2, ())


def test_rounding_is_noticed_and_what_is_kept_exact_is_none() -> None:
    values = torch.full((2,), 1 / 3, dtype=torch.float64)
    with Exact(), Rounding() as rounding:
        assert (values.float() + values.to(torch.float32)).dtype is torch.float64
        assert torch.softmax(values, -1, dtype=torch.float32).dtype is torch.float64
        assert not rounding.found
        torch.empty(2).copy_(values)
    assert rounding.found


def test_a_llama_runs_exactly_and_its_outputs_are_in_the_order_of_the_forward_pass() -> None:
    rows = make_rows(3, 64)
    found = reference.run_reference(small(), [rows, rows], TRAIN)
    assert (found.dtype, found.exact) == (torch.float64, True)
    assert limits(found).gradient == tolerance.FLOAT64_GRADIENT
    assert found.losses[1] < found.losses[0]
    order = list(found.outputs)
    places = [
        order.index(f"model.{name}") for name in ("embed_tokens", "layers.0.self_attn.o_proj", "layers.0", "norm")
    ]
    assert places == sorted(places)
    outputs = found.outputs["model.layers.0"]
    assert [output.shape[1] for output in outputs] == [len(row.input_ids) for row in rows]


def test_ranks_build_the_same_parameters_as_the_one_process() -> None:
    """Buffers that files hold are parameters in both, and a head that is registered first stands last in both."""
    for model_type in ("deepseek_v3", "gpt_neox"):
        copied = SmallModel(shrink(AutoConfig.for_model(model_type, num_hidden_layers=4)), None, 4, ())
        rank = dict(build_meta(copied.config, torch.float32).named_parameters())
        whole = dict(build_whole(copied, torch.float32).named_parameters())
        assert list(rank) == list(whole)
        assert any("e_score_correction_bias" in name for name in rank) is (model_type == "deepseek_v3")


def test_what_float64_cannot_run_is_compared_in_fp32_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build = reference.build_whole

    def only_fp32(model: SmallModel, dtype: torch.dtype) -> Any:
        if dtype is torch.float64:
            raise NotImplementedError("no float64")
        return build(model, dtype)

    def nothing(*_: Any) -> Any:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(reference, "build_whole", only_fp32)
    found = reference.run_reference(small(), [make_rows(3, 64)], TRAIN)
    assert (found.dtype, found.exact) == (torch.float32, False)
    assert limits(found).gradient == tolerance.FP32_GRADIENT
    monkeypatch.setattr(reference, "build_whole", nothing)
    with pytest.raises(PlanError, match=r"does not run in one process \(NotImplementedError: no such"):
        reference.run_reference(small(), [make_rows(3, 64)], TRAIN)
