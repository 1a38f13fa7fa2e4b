"""Our action lists are those of torch's own schedule classes.

Torch's loops are run on a stage that only writes down what it is told to do. Their ``_get_pipeline_order``, which is
there for display, is compared too, but for the forward passes of the last stage: torch 2.13 lists them there one too
high under 1F1B (the loop itself does not run them so).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    _add_send_recv,
)

from shardwise.parallel.engine import _torch_actions
from shardwise.spec.schedule import Action, action_lists

_CLASSES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_KINDS = {
    "FORWARD": "forward",
    "FULL_BACKWARD": "backward",
    "BACKWARD_INPUT": "backward_input",
    "BACKWARD_WEIGHT": "backward_weight",
}
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
    for stage, ours in action_lists(name, num_stages, num_micro_batches).items():
        shown = [
            (action.stage_index, _KINDS[action.computation_type.name], action.microbatch_index)
            for action in schedule._get_pipeline_order()[stage]
            if action is not None and action.computation_type.name in _KINDS
        ]
        if name == "1f1b" and stage == num_stages - 1:
            shown = [(s, kind, m - 1 if kind == "forward" else m) for s, kind, m in shown]
        assert shown == [tuple(action) for action in ours]


# Torch wants rounds of one length, so 5 micro-batches over 2 ranks are ours alone; 3 over 2 and 10 over 4 it takes.
_INTERLEAVED = [(2, 2, 2), (2, 3, 2), (2, 8, 4), (3, 3, 3), (3, 9, 2), (4, 10, 2), (4, 16, 3)]


@pytest.mark.parametrize(("num_ranks", "num_micro_batches", "virtual_stages"), _INTERLEAVED)
def test_our_interleaved_lists_are_torchs(num_ranks: int, num_micro_batches: int, virtual_stages: int) -> None:
    place = SimpleNamespace(num_stages=num_ranks * virtual_stages, group_size=num_ranks, group_rank=0)
    stages: Any = [SimpleNamespace(**vars(place)) for _ in range(virtual_stages)]
    schedule = ScheduleInterleaved1F1B(stages, num_micro_batches)
    theirs = {
        rank: [
            (action.stage_index, _KINDS[action.computation_type.name], action.microbatch_index)
            for action in actions
            if action is not None
        ]
        for rank, actions in schedule.pipeline_order.items()
    }
    ours = action_lists("interleaved", num_ranks, num_micro_batches, virtual_stages)
    assert theirs == {rank: [tuple(action) for action in actions] for rank, actions in ours.items()}


@pytest.mark.parametrize("num_micro_batches", [4, 5, 7, 8, 13])
@pytest.mark.parametrize(("num_ranks", "virtual_stages"), [(2, 2), (2, 3), (4, 2), (3, 4), (2, 1), (4, 1)])
def test_no_send_waits_for_ever_even_where_it_blocks(
    num_ranks: int, virtual_stages: int, num_micro_batches: int
) -> None:
    """Sends and receives as torch adds them, on a device where each waits for the other side to arrive."""
    name = "interleaved" if virtual_stages > 1 else "zero_bubble"
    lists = _torch_actions(action_lists(name, num_ranks, num_micro_batches, virtual_stages))
    lowered = _add_send_recv(lists, lambda stage: stage % num_ranks, num_ranks * virtual_stages)  # type: ignore[arg-type]
    queues = {
        rank: [(a.stage_index, a.computation_type.name, a.microbatch_index) for a in lowered[rank]] for rank in lowered
    }
    step = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1)}
    while any(queues.values()):
        before = sum(map(len, queues.values()))
        for queue in queues.values():
            while queue and queue[0][1] in _KINDS:
                queue.pop(0)
            if queue and queue[0][1] in step:
                stage, kind, micro_batch = queue[0]
                wanted, towards = step[kind]
                peer = queues[(stage + towards) % num_ranks]
                if peer and peer[0] == (stage + towards, wanted, micro_batch):
                    queue.pop(0)
                    peer.pop(0)
        assert sum(map(len, queues.values())) < before, "every rank waits for another"
