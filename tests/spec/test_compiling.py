"""The rule behind GRAPH_MODE."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.compiling import COMPILE_SECONDS, SAVED_SHARE, block_seconds, compile_rule
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.rules import parse_run
from shardwise.spec.strategy import Strategy
from tests.spec.model_folder import make_spec

RUN = parse_run({"model": "m", "data": {"max_length": 128}})


def _plan(model: ModelSpec, **degrees: int) -> Plan:
    pp = degrees.get("pp", 1)
    return Plan(model, Strategy(**degrees, stages=(4 // pp,) * pp), 8, "cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return make_spec(tmp_path_factory.mktemp("m") / "m", hidden_size=512, intermediate_size=2048)


def test_seconds_are_six_flops_a_parameter_and_token(model: ModelSpec) -> None:
    tokens, parameters = 8 * 64, 4 * (512 * (512 + 256 + 256 + 512) + 3 * 512 * 2048 + 2 * 512)  # 64: all positions
    assert block_seconds(RUN, _plan(model), 10) == pytest.approx(10 * 6 * parameters * tokens / 5e10)
    assert block_seconds(RUN, _plan(model, tp=2), 10) == pytest.approx(block_seconds(RUN, _plan(model), 10) / 2)
    assert block_seconds(RUN, _plan(model, pp=2), 10) == pytest.approx(block_seconds(RUN, _plan(model), 10) / 2)
    assert block_seconds(RUN, _plan(model, dp_shard=2), 10) == pytest.approx(block_seconds(RUN, _plan(model), 10) / 2)


@given(steps=st.integers(1, 10**6))
def test_a_job_is_compiled_from_the_step_on_at_which_it_pays(model: ModelSpec, steps: int) -> None:
    plan = _plan(model)
    compiled, reason = compile_rule(RUN, plan, steps, True)
    assert compiled is (SAVED_SHARE * block_seconds(RUN, plan, steps) >= COMPILE_SECONDS["cpu"])
    assert reason.startswith("blocks are compiled" if compiled else "blocks run eagerly")
    assert f"{steps} steps" in reason


def test_without_a_compiler_blocks_run_eagerly(model: ModelSpec) -> None:
    assert compile_rule(RUN, _plan(model), 10**9, False) == (
        False,
        "blocks run eagerly: this machine has no compiler for them",
    )
    assert compile_rule(RUN, _plan(model), 10**9, True)[0]
    dropped = parse_run({"model": "m", "lora": {"dropout": 0.1}})
    assert "lora.dropout = 0.1" in compile_rule(dropped, _plan(model), 10**9, True)[1]
    assert not compile_rule(RUN, replace(_plan(model), device_type="cuda"), 2, True)[0]
