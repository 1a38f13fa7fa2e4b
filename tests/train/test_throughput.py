"""The numbers of speed, and the count of adapters that they need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardwise.models.shard import Shard
from shardwise.spec.flops import step_flops
from shardwise.spec.layout import ParamLayout, over_tensor_ranks
from shardwise.spec.plan import Plan
from shardwise.testing import run_distributed
from shardwise.train.throughput import Throughput, count_adapter_parameters, device_name
from tests.parallel.harness import strategy
from tests.spec.model_folder import make_spec


def _count(rank: int, adapters: bool) -> int | None:
    name = "model.layers.0.mlp.up_proj"
    layouts = [ParamLayout(f"{name}.base_layer.weight", (10, 10))]
    if adapters:  # A is whole on both ranks and owned once, B is cut, and both hold two of its rows
        layouts.append(ParamLayout(f"{name}.lora_A.default.weight", (4, 3), owned=rank == 0))
        rows = ParamLayout(f"{name}.lora_B.default.weight", (10, 4))
        layouts.append(over_tensor_ranks(rows, 0, [((0, 6),), ((4, 10),)], rank))
    shards = [Shard(layout, torch.nn.Parameter(torch.zeros(layout.local_shape))) for layout in layouts]
    return count_adapter_parameters(shards, torch.device("cpu"))


def test_adapters_are_counted_once_over_the_ranks() -> None:
    assert run_distributed(_count, 2, True) == [52, 52]
    assert run_distributed(_count, 2, False) == [None, None]


@pytest.mark.parametrize("adapters", [None, 1000])
def test_speed_is_flops_by_seconds_and_devices_and_mfu_its_share_of_the_peak(
    tmp_path: Path, adapters: int | None
) -> None:
    plan = Plan(make_spec(tmp_path), strategy(tp=2, pp=2), 4, "cuda")
    flops = step_flops(plan.model, [5, 7], adapters)
    values = Throughput(plan, "bf16", "NVIDIA H200", adapters).metrics([5, 7], 0.5)
    assert values["tflops_per_device"] == pytest.approx(flops / 0.5 / 4 / 1e12)
    assert values["mfu"] == pytest.approx(flops / 0.5 / 4 / 989e12)
    assert Throughput(plan, "bf16", "a device of tomorrow", adapters).metrics([5, 7], 0.5)["mfu"] is None
    assert Throughput(plan, "bf16", "NVIDIA H200", adapters).metrics([], 0.5) == {
        "mfu": None,
        "tflops_per_device": None,
    }


def test_a_cpu_has_no_name_that_could_stand_in_the_table() -> None:
    assert device_name(torch.device("cpu")) is None
