"""Pipeline parallelism: the stages of an unmodified model, and the groups that its ends share.

The model's own ``forward`` stays. Blocks, embedding, norm and head that a stage does not own become
stand-ins; what crosses a border enters where the part that made it would have returned it: the hidden state as the
result of the block before the stage's first, what else later blocks read likewise. A stage that does not own the head
ends the forward where the next stage's first block would begin. A rank may
hold several stages; each is cut from a copy of the model, so names stay those of the model, and FSDP, recomputation
and dropout see one stage.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.calling import call_model
from shardwise.models.chain import Chain, find_chain
from shardwise.models.flow import RETURNED, WRITTEN, Place, Shape, filled
from shardwise.models.lora import plain_name
from shardwise.models.standin import StandIn
from shardwise.models.structure import Structure
from shardwise.parallel.balance import Balance
from shardwise.parallel.border import Received, Sent, local_shapes, need_gradients
from shardwise.parallel.deferred import DeferredWeights
from shardwise.parallel.dropout import DropoutStreams
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout
from shardwise.spec.strategy import Strategy
from shardwise.tensor.table import ShardingTable


class PassThrough(StandIn):
    """A block of an earlier stage: returns, and writes into its arguments, what of it was received.

    Where its hidden state was not, it hands on the one that it is given, which is of no value and is not read.
    """

    def __init__(
        self, replaced: nn.Module, chain: Chain, name: str, received: Received, *, is_last: bool = False
    ) -> None:
        super().__init__(replaced)
        self.chain, self.name, self.received = chain, name, received
        self.is_last = is_last  # what the model does next is the stage's own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        chain, values = self.chain, self.received.of(self.name)
        self.received.at_blocks = self.is_last
        key = chain.input_key
        state = (RETURNED, chain.output_index) if chain.num_outputs else (RETURNED,)
        values.setdefault(state, args[key] if isinstance(key, int) else kwargs[key])
        for (argument, item), form in chain.written.get(self.name, {}).items():
            entry = filled(form, (WRITTEN, argument, item), values)
            if entry is not None:
                (args[argument] if isinstance(argument, int) else kwargs[argument])[item] = entry
        return filled(chain.templates[self.name], (RETURNED,), values)


class Absent(StandIn):
    """A module before the blocks on a later stage: what of it was received, else zeros, which are not read.

    So are its weights, where the model's own forward takes them from it before its blocks (the row of a padding token,
    say): only what was received leaves that part. Later they would count.
    """

    def __init__(self, replaced: nn.Module, template: Any, name: str, received: Received) -> None:
        super().__init__(replaced)
        self.template, self.name, self.received = template, name, received

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if not isinstance(value, nn.Parameter):
            return value
        if self.received.at_blocks:
            rule = f"{self.name}.{name} is read at or behind blocks of a stage that does not hold it"
            raise PlanError("strategy.pp above 1", rule, "Use pp=1")
        # Without memory: embeddings are large.
        return torch.zeros((), dtype=value.dtype, device=self.received.like.device).expand(value.shape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        values = self.received.of(self.name)
        return _zeros(self.template, (RETURNED,), values, self.received.like)


def _zeros(template: Any, place: Place, values: dict[Place, torch.Tensor], like: torch.Tensor) -> Any:
    if isinstance(template, Shape):
        return values[place] if place in values else template.zeros(like)
    if not isinstance(template, tuple):
        return None
    return tuple(_zeros(item, (*place, index), values, like) for index, item in enumerate(template))


class _Left(Exception):
    """Ends a model's forward: what follows is other stages' work."""


class Exit(StandIn):
    """The first module behind a stage, and all others there: the model's forward ends where one of them is called."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left


