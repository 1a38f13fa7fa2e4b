"""What the engine uses of torch's private parts is still there, with the arguments that it passes."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.distributed.pipelining import PipelineStage, schedules

from shardwise.errors import PlanError
from shardwise.parallel import engine

RUNTIME = schedules._PipelineScheduleRuntime


@pytest.mark.parametrize(
    ("function", "used"),
    [
        (schedules._Action, ["stage_index", "computation_type", "microbatch_index"]),
        (schedules._add_send_recv, ["compute_actions", "stage_to_rank", "num_stages"]),
        (schedules._add_unshard_reshard, ["compute_actions", "max_active_stages"]),
        (schedules._add_reduce_grad, ["actions", "n_microbatches"]),
        (RUNTIME._step_microbatches, ["self", "arg_mbs", "kwarg_mbs", "target_mbs", "losses", "return_outputs"]),
        (PipelineStage.clear_runtime_states, ["self"]),
    ],
)
def test_private_functions_take_what_the_engine_passes(function, used):
    assert list(inspect.signature(function).parameters)[: len(used)] == used, torch.__version__


def test_a_stage_hands_over_the_second_half_of_a_backward_pass():
    assert "dw_builder" in inspect.signature(PipelineStage).parameters
    source = inspect.getsource(PipelineStage.backward_one_chunk)
    assert "self.dw_runner[bwd_chunk_id] = self.dw_builder()" in source, torch.__version__


def test_a_schedule_reads_the_attributes_that_the_engine_sets():
    source = inspect.getsource(schedules)
    for attribute in ("pipeline_order_with_comms", "self._loss_fn", "self._has_backward", "has_backward"):
        assert attribute in source, torch.__version__
    assert {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"} <= set(
        schedules._ComputationType.__members__
    )


def test_a_refusal_inside_a_stage_arrives_as_itself(monkeypatch):
    def step(*_, **__):
        raise RuntimeError("[Stage 1] failed to run forward") from PlanError("strategy.pp = 2", "a rule", "Use pp=1")

    runtime = engine._Runtime.__new__(engine._Runtime)
    monkeypatch.setattr(runtime, "_stages", [], raising=False)
    monkeypatch.setattr(runtime, "_step_microbatches", step)
    with pytest.raises(PlanError, match="a rule"):
        runtime.run([], [], None, None)
    assert "raise RuntimeError(exc_msg) from e" in inspect.getsource(PipelineStage.forward_one_chunk)
