"""MindFormers' ``parallel_config`` as other names for our keys."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.spec.aliases import translate
from shardwise.spec.rules import parse_run


def test_every_name_has_its_key() -> None:
    section = {
        "data_parallel": 4,
        "model_parallel": 2,
        "pipeline_stage": 2,
        "micro_batch_num": 4,
        "context_parallel": 1,
        "expert_parallel": 1,
        "use_seq_parallel": False,
        "gradient_aggregation_group": 3,
        "optimizer_shard": True,
        "vocab_emb_dp": False,
        "micro_batch_interleave_num": 1,
    }
    tree, notes = translate({"model": "m", "parallel_config": section, "strategy": {"micro_batch_size": 2}})
    run = parse_run(tree)
    assert notes == []
    assert (run.strategy.dp, run.strategy.tp, run.strategy.pp, run.strategy.dp_replicate) == (4, 2, 2, 1)
    assert (run.train.gradient_accumulation_steps, run.strategy.gradient_aggregation_group) == (4, 3)
    assert (run.strategy.cp, run.strategy.ep, run.strategy.sequence_parallel) == (1, 1, False)


def test_whole_copies_and_an_empty_section() -> None:
    assert translate({"parallel_config": {"optimizer_shard": False}})[0] == {"strategy": {"dp_shard": 1}}
    assert translate({"model": "m", "parallel_config": None}) == ({"model": "m"}, [])


def test_mindformers_number_of_interleaved_stages_brings_its_schedule() -> None:
    run = parse_run(translate({"model": "m", "parallel_config": {"pipeline_stage": 2, "pp_interleave_num": 2}})[0])
    assert (run.strategy.pp, run.strategy.schedule, run.strategy.virtual_stages) == (2, "interleaved", 2)
    one = parse_run(translate({"model": "m", "parallel_config": {"pp_interleave_num": 1}})[0])
    assert (one.strategy.schedule, one.strategy.virtual_stages) == ("1f1b", 1)
    with pytest.raises(ConfigError, match="pp_interleave_num stands for"):
        translate({"parallel_config": {"pp_interleave_num": 2}, "strategy": {"schedule": "gpipe"}})


def test_a_name_without_effect_says_why() -> None:
    tree, notes = translate({"parallel_config": {"vocab_emb_dp": True}})
    assert tree == {}
    assert len(notes) == 1
    assert "vocab_emb_dp" in notes[0]
    assert "embedding" in notes[0]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"parallel_config": 3}, ["parallel_config = 3", "section"]),
        ({"parallel_config": {"model_paralel": 2}}, ["unknown key", "model_parallel?"]),
        ({"parallel_config": {"model_parallel": 2}, "strategy": {"tp": 4}}, ["two names", "tp = 4"]),
        ({"parallel_config": {"optimizer_shard": 4}}, ["optimizer_shard = 4", "true or false"]),
        ({"parallel_config": {"micro_batch_interleave_num": 2}}, ["must be 1"]),
    ],
)
def test_what_is_refused(tree: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        translate(tree)
    for word in words:
        assert word in str(error.value)
