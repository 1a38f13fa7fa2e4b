"""What crosses a border between two stages: taken in at its front, collected behind, and its form on this rank."""

from __future__ import annotations

import copy
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.chain import Chain, Untraceable, Value, record_pass
from shardwise.models.flow import RETURNED, Place, Shape, template_of, tensor_at
from shardwise.models.structure import Structure
from shardwise.models.trace import SIZES, fake_forward
from shardwise.spec.layout import ParamLayout
from shardwise.tensor.execute import apply_table
from shardwise.tensor.table import ShardingTable


class Received:
    """What a stage has received for the micro-batch that it computes, by the part that made it.

    ``like`` are the position ids [rows, length] of the micro-batch. ``at_blocks`` is True from where the pass comes to
    the stage's own blocks until it ends.
    """

    def __init__(self, border: Sequence[Value]) -> None:
        self.border = tuple(border)
        self.values: dict[Value, torch.Tensor] = {}
        self.like = torch.empty(0, 0)
        self.at_blocks = False
        self._calls: dict[str, int] = {}

    def take(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        """``tensors`` came over the border."""
        self.values = dict(zip(self.border, tensors, strict=True))
        self.like = like
        self.at_blocks = False
        self._calls = {}

    def drop(self) -> None:
        """The pass ends."""
        self.values = {}
        self.at_blocks = False

    def of(self, name: str) -> dict[Place, Any]:
        """The tensors that the part ``name`` has made, in as many calls of it as this is in the pass.

        What the model changes in place is a copy: the received tensor may be handed on, and is a leaf.
        """
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        own = {v: tensor for v, tensor in self.values.items() if v.module == name and v.call == call}
        return {value.place: tensor.clone() if value.changed else tensor for value, tensor in own.items()}


class Sent:
    """Collects what crosses the border behind a stage, as the parts of the stage make it."""

    def __init__(self, border: Sequence[Value], received: Received) -> None:
        self.border, self.received = tuple(border), received
        self.values: dict[Value, torch.Tensor] = {}
        self._watching = False
        self._calls: dict[str, int] = {}

    def begin(self, model: nn.Module) -> None:
        """A pass begins; what is handed through is there already."""
        self.values, self._calls = dict(self.received.values), {}
        if not self._watching:  # at the first pass: so the hooks see what all others leave of a result
            self._watching = True
            for name in sorted({value.module for value in self.border} - {v.module for v in self.received.border}):
                model.get_submodule(name).register_forward_hook(self._hook(name), with_kwargs=True)

    def take(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the border, as they are sent."""
        tensors = tuple(self.values[value].contiguous() for value in self.border)
        self.values = {}
        return tensors

    def _hook(self, name: str) -> Any:
        wanted = [value for value in self.border if value.module == name]

        def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
            call = self._calls.get(name, 0)
            self._calls[name] = call + 1
            for value in wanted:
                if value.call != call:
                    continue
                kind, *place = value.place
                results = out if kind == RETURNED else dict(enumerate(args)) | kwargs
                tensor = tensor_at(results, tuple(place))
                self.values[value] = tensor.clone() if value.changed else tensor

        return after


def need_gradients(border: Sequence[Value], trains_before: bool, trained: Set[str]) -> tuple[bool, ...]:
    """Which tensors of a border depend on something that trains."""
    return tuple(
        trains_before
        and value.shape.dtype.is_floating_point
        and (value.parameters is None or not value.parameters.isdisjoint(trained))
        for value in border
    )


def local_shapes(
    model: PreTrainedModel, structure: Structure, chain: Chain, table: ShardingTable, rank: int
) -> dict[Value, Shape]:
    """The shapes of what crosses borders, on tensor rank ``rank``: keys and values are of its heads alone.

    They are told by a pass of a split copy of ``model`` (whole, on meta) on tensors without numbers. The hidden state
    is whole on every rank.

    Raises:
        PlanError: the residual stream is cut along the sequence, and something else crosses a border that has this
            rank's positions alone; or the split copy cannot be run without numbers.
    """
    shapes = {value: value.shape for value in (*chain.hidden.values(), *chain.further)}
    handed_on = [value.module for value in chain.hidden.values() if value.first < value.last]
    if table.degree == 1 or not (chain.further or handed_on):
        return shapes
    if table.sequence is not None and handed_on:  # whole at the end of a stage, and a part of it inside
        raise _of_positions(f"blocks behind the next one read the hidden state of {handed_on[0]}")
    split = copy.deepcopy(model)
    layouts = {name: ParamLayout(name, tuple(parameter.shape)) for name, parameter in split.named_parameters()}
    apply_table(split, table, _Alone(table.degree, rank), layouts)
    try:
        record, _, _ = record_pass(split, structure, fake_forward, SIZES)
    except Untraceable as error:
        raise error.refusal from None
    made = {(value.module, value.place, value.call): template_of(value.tensor, SIZES) for value in record.values}
    own = {value: made[value.module, value.place, value.call] for value in chain.further}
    if table.sequence is None:
        return shapes | own | {value: made[value.module, value.place, value.call] for value in chain.hidden.values()}
    for value, shape in own.items():
        if shape.sizes.count("length") != value.shape.sizes.count("length"):
            raise _of_positions(f"later blocks read what {value.module} returns of this rank's positions alone")
    return shapes | own


def _of_positions(rule: str) -> PlanError:
    value = "strategy.sequence_parallel = true with pp above 1"
    return PlanError(value, rule, "Use sequence_parallel=false")


class _Alone:
    """A rank of a tensor group without its peers: the shapes of its collectives, and no numbers."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Leaves ``tensor`` as it is."""

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.new_empty((self.size, *tensor.shape))

    def reduce_scatter(self, tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].clone()
