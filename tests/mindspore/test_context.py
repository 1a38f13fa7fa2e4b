"""``shardwise.mindspore``: each argument has its effect or a line that says why it has none."""

from __future__ import annotations

from typing import Any

import pytest

import shardwise.mindspore as ms
from shardwise.api.ambient import AMBIENT
from shardwise.errors import ConfigError
from shardwise.mindspore import context
from shardwise.mindspore.parallel import context as parallel_context
from tests.mindspore.helpers import keys

PLACE = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_the_numbers_reach_the_trainer() -> None:
    ms.set_auto_parallel_context(
        parallel_mode=ms.ParallelMode.SEMI_AUTO_PARALLEL,
        device_num=8,
        pipeline_stage=4,
        micro_batch_num=4,
        gradient_aggregation_group=3,
    )
    assert (AMBIENT.device_num, AMBIENT.micro_batch_num) == (8, 4)
    assert keys() == {"strategy.pp": 4, "strategy.gradient_aggregation_group": 3}
    assert ms.get_auto_parallel_context("pipeline_stages") == ms.get_auto_parallel_context("pipeline_stage") == 4
    ms.set_auto_parallel_context(pipeline_stages=2)
    assert keys()["strategy.pp"] == 2
    ms.reset_auto_parallel_context()
    assert (AMBIENT.device_num, AMBIENT.micro_batch_num, keys()) == (None, None, {})
    assert ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.STAND_ALONE
    assert ms.get_auto_parallel_context("pipeline_stages") == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"parallel_mode": "data_parallel"}, {"strategy.pp": 1, "strategy.tp": 1, "strategy.dp_shard": 1}),
        (
            {"parallel_mode": "data_parallel", "enable_parallel_optimizer": True},
            {"strategy.pp": 1, "strategy.tp": 1, "strategy.dp_replicate": 1},
        ),
        ({"parallel_mode": "semi_auto_parallel", "enable_parallel_optimizer": False}, {"strategy.dp_shard": 1}),
        ({"parallel_mode": "auto_parallel"}, {}),
        ({"pipeline_config": {"pipeline_interleave": True}}, {"strategy.schedule": "interleaved"}),
        ({"pipeline_config": {"pipeline_scheduler": "gpipe"}}, {"strategy.schedule": "gpipe"}),
        ({"pipeline_config": {}}, {"strategy.schedule": "1f1b"}),
    ],
)
def test_what_a_mode_sets(arguments: dict[str, Any], expected: dict[str, int]) -> None:
    ms.set_auto_parallel_context(**arguments)
    assert keys() == expected


