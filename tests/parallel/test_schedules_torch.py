"""Our action lists are those of torch's own schedule classes.

Torch's loops are run on a stage that only writes down what it is told to do. Their ``_get_pipeline_order``, which is
there for display, is compared too, but for the forward passes of the last stage: torch 2.13 lists them there one too
high under 1F1B (the loop itself does not run them so).
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe

from shardwise.spec.schedule import Action, action_lists

_CLASSES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 4), (4, 4), (4, 9), (7, 16)]


class _Recorder:
    """A pipeline stage that computes and sends nothing."""

    device = "cpu"
    has_backward = True

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.actions: list[Action] = []

    def forward_one_chunk(self, micro_batch: int, *_: Any, **__: Any) -> None:
        self.actions.append(Action(self.stage_index, "forward", micro_batch))

    def backward_one_chunk(self, micro_batch: int, **_: Any) -> None:
        self.actions.append(Action(self.stage_index, "backward", micro_batch))

    def perform_reduce_grad(self, _: int) -> None:
        pass

    def _nothing_to_send(self, _: int) -> list[Any]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing_to_send


def _schedule(name: str, stage: int, num_stages: int, num_micro_batches: int) -> tuple[Any, _Recorder]:
    recorder = _Recorder(stage, num_stages)
    schedule: Any = _CLASSES[name](recorder, num_micro_batches)  # type: ignore[arg-type]
    schedule._initialize_stage = lambda *_: None
    return schedule, recorder


@pytest.mark.parametrize("name", _CLASSES)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), _SIZES)
def test_our_lists_are_what_torchs_loops_do(name: str, num_stages: int, num_micro_batches: int) -> None:
    for stage, ours in action_lists(name, num_stages, num_micro_batches).items():
        schedule, recorder = _schedule(name, stage, num_stages, num_micro_batches)
        schedule._step_microbatches([()] * num_micro_batches, [{}] * num_micro_batches)
        assert recorder.actions == ours


@pytest.mark.parametrize("name", _CLASSES)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), _SIZES)
def test_our_lists_are_what_torch_displays(name: str, num_stages: int, num_micro_batches: int) -> None:
    schedule, _ = _schedule(name, 0, num_stages, num_micro_batches)
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    for stage, ours in action_lists(name, num_stages, num_micro_batches).items():
        shown = [
            (action.stage_index, kinds[action.computation_type.name], action.microbatch_index)
            for action in schedule._get_pipeline_order()[stage]
            if action is not None and action.computation_type.name in kinds
        ]
        if name == "1f1b" and stage == num_stages - 1:
            shown = [(s, kind, m - 1 if kind == "forward" else m) for s, kind, m in shown]
        assert shown == [tuple(action) for action in ours]
