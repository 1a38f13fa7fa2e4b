"""``AutoParallel`` and the parameters of the search: what a method of a model sets, or why it sets nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import shardwise.mindspore as ms
from shardwise.api.ambient import AMBIENT
from shardwise.api.auto import ModelHandle
from shardwise.errors import ConfigError
from shardwise.mindspore.parallel import auto_parallel
from shardwise.mindspore.parallel.auto_parallel import AutoParallel
from tests.mindspore.helpers import keys

MODEL = ModelHandle("m", Path("m"), {"trust_remote_code": True})


def test_a_model_is_split_as_its_methods_say_and_stays_the_model() -> None:
    net = AutoParallel(MODEL)
    net.pipeline(stages=2, interleave=True)
    net.hsdp(shard_size=2, optimizer_level="level3")
    net.enable_gradients_mean()
    assert (net.get_pipeline_stages(), net.tree(), net.network) == (2, MODEL.tree(), MODEL)
    assert keys() == {
        "strategy.pp": 2,
        "strategy.schedule": "interleaved",
        "strategy.dp_shard": 2,
        "strategy.reshard": True,
    }
    assert ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.SEMI_AUTO_PARALLEL


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"strategy.dp_replicate": 1}),
        ({"optimizer_weight_shard_size": -1}, {"strategy.dp_replicate": 1}),
        ({"optimizer_weight_shard_size": 4}, {"strategy.dp_shard": 4}),
        ({"optimizer_level": "level2"}, {"strategy.dp_replicate": 1, "strategy.reshard": False}),
        (None, {"strategy.dp_replicate": 1}),
    ],
)
def test_what_the_optimizer_is_split_over(config: Any, expected: dict[str, Any]) -> None:
    ms.set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config=config)
    assert keys() == expected


def test_a_config_of_an_optimizer_that_is_not_split_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"optimizer_weight_shard_size": 2, "parallel_optimizer_threshold": 64}
    ms.set_auto_parallel_context(parallel_optimizer_config=config)
    lines = capsys.readouterr().err.splitlines()
    assert "parallel_optimizer_threshold=64) has no effect" in lines[0]
    assert lines[1] == "parallel_optimizer_config has an effect with enable_parallel_optimizer=True alone"
    assert keys() == {}
    ms.set_auto_parallel_context(enable_parallel_optimizer=True)
    assert keys() == {"strategy.dp_shard": 2}


@pytest.mark.parametrize("mode", ["sharding_propagation", "recursive_programming"])
def test_the_modes_that_search_are_auto_parallel(mode: str) -> None:
    AutoParallel(MODEL, mode)
    assert AMBIENT.planned
    assert ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.AUTO_PARALLEL


@pytest.mark.parametrize("name", auto_parallel._METHODS)
def test_a_method_that_sets_nothing_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    net = AutoParallel(MODEL)
    getattr(net, name)("given", by_name=3)
    expected = f"AutoParallel.{name}('given', by_name=3) has no effect: {auto_parallel._METHODS[name]}\n"
    assert (capsys.readouterr().err, keys()) == (expected, {})
    assert not hasattr(net, "stages")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"optimizer_weight_shard_size": 0}, ["optimizer_weight_shard_size = 0", "above 0"]),
        ({"optimizer_level": "level4"}, ["optimizer_level = 'level4'", "level1, level2, level3"]),
        ({"optimizer_levels": "level1"}, ["unknown argument", "optimizer_level?"]),
        (["level1"], ["must be a dictionary"]),
    ],
)
def test_what_a_config_of_the_optimizer_refuses(arguments: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ms.set_auto_parallel_context(enable_parallel_optimizer=True, parallel_optimizer_config=arguments)
    for word in words:
        assert word in str(error.value)


def test_what_auto_parallel_refuses() -> None:
    with pytest.raises(ConfigError, match=r"AutoModel\.from_pretrained"):
        AutoParallel(print)
    with pytest.raises(ConfigError, match="parallel_mode = 'full': must be one of semi_auto"):
        AutoParallel(MODEL, "full")
    with pytest.raises(ConfigError, match="pipeline_stages = 0"):
        AutoParallel(MODEL).pipeline(stages=0)
    with pytest.raises(ConfigError, match="pipeline_scheduler must be '1f1b' or 'gpipe'"):
        AutoParallel(MODEL).pipeline(stages=2, scheduler="zero_bubble_v")


def test_parameters_of_the_search_say_why_they_have_no_effect(capsys: pytest.CaptureFixture[str]) -> None:
    ms.set_algo_parameters(fully_use_devices=False)
    assert "set_algo_parameters(fully_use_devices=False) has no effect" in capsys.readouterr().err
    assert ms.get_algo_parameters("fully_use_devices") is False
    ms.reset_algo_parameters()
    assert ms.get_algo_parameters("fully_use_devices") is None
    with pytest.raises(ConfigError, match=r"fully_use_devices\?"):
        ms.set_algo_parameters(fully_use_device=True)