@pytest.mark.parametrize(
    ("arguments", "planned"),
    [
        ({"parallel_mode": "auto_parallel", "micro_batch_num": 2}, True),
        ({"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2}, True),
        ({"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "micro_batch_num": 2}, False),
        ({"parallel_mode": "data_parallel"}, False),
        ({"device_num": 2}, False),
    ],
)
def test_the_automatic_modes_search_for_what_is_missing(arguments: dict[str, Any], planned: bool) -> None:
    ms.set_auto_parallel_context(**arguments)
    assert AMBIENT.planned is planned
    ms.reset_auto_parallel_context()
    assert not AMBIENT.planned


def test_stand_alone_is_one_device() -> None:
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.STAND_ALONE)
    assert AMBIENT.device_num == 1
    with pytest.raises(ConfigError, match="one device"):
        ms.set_auto_parallel_context(device_num=2)


@pytest.mark.parametrize("name", context.NO_EFFECT)
def test_an_argument_of_set_context_without_effect_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ms.set_context(**{name: 3})
    assert capsys.readouterr().err == f"set_context({name}=3) has no effect: {context.NO_EFFECT[name]}\n"
    assert ms.get_context(name) == 3


@pytest.mark.parametrize("name", parallel_context.NO_EFFECT)
def test_an_argument_of_the_parallel_context_without_effect_says_why(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ms.set_auto_parallel_context(**{name: 3})
    assert parallel_context.NO_EFFECT[name] in capsys.readouterr().err
    assert keys() == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_stges": 4}, ["unknown argument", "pipeline_stages?"]),
        ({"pipeline_stage": 2, "pipeline_stages": 2}, ["names for the same thing"]),
        ({"device_num": 0}, ["device_num = 0", "above 0"]),
        ({"micro_batch_num": True}, ["micro_batch_num = True"]),
        ({"parallel_mode": "full"}, ["parallel_mode = 'full'", "semi_auto_parallel"]),
        ({"parallel_mode": "data_parallel", "pipeline_stages": 2}, ["pipeline_stages = 2", "one stage"]),
        ({"gradients_mean": False}, ["gradients_mean = False", "must be True"]),
        ({"pipeline_config": True}, ["pipeline_config = True", "dictionary"]),
        ({"pipeline_config": {"pipeline_interleaved": True}}, ["pipeline_interleaved", "pipeline_interleave?"]),
        ({"pipeline_config": {"pipeline_interleave": 2}}, ["must be True or False"]),
        ({"pipeline_config": {"pipeline_scheduler": "seqpipe"}}, ["'1f1b' or 'gpipe'"]),
        (
            {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": "gpipe"}},
            ["'1f1b' where stages are interleaved"],
        ),
        ({"enable_parallel_optimizer": 1}, ["True or False"]),
    ],
)
def test_what_the_parallel_context_refuses(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ms.set_auto_parallel_context(**arguments)
    for word in words:
        assert word in str(error.value)


def test_another_number_of_devices_than_the_job_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    ms.set_auto_parallel_context(device_num=4, global_rank=1)
    with pytest.raises(ConfigError, match="device_num = 8: the job has 4 processes"):
        ms.set_auto_parallel_context(device_num=8)
    ms.reset_auto_parallel_context()
    with pytest.raises(ConfigError, match="global_rank = 0: this process has rank 1"):
        ms.set_auto_parallel_context(global_rank=0)
    ms.reset_auto_parallel_context()


def test_another_number_than_the_command_line_gives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_PRESETS", '["devices=4"]')
    with pytest.raises(ConfigError, match="device_num = 8 and --devices = 4: must be equal"):
        ms.set_auto_parallel_context(device_num=8)


def test_graph_mode_is_noted_and_a_device_that_is_overridden_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    ms.set_context(mode=ms.GRAPH_MODE, device_target="Ascend")
    assert "device_target='Ascend'): the device is cpu" in capsys.readouterr().err
    assert (ms.get_context("mode"), AMBIENT.compile_by_rule, keys()) == (ms.GRAPH_MODE, True, {})
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
    assert capsys.readouterr().err == ""
    assert (AMBIENT.compile_by_rule, keys()) == (False, {"device": "cpu", "train.compile": False})
    with pytest.raises(ConfigError, match="PYNATIVE_MODE"):
        AMBIENT.add_to({"train": {"compile": True}})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mod": 0}, ["unknown argument", "mode?"]),
        ({"mode": 3}, ["mode = 3", "PYNATIVE_MODE"]),
        ({"device_target": "TPU"}, ["device_target = 'TPU'", "Ascend, GPU, CPU"]),
    ],
)
def test_what_set_context_refuses(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        ms.set_context(**arguments)
    for word in words:
        assert word in str(error.value)


def test_an_absent_device_names_the_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_DEVICE")
    monkeypatch.setattr("shardwise.launch.devices._has_npu", lambda: False)
    with pytest.raises(ConfigError) as error:
        ms.set_context(device_target="Ascend")
    for word in ("device_target = 'Ascend'", "none", "--device cpu", "SHARDWISE_DEVICE=cpu"):
        assert word in str(error.value)


def test_the_seed_is_that_of_the_run_and_of_python() -> None:
    import random

    import numpy as np

    ms.set_seed(5)
    first = (random.random(), float(np.random.rand()))
    ms.set_seed(5)
    assert (random.random(), float(np.random.rand())) == first
    assert keys() == {"train.seed": 5}
    with pytest.raises(ConfigError, match="set_seed"):
        ms.set_seed(-1)


def test_a_seed_can_be_asked_for() -> None:
    assert ms.get_seed() is None
    ms.set_seed(5)
    assert ms.get_seed() == 5
    ms.dataset.config.set_seed(6)
    assert keys() == {"train.seed": 5, "data.seed": 6}
    with pytest.raises(ConfigError, match=r"config\.set_seed"):
        ms.dataset.config.set_seed(True)


def test_a_device_can_be_set_alone(capsys: pytest.CaptureFixture[str]) -> None:
    ms.set_device("CPU", 0)
    assert "set_device(device_id=0) has no effect" in capsys.readouterr().err
    assert (keys(), ms.get_context("device_target")) == ({"device": "cpu"}, "CPU")
    ms.set_device("Ascend")
    assert "set_device(device_target='Ascend'): the device is cpu" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="device_target = 'NPU': must be one of Ascend, GPU, CPU"):
        ms.set_device("NPU")


def test_settings_of_how_rows_are_read_and_of_bits_say_why_they_have_no_effect(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ms.dataset.config.set_num_parallel_workers(8)
    ms.dataset.config.set_prefetch_size(8)
    ms.dataset.config.set_auto_num_workers(True)
    ms.dataset.config.set_enable_shared_mem(True)
    ms.set_deterministic(True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert all(") has no effect: " in line for line in lines)
    with pytest.raises(ConfigError, match="deterministic = 'ON'"):
        ms.set_deterministic("ON")  # type: ignore[arg-type]


def test_what_the_context_says_and_the_trainer_contradicts() -> None:
    ms.set_auto_parallel_context(pipeline_stages=4)
    assert AMBIENT.add_to({"strategy": {"tp": 2}}) == {"strategy": {"tp": 2, "pp": 4}}
    with pytest.raises(ConfigError, match=r"pipeline_stages = 4: contradicts strategy\.pp = 2"):
        AMBIENT.add_to({"strategy": {"pp": 2}})