class Stage(nn.Module):
    """A part of a model that one pipeline rank runs as a whole; ``index`` is its place among all stages.

    ``forward(x, *further, position_ids=, input_ids=)``: x are [rows, length] ids on the first stage, else the hidden
    state, and ``further`` what else crosses the border in front of the stage (``received.border``). The result are the
    logits [rows, length, local vocabulary] on the last stage, else what crosses the border behind it (``sent.border``):
    one tensor, or a tuple. ``position_ids`` and ``input_ids`` are [rows, length]; the latter are needed on later
    stages too, by models that compute masks from them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        received: Received | None = None,
        sent: Sent | None = None,
        own_absent: Sequence[tuple[str, Shape]] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.blocks = list(blocks)  # a plain list: names and parameters stay those of the model
        self.received, self.sent = received or Received(()), sent
        self.own_absent = tuple(own_absent)
        self.index, self.is_last = 0, True
        # For each tensor of a border whether its gradient leaves at the input, and arrives at the output: not where
        # nothing trains before.
        self.grads_at_ends: tuple[tuple[bool, ...], tuple[bool, ...]] = ((), ())
        # The same of their shapes on this rank.
        self.shapes_at_ends: tuple[tuple[Shape, ...], tuple[Shape, ...]] = ((), ())
        self.dropout: DropoutStreams | None = None
        self.balance: Balance | None = None
        self.deferred: DeferredWeights | None = None  # where backward passes run in two halves

    @property
    def is_first(self) -> bool:
        return not self.received.border

    def forward(
        self,
        x: torch.Tensor,
        *further: torch.Tensor,
        position_ids: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        if self.dropout is not None and self.training:
            self.dropout.next_micro_batch()
        if self.balance is not None:
            self.balance.next_micro_batch(position_ids.shape[1])
        if self.is_first:
            input_ids = x
        else:
            # The model's forward scales or adds to what it takes for embeddings, so that is of no value, and the
            # first block of this stage gets the received state as it is.
            self.received.take((x, *further), position_ids)
            input_ids = torch.zeros_like(position_ids) if input_ids is None else input_ids
            for name, shape in self.own_absent:
                owner, _, key = name.rpartition(".")
                zeros = shape.zeros(position_ids)
                setattr(self.model.get_submodule(owner), key, zeros)
        recording = contextlib.nullcontext() if self.deferred is None else self.deferred.recording()
        if self.sent is None:
            with recording:
                logits = call_model(self.model, input_ids, position_ids)
            self.received.drop()
            return logits
        self.sent.begin(self.model)
        with contextlib.suppress(_Left), recording:
            call_model(self.model, input_ids, position_ids)
        self.received.drop()
        sent = self.sent.take()
        shapes = self.shapes_at_ends[1]
        if shapes:
            pairs = zip(sent, shapes, strict=True)
            sent = tuple(_proven(tensor, shape, position_ids) for tensor, shape in pairs)
        return sent[0] if len(sent) == 1 else sent


def _proven(tensor: torch.Tensor, shape: Shape, position_ids: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the next stage expects it: FSDP may have made its input, and so the tensor, coarser."""
    sizes = shape.of(*position_ids.shape)
    if tuple(tensor.shape) != sizes or torch.promote_types(tensor.dtype, shape.dtype) != shape.dtype:
        rule = f"{tuple(tensor.shape)} of {tensor.dtype} is to cross a border, and {sizes} of {shape.dtype} was proven"
        raise PlanError("strategy.pp above 1", rule, "Use pp=1")
    return tensor.to(shape.dtype)


@dataclass(frozen=True)
class StageCut:
    """Which blocks a stage owns, and its place among the stages."""

    first_block: int
    last_block: int  # exclusive
    index: int = 0


def stage_cuts(strategy: Strategy) -> list[StageCut]:
    """The block range of every stage, in order."""
    ends = list(accumulate(strategy.stages))
    return [
        StageCut(end - size, end, index) for index, (end, size) in enumerate(zip(ends, strategy.stages, strict=True))
    ]


def cut_stages(
    model: PreTrainedModel, structure: Structure, mesh: Mesh, table: ShardingTable
) -> list[tuple[Stage, dict[str, ParamLayout]]]:
    """This rank's stages, in the order of the model, and the layout of each of their parameters.

    Args:
        model: on meta. The first stage is cut from it, each other one from a copy, which costs no memory.
        table: by which the stages are to be split along the tensor axis.

    Returns:
        For each stage the layouts of its parameters, whole, with their owner among the stages and replicas.
        A tied embedding has a second copy on the last stage, whose owner is the first.
    """
    cuts = stage_cuts(mesh.strategy)
    own = [cuts[stage] for stage in mesh.strategy.stages_of(mesh.coordinate("pp"))]
    chain = find_chain(model, structure) if len(cuts) > 1 else None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    first_trained = _first_trained(trained, structure, chain, cuts) if chain is not None else 0
    shapes = local_shapes(model, structure, chain, table, mesh.coordinate("tp")) if chain is not None else {}
    models = [model, *(copy.deepcopy(model) for _ in own[1:])]
    owned = mesh.coordinate("dp_replicate") == 0
    stages = []
    for part, cut in zip(models, own, strict=True):
        if chain is None:
            stage = Stage(part, list(part.get_submodule(structure.blocks)))
        else:
            stage = cut_modules(part, structure, chain, cut)
            sent = () if stage.sent is None else stage.sent.border
            stage.grads_at_ends = (
                need_gradients(stage.received.border, cut.index > first_trained, trained),
                need_gradients(sent, cut.index >= first_trained, trained),
            )
            stage.shapes_at_ends = (
                tuple(shapes[value] for value in stage.received.border),
                tuple(shapes[value] for value in sent),
            )
        stage.index, stage.is_last = cut.index, cut.index == len(cuts) - 1
        stages.append((stage, _whole_layouts(part, structure, cut, owned)))
    return stages


