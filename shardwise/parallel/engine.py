"""Our action lists on torch's pipeline runtime: the one file that touches its private parts.

``_PipelineScheduleRuntime`` lowers compute actions to sends, receives, FSDP gathers and reductions, and
runs them. Written against torch 2.13; ``tests/parallel/test_engine.py`` fails where a version moves
what is used here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from shardwise.parallel.pipeline import Stage
from shardwise.spec.schedule import ActionLists, action_lists, forward_only

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# A schedule object keeps its receive buffers; lengths come back, but not all of them need to stay.
MAX_CACHED_SHAPES = 4


@dataclass(frozen=True)
class StageShapes:
    """The static shapes of a step: ``rows`` x ``length`` of each of ``num_micro_batches``, and the widths."""

    rows: int
    length: int
    num_micro_batches: int
    hidden_size: int
    local_vocab_size: int
    dtype: torch.dtype


class _Runtime(_PipelineScheduleRuntime):
    """Torch's runtime, fed with micro-batches that are already apart."""

    def run(
        self,
        inputs: list[tuple[torch.Tensor, ...]],
        kwargs: list[dict[str, torch.Tensor]],
        targets: list[torch.Tensor] | None,
        losses: list[torch.Tensor] | None,
    ) -> None:
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(inputs, kwargs, targets, losses, return_outputs=False)


class PipelineEngine:
    """Runs a step of one stage; caches torch's stage and schedule objects by the step's shapes."""

    def __init__(self, stage: Stage, schedule: str, group: dist.ProcessGroup, device: torch.device) -> None:
        self.stage, self.schedule, self.group, self.device = stage, schedule, group, device
        self.index, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self._runtimes: OrderedDict[tuple[bool, StageShapes], _Runtime] = OrderedDict()

    def run(
        self,
        shapes: StageShapes,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor,
        loss_function: LossFunction,
        backward: bool,
    ) -> list[torch.Tensor]:
        """One step over all micro-batches; all tensors are [micro-batches, rows, length].

        Returns:
            The loss of each micro-batch on the last stage, an empty list elsewhere.
        """
        runtime = self._runtime(shapes, backward)
        runtime._loss_fn = loss_function
        losses: list[torch.Tensor] = []
        is_last = self.index == self.num_stages - 1
        runtime.run(
            [(ids,) if self.stage.is_first else () for ids in input_ids],
            [
                # Later stages get the ids too: some models compute masks from them.
                {"position_ids": positions, "input_ids": ids}
                for positions, ids in zip(position_ids, input_ids, strict=True)
            ],
            list(targets) if is_last else None,
            losses if is_last else None,
        )
        return losses

    def _runtime(self, shapes: StageShapes, backward: bool) -> _Runtime:
        key = (backward, shapes)
        if key not in self._runtimes:
            self._runtimes[key] = self._build(shapes, backward)
            if len(self._runtimes) > MAX_CACHED_SHAPES:
                self._runtimes.popitem(last=False)
        self._runtimes.move_to_end(key)
        return self._runtimes[key]

    def _build(self, shapes: StageShapes, backward: bool) -> _Runtime:
        stage = PipelineStage(
            self.stage,
            self.index,
            self.num_stages,
            self.device,
            input_args=self._border(shapes, backward, incoming=True),
            output_args=self._border(shapes, backward, incoming=False),
            group=self.group,
        )
        runtime = _Runtime([stage], shapes.num_micro_batches, loss_fn=lambda output, target: output, scale_grads=False)
        runtime._has_backward = backward
        if backward:
            lists = action_lists(self.schedule, self.num_stages, shapes.num_micro_batches)
            runtime._prepare_schedule_with_comms(_torch_actions(lists))
        else:  # torch's own check wants a backward for each forward, so evaluation is lowered here
            lists = forward_only(self.num_stages, shapes.num_micro_batches)
            lowered = {rank: _add_unshard_reshard(actions) for rank, actions in _torch_actions(lists).items()}
            runtime.pipeline_order_with_comms = _add_send_recv(lowered, lambda stage: stage, self.num_stages)
        return runtime

    def _border(self, shapes: StageShapes, backward: bool, *, incoming: bool) -> torch.Tensor:
        """Static metadata of a stage's input or output: without it torch runs the stage on garbage to find out."""
        rows = (shapes.rows, shapes.length)
        if incoming and self.stage.is_first:
            return torch.empty(rows, dtype=torch.int64, device="meta")
        is_logits = not incoming and self.index == self.num_stages - 1
        width = shapes.local_vocab_size if is_logits else shapes.hidden_size
        return torch.empty((*rows, width), dtype=shapes.dtype, device="meta", requires_grad=backward)


def _torch_actions(lists: ActionLists) -> dict[int, list[_Action | None]]:
    kinds = {"forward": _ComputationType.FORWARD, "backward": _ComputationType.FULL_BACKWARD}
    return {
        rank: [_Action(action.stage, kinds[action.kind], action.micro_batch) for action in actions]
        for rank, actions in lists.items()
    }
