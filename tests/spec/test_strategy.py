"""Given degrees are kept, missing ones filled, and every refusal names something that works."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from shardwise.config import apply_overrides
from shardwise.errors import ConfigError, PlanError
from shardwise.spec.aliases import translate
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.run import RunConfig, StrategyConfig, TrainConfig
from shardwise.spec.strategy import Strategy, default_stages, legal_tensor_degrees, resolve
from tests.spec.model_folder import make_spec


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """4 blocks, 4 heads, 2 KV heads."""
    return make_spec(tmp_path_factory.mktemp("model"))


def _resolve(model: ModelSpec, *overrides: str, local: int = 1) -> tuple[Strategy, int]:
    return resolve(parse_run(apply_overrides({"model": "m"}, overrides)), model, local)


def _degrees(model: ModelSpec, *overrides: str, local: int = 1) -> tuple[int, int, int, int]:
    strategy = _resolve(model, *overrides, local=local)[0]
    return strategy.pp, strategy.dp_replicate, strategy.dp_shard, strategy.tp


@pytest.mark.parametrize(
    ("overrides", "local", "degrees"),
    [
        ([], 1, (1, 1, 1, 1)),
        ([], 8, (1, 1, 8, 1)),
        (["devices=6"], 1, (1, 1, 6, 1)),
        (["devices=6"], 8, (1, 1, 6, 1)),
        (["tp=2"], 1, (1, 1, 1, 2)),
        (["tp=2"], 8, (1, 1, 4, 2)),
        (["tp=2", "pp=2"], 8, (2, 1, 2, 2)),
        (["dp=4"], 1, (1, 1, 4, 1)),
        (["dp=4", "dp_replicate=2"], 1, (1, 2, 2, 1)),
        (["dp=4", "dp_shard=2"], 1, (1, 2, 2, 1)),
        (["dp_replicate=4"], 1, (1, 4, 1, 1)),
        (["dp_replicate=2", "devices=8"], 1, (1, 2, 4, 1)),
        (["dp_shard=2", "devices=8"], 1, (1, 4, 2, 1)),
        (["tp=2", "pp=2", "dp=1"], 8, (2, 1, 1, 2)),
        (["tp=2", "stages=[1, 3]", "dp_replicate=1", "dp_shard=1"], 8, (2, 1, 1, 2)),
        (["stages=[1, 1, 2]"], 1, (3, 1, 1, 1)),
    ],
)
def test_what_is_given_is_kept_and_the_rest_is_data_parallel(
    model: ModelSpec, overrides: list[str], local: int, degrees: tuple[int, ...]
) -> None:
    assert _degrees(model, *overrides, local=local) == degrees


@pytest.mark.parametrize(
    ("overrides", "batch"),
    [
        ([], (8, 8, 1)),  # G, m, M
        (["train.global_batch_size=32"], (32, 8, 4)),
        (["train.global_batch_size=14"], (14, 7, 2)),
        (["train.global_batch_size=11"], (11, 1, 11)),
        (["devices=2"], (8, 4, 1)),
        (["devices=3"], (9, 3, 1)),
        (["micro_batch_size=3"], (9, 3, 3)),
        (["pp=2"], (8, 2, 4)),
        (["pp=4"], (8, 1, 8)),
        (["pp=4", "train.global_batch_size=2"], (2, 1, 2)),
        (["pp=2", "dp=2", "train.global_batch_size=24"], (24, 3, 4)),
        (["micro_batch_size=2", "train.gradient_accumulation_steps=3", "dp=2"], (12, 2, 3)),
    ],
)
def test_the_batch_arithmetic(model: ModelSpec, overrides: list[str], batch: tuple[int, int, int]) -> None:
    strategy, rows = _resolve(model, *overrides)
    assert (rows, strategy.micro_batch_size, strategy.num_micro_batches(rows)) == batch


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tp=3"], ["strategy.tp = 3", "does not divide the 4 attention heads", "1, 2, 4"]),
        (["tp=8"], ["strategy.tp = 8", "4 attention heads", "1, 2, 4"]),
        (["pp=5"], ["strategy.pp = 5", "4 blocks", "1 to 4"]),
        (["stages=[2, 1]"], ["strategy.stages = [2, 1]", "sums to 3", "4 blocks", "[2, 2]"]),
        (["pp=2", "stages=[1, 1, 2]"], ["has 3 entries", "strategy.pp is 2", "[2, 2]"]),
        (["devices=6", "tp=4"], ["devices = 6", "tp 4", "devices=4 or devices=8"]),
        (["devices=3", "tp=2", "dp=2"], ["devices = 3", "product of the degrees is 4", "devices=4"]),
        (["dp=4", "dp_replicate=3"], ["strategy.dp = 4", "dp_replicate = 3", "dp=3"]),
        (["dp=4", "dp_replicate=2", "dp_shard=3"], ["dp_replicate = 2", "dp_shard = 3", "dp=6"]),
        (["dp=4", "dp_replicate=1", "dp_shard=2"], ["dp_replicate = 1", "dp_shard = 2", "dp=2"]),
        (["train.global_batch_size=10", "dp=4", "micro_batch_size=2"], ["= 10", "4 data ranks", "8 or 16"]),
        (["train.global_batch_size=3", "dp=4"], ["= 3: is not divisible by 4 data ranks. Use 4"]),
        (
            ["micro_batch_size=5", "train.global_batch_size=8"],
            ["= 8", "by 1 data rank x micro_batch_size 5 = 5. Use 5 or 10"],
        ),
        (["recompute=5"], ["strategy.recompute = 5", "4 blocks", "at most 4"]),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_what_can(
    model: ModelSpec, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(PlanError) as error:
        _resolve(model, *overrides)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "pp", "stages"),
    [
        (["pp=2"], 2, (1, 1, 1, 1)),  # two stages a rank where nothing is said
        (["pp=2", "virtual_stages=2"], 2, (1, 1, 1, 1)),
        (["pp=2", "stages=[1, 1, 1, 1]"], 2, (1, 1, 1, 1)),
        (["stages=[1, 1, 1, 1]"], 2, (1, 1, 1, 1)),
    ],
)
def test_interleaved_stages(model: ModelSpec, overrides: list[str], pp: int, stages: tuple[int, ...]) -> None:
    strategy, rows = _resolve(model, "schedule=interleaved", *overrides)
    assert (strategy.pp, strategy.stages, strategy.virtual_stages) == (pp, stages, len(stages) // pp)
    assert strategy.world_size == pp
    assert [list(strategy.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]
    Plan(model, strategy, rows, "cpu")


def test_19_every_block_has_its_stage(tmp_path: Path) -> None:
    """Megatron-LM 468: the number of blocks is no multiple of the number of stages, and none is lost."""
    ten, five = make_spec(tmp_path / "10", num_hidden_layers=10), make_spec(tmp_path / "5", num_hidden_layers=5)
    given = ("schedule=interleaved", "pp=2", "virtual_stages=2")
    assert _resolve(ten, *given)[0].stages == (3, 3, 2, 2)  # both ranks hold five blocks
    assert _resolve(five, *given)[0].stages == (2, 1, 1, 1)
    assert _resolve(ten, *given, "stages=[1, 4, 4, 1]")[0].stages == (1, 4, 4, 1)
    assert _resolve(ten, "schedule=interleaved", "pp=2", "stages=[2, 2, 2, 2, 1, 1]")[0].virtual_stages == 3


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["schedule = interleaved", "strategy.pp is 1", "strategy.pp=2 or more", "schedule=1f1b"]),
        (["pp=2", "virtual_stages=3"], ["pp = 2", "virtual_stages = 3", "4 blocks", "virtual_stages=2"]),
        (["pp=3"], ["pp = 3 with strategy.virtual_stages = 2", "4 blocks", "strategy.pp=2, or", "schedule=1f1b"]),
        (["pp=9", "virtual_stages=4"], ["4 blocks", "strategy.pp=4 with strategy.schedule=1f1b"]),
        (["pp=2", "stages=[2, 2]"], ["has 2 entries", "virtual_stages is 4", "[1, 1, 1, 1]"]),
        (["pp=2", "virtual_stages=2", "stages=[2, 1, 1]"], ["has 3 entries", "virtual_stages is 4"]),
        (["pp=2", "stages=[2, 1, 1, 1]"], ["sums to 5", "4 blocks", "[1, 1, 1, 1]"]),
        (["stages=[2, 1, 1]"], ["strategy.pp is 1"]),
    ],
)
def test_interleaved_stages_that_cannot_be_are_refused_with_what_can(
    model: ModelSpec, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(PlanError) as error:
        _resolve(model, "schedule=interleaved", *overrides)
    for word in words:
        assert word in str(error.value)


def test_kv_heads_are_split_whole_or_shared_by_whole_ranks(tmp_path: Path) -> None:
    assert legal_tensor_degrees(make_spec(tmp_path, num_attention_heads=4, num_key_value_heads=2)) == [1, 2, 4]
    smol = make_spec(tmp_path, hidden_size=72, num_attention_heads=9, num_key_value_heads=3)
    assert legal_tensor_degrees(smol) == [1, 3, 9]
    # 4 divides the 12 heads, and neither divides the 6 KV heads nor is a multiple of them.
    odd = make_spec(tmp_path, hidden_size=48, num_attention_heads=12, num_key_value_heads=6)
    assert legal_tensor_degrees(odd) == [1, 2, 3, 6, 12]
    with pytest.raises(PlanError, match=r"tp = 4.*neither divides the 6 KV heads.*1, 2, 3, 6, 12"):
        _resolve(odd, "tp=4")
    narrow = make_spec(tmp_path, intermediate_size=2)
    with pytest.raises(PlanError, match=r"tp = 4.*FFN width 2.*1, 2"):
        _resolve(narrow, "tp=4")


@hypothesis_settings(deadline=None)
@given(st.integers(1, 100), st.integers(1, 30))
def test_default_stages_are_even_and_the_last_is_never_larger(num_blocks: int, pp: int) -> None:
    assume(pp <= num_blocks)
    stages = default_stages(num_blocks, pp)
    assert (len(stages), sum(stages)) == (pp, num_blocks)
    assert max(stages) - min(stages) <= 1
    assert stages[-1] == min(stages)


def test_reshard_recompute_and_schedule_follow_the_defaults(model: ModelSpec) -> None:
    assert _resolve(model)[0].reshard
    assert not _resolve(model, "pp=2")[0].reshard
    assert _resolve(model, "pp=2", "reshard=true")[0].reshard
    assert [_resolve(model, f"recompute={given}")[0].recompute for given in ("none", "full", "0", "3")] == [0, -1, 0, 3]
    assert _resolve(model, "schedule=gpipe")[0].schedule == "gpipe"


def test_sequence_parallel_needs_tensor_ranks(model: ModelSpec) -> None:
    assert _resolve(model, "tp=2", "sequence_parallel=true")[0].sequence_parallel
    assert not _resolve(model, "tp=2")[0].sequence_parallel
    tree = {"model": "m", "parallel_config": {"model_parallel": 2, "use_seq_parallel": True}}
    assert resolve(parse_run(translate(tree)[0]), model, 1)[0].sequence_parallel
    with pytest.raises(PlanError, match=r"strategy\.tp is 1\. Use strategy\.tp=2") as error:
        _resolve(model, "sequence_parallel=true")
    assert error.value.value == "strategy.sequence_parallel = true"


def test_a_strategy_survives_json_and_reads_as_its_degrees() -> None:
    strategy = Strategy(pp=2, dp_shard=3, tp=4, stages=(3, 1), micro_batch_size=2, recompute=-1)
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert str(strategy) == "pp 2 x dp_shard 3 x tp 4"
    assert str(replace(strategy, pp=1, dp_shard=1, tp=1)) == "one device"
    assert (strategy.dp, strategy.world_size) == (3, 24)


degrees = st.none() | st.integers(1, 6)
splits = st.fixed_dictionaries(
    dict.fromkeys(("pp", "tp", "dp", "dp_replicate", "dp_shard", "micro_batch_size"), degrees)
)


def _run(split: dict[str, Any], devices: int | None, rows: int | None) -> RunConfig:
    train = TrainConfig(global_batch_size=rows)
    return RunConfig(model="m", devices=devices, strategy=StrategyConfig(**split), train=train)


def _remedied(run: RunConfig, remedy: str) -> list[RunConfig]:
    """The run as each of the numbers that a message names would make it."""
    numbers = [int(number) for number in re.findall(r"\d+", remedy)]
    if "devices=" in remedy:
        return [run.model_copy(update={"devices": number}) for number in numbers]
    if remedy.startswith("Leave dp out"):
        changes = [{"dp": None}, {"dp": numbers[0]}]
        return [run.model_copy(update={"strategy": run.strategy.model_copy(update=change)}) for change in changes]
    if remedy.startswith("legal degrees: 1 to"):
        strategy = run.strategy.model_copy(update={"pp": numbers[-1]})
        return [run.model_copy(update={"strategy": strategy})]
    if remedy.startswith("legal degrees"):
        return [
            run.model_copy(update={"strategy": run.strategy.model_copy(update={"tp": number})}) for number in numbers
        ]
    assert remedy.startswith("Use "), remedy
    return [
        run.model_copy(update={"train": run.train.model_copy(update={"global_batch_size": number})})
        for number in numbers
    ]


@hypothesis_settings(deadline=None)
@given(splits, st.none() | st.integers(1, 24), st.none() | st.integers(1, 40), st.integers(1, 8))
def test_a_run_resolves_to_its_own_degrees_or_each_remedy_removes_the_refusal(
    model: ModelSpec, split: dict[str, Any], devices: int | None, rows: int | None, local: int
) -> None:
    run = _run(split, devices, rows)
    try:
        strategy, resolved_rows = resolve(run, model, local)
    except PlanError as error:
        for remedied in _remedied(run, error.remedy):
            try:
                resolve(remedied, model, local)
            except PlanError as next_error:  # another rule may be broken too, but not this one
                assert (next_error.rule, next_error.remedy) != (error.rule, error.remedy), (error, next_error)
        return
    assert devices in (None, strategy.world_size)
    assert rows in (None, resolved_rows)
    for name in ("pp", "tp", "dp", "dp_replicate", "dp_shard", "micro_batch_size"):
        assert split[name] in (None, getattr(strategy, name))
    micro_batches = strategy.num_micro_batches(resolved_rows)
    assert strategy.dp * strategy.micro_batch_size * micro_batches == resolved_rows
    Plan(model, strategy, resolved_rows, "cpu")  # what is resolved is also a legal plan


@hypothesis_settings(deadline=None)
@given(st.integers(1, 9), st.none() | st.integers(2, 5), st.integers(1, 12))
def test_the_remedies_of_interleaved_stages_lead_to_a_run(
    model: ModelSpec, pp: int, virtual: int | None, num_blocks: int
) -> None:
    given: dict[str, Any] = {"pp": pp, "schedule": "interleaved", "virtual_stages": virtual}
    sized = replace(model, num_blocks=num_blocks)
    for _ in range(3):  # pp=2 in place of pp=1 may be more stages than blocks, which the next message says
        try:
            strategy, rows = resolve(_run(given, None, None), sized, 1)
        except PlanError as error:
            if "with strategy.schedule=1f1b" in error.remedy:
                given = {"schedule": "1f1b"}
            changes = re.findall(r"strategy\.(pp|virtual_stages)=(\d+)", error.remedy)
            assert changes, error
            given |= {name: int(number) for name, number in changes}
            continue
        assert (len(strategy.stages), sum(strategy.stages)) == (strategy.num_stages, num_blocks)
        Plan(sized, strategy, rows, "cpu")
        return
    raise AssertionError(f"no remedy works for {given}")


def test_no_rank_is_left_without_a_part_of_the_vocabulary(tmp_path: Path) -> None:
    assert legal_tensor_degrees(make_spec(tmp_path, num_attention_heads=4, vocab_size=5)) == [1, 2]  # 2, 2, 1, 0
    assert legal_tensor_degrees(make_spec(tmp_path, num_attention_heads=4, vocab_size=7)) == [1, 2, 4]  # 2, 2, 2, 1


def test_numbers_beyond_all_devices_are_answered_at_once(model: ModelSpec) -> None:
    tree = {"model": "m", "train": {"global_batch_size": 2**40}, "strategy": {"pp": 2}}
    strategy, rows = resolve(parse_run(tree), model, 1)
    assert rows % strategy.micro_batch_size == 0
    with pytest.raises(ConfigError, match=r"train\.global_batch_size = .*less than or equal to"):
        parse_run({"model": "m", "train": {"global_batch_size": 2**41}})