def _first_trained(trained: Set[str], structure: Structure, chain: Chain, cuts: Sequence[StageCut]) -> int:
    """The first stage that holds something that trains; no gradient is needed before it."""
    before = tuple(f"{name}." for name in (structure.embedding, *chain.before))
    found = [len(cuts) - 1]
    for name in trained:
        if name.startswith(before) or name in chain.own_before:
            found.append(0)
        elif name.startswith(f"{structure.blocks}."):
            block = int(name.removeprefix(f"{structure.blocks}.").partition(".")[0])
            found.append(next(cut.index for cut in cuts if cut.first_block <= block < cut.last_block))
    return min(found)


def cut_modules(model: PreTrainedModel, structure: Structure, chain: Chain, cut: StageCut) -> Stage:
    """The stage of the blocks of ``cut``: stand-ins in the place of every module with weights that others own."""
    blocks = model.get_submodule(structure.blocks)
    owned = [blocks[i] for i in range(cut.first_block, cut.last_block)]
    is_first, is_last = cut.first_block == 0, cut.last_block == structure.num_blocks
    received = Received(chain.border(cut.first_block))
    sent = None if is_last else Sent(chain.border(cut.last_block), received)
    own_absent: list[tuple[str, Shape]] = []
    for index in range(structure.num_blocks):
        if index < cut.first_block:
            blocks[index] = PassThrough(
                blocks[index], chain, f"{structure.blocks}.{index}", received, is_last=index == cut.first_block - 1
            )
        elif index >= cut.last_block:
            blocks[index] = Exit(blocks[index])
    if not is_first:
        for name in (structure.embedding, *chain.before):
            _replace(model, name, Absent(model.get_submodule(name), chain.templates[name], name, received))
        own_absent = [(name, _take_parameter(model, name)) for name in chain.own_before]
    if not is_last:
        for name in (structure.head, *chain.after):
            _replace(model, name, Exit(model.get_submodule(name)))
        for name in chain.own_after:
            _take_parameter(model, name)
    return Stage(model, owned, received, sent, own_absent)


def _take_parameter(model: nn.Module, name: str) -> Shape:
    """Take a parameter off its module; its shape."""
    owner, _, key = name.rpartition(".")
    parameter = model.get_submodule(owner)._parameters.pop(key)
    assert parameter is not None
    return Shape(tuple(parameter.shape), parameter.dtype)


def _replace(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    replaced = model.get_submodule(name)
    for module in list(model.modules()):
        for child, other in list(module._modules.items()):
            if other is replaced:  # a shared embedding has several names
                module._modules[child] = stand_in


def _whole_layouts(model: nn.Module, structure: Structure, cut: StageCut, owned: bool) -> dict[str, ParamLayout]:
    layouts = {
        name: ParamLayout(plain_name(name), tuple(parameter.shape), owned=owned)
        for name, parameter in model.named_parameters()
    }
    is_first, is_last = cut.first_block == 0, cut.last_block == structure.num_blocks
    if structure.tied and is_first != is_last:  # the two ends are on two stages
        embedding, head = f"{structure.embedding}.weight", f"{structure.head}.weight"
        names = {layout.name: name for name, layout in layouts.items()}
        if is_first:
            layouts[names[embedding]] = replace(layouts[names[embedding]], has_copy=True)
        if is_last:
            layouts[names[head]] = replace(layouts[names[head]], tied_to=embedding, owned=False)
    return layouts


def tied_group(structure: Structure, mesh: Mesh) -> dist.ProcessGroup | None:
    """The two ranks that hold the copies of a tied embedding's slice; None on every other rank.

    Called by all ranks: each creates every group, as torch asks.
    """
    if not structure.tied or mesh.size("pp") == 1:
        return None
    own = None
    ranks = mesh.device_mesh.mesh.flatten(1)  # [pp, other axes]
    for first, last in zip(ranks[0].tolist(), ranks[-1].tolist(), strict=True):
        group = dist.new_group([first, last])
        if dist.get_rank() in (first, last):
            own = group
    return own
