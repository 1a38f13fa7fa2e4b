"""Our action lists on torch's pipeline runtime: the one file that touches its private parts.

``_PipelineScheduleRuntime`` lowers compute actions to sends, receives, FSDP gathers and reductions, and
runs them. Written against torch 2.13; ``tests/parallel/test_engine.py`` fails where a version moves
what is used here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from shardwise.errors import ShardwiseError
from shardwise.parallel.pipeline import Stage
from shardwise.spec.schedule import ActionLists, action_lists, forward_only
from shardwise.spec.strategy import Strategy

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# A schedule object keeps its receive buffers; lengths come back, but not all of them need to stay.
MAX_CACHED_SHAPES = 4
GATHERED_STAGES = 3  # of a rank, at the same time, where FSDP gives weights back: one each way, and the next


@dataclass(frozen=True)
class StageShapes:
    """The static shapes of a step: ``rows`` x ``length`` of each of ``num_micro_batches``, and the logits."""

    rows: int
    length: int
    num_micro_batches: int
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
        try:
            self._step_microbatches(inputs, kwargs, targets, losses, return_outputs=False)
        except RuntimeError as error:  # so torch wraps whatever a stage raises
            if isinstance(error.__cause__, ShardwiseError):
                raise error.__cause__ from None
            raise


class PipelineEngine:
    """Runs a step of this rank's stages; caches torch's stage and schedule objects by the step's shapes."""

    def __init__(
        self, stages: Sequence[Stage], strategy: Strategy, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.stages, self.strategy, self.group, self.device = tuple(stages), strategy, group, device
        self.num_ranks = dist.get_world_size(group)
        self.num_stages = self.num_ranks * len(self.stages)
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
            The loss of each micro-batch on the rank of the last stage, an empty list elsewhere.
        """
        runtime = self._runtime(shapes, backward)
        runtime._loss_fn = loss_function
        losses: list[torch.Tensor] = []
        is_first, is_last = self.stages[0].is_first, self.stages[-1].is_last
        runtime.run(
            [(ids,) if is_first else () for ids in input_ids],  # other stages of the rank do not look at them
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
        stages = [
            PipelineStage(
                stage,
                stage.index,
                self.num_stages,
                self.device,
                input_args=_border(stage, shapes, backward, incoming=True),
                output_args=_border(stage, shapes, backward, incoming=False),
                group=self.group,
                # Torch's own split runs the graph twice, recomputation and custom functions included.
                dw_builder=None if stage.deferred is None else stage.deferred.take,
            )
            for stage in self.stages
        ]
        number = shapes.num_micro_batches
        runtime = _Runtime(stages, number, loss_fn=lambda output, target: output, scale_grads=False)
        runtime._has_backward = backward
        runtime.pipeline_order_with_comms = self._lowered(number, backward)
        return runtime

    def _lowered(self, num_micro_batches: int, backward: bool) -> dict[int, list[_Action]]:
        """The actions of every rank with what torch adds to them: FSDP's gathers and reductions, sends, receives.

        Torch's own way in (``_prepare_schedule_with_comms``) wants a backward for each forward, which evaluation
        does not have, and gives back the weights of all but three stages, which ZeRO-2 keeps.
        """
        num_ranks, virtual = self.num_ranks, len(self.stages)
        if backward:
            lists = action_lists(self.strategy.schedule, num_ranks, num_micro_batches, virtual)
        else:
            lists = forward_only(num_ranks, num_micro_batches, virtual)
        active = GATHERED_STAGES if self.strategy.reshard else max(GATHERED_STAGES, virtual)
        lowered = {rank: _add_unshard_reshard(actions, active) for rank, actions in _torch_actions(lists).items()}
        if backward:
            lowered = {rank: _add_reduce_grad(actions, num_micro_batches) for rank, actions in lowered.items()}
        return _add_send_recv(lowered, lambda stage: stage % num_ranks, self.num_stages)


def _border(stage: Stage, shapes: StageShapes, backward: bool, *, incoming: bool) -> tuple[torch.Tensor, ...]:
    """Static metadata of a stage's input or output: without it torch runs the stage on garbage to find out."""
    rows = (shapes.rows, shapes.length)
    if incoming and stage.is_first:
        return (torch.empty(rows, dtype=torch.int64, device="meta"),)
    if not incoming and stage.is_last:
        size = (*rows, shapes.local_vocab_size)
        return (torch.empty(size, dtype=shapes.dtype, device="meta", requires_grad=backward),)
    end = 0 if incoming else 1
    return tuple(
        torch.empty(shape.of(*rows), dtype=shape.dtype, device="meta", requires_grad=backward and needs_grad)
        for shape, needs_grad in zip(stage.shapes_at_ends[end], stage.grads_at_ends[end], strict=True)
    )


def _torch_actions(lists: ActionLists) -> dict[int, list[_Action | None]]:
    kinds = {
        "forward": _ComputationType.FORWARD,
        "backward": _ComputationType.FULL_BACKWARD,
        "backward_input": _ComputationType.BACKWARD_INPUT,
        "backward_weight": _ComputationType.BACKWARD_WEIGHT,
    }
    return {
        rank: [_Action(action.stage, kinds[action.kind], action.micro_batch) for action in actions]
        for rank, actions in lists.items()
    }
