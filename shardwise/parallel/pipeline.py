"""Pipeline parallelism: the stages of an unmodified model, and the groups that its ends share.

The model's own ``forward`` stays. Blocks, embedding, norm and head that a stage does not own become
stand-ins; the received hidden state enters where the block before the stage's first would have returned it,
and a stage that does not own the head ends the forward where the next stage's first block would begin. A rank may
hold several stages; each is cut from a copy of the model, so names stay those of the model, and FSDP, recomputation
and dropout see one stage.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardwise.models.calling import call_model
from shardwise.models.chain import Chain, Shape, find_chain
from shardwise.models.lora import plain_name
from shardwise.models.structure import Structure
from shardwise.parallel.balance import Balance
from shardwise.parallel.dropout import DropoutStreams
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout
from shardwise.spec.strategy import Strategy


class StandIn(nn.Module):
    """In the place of a module that another stage owns: no parameters, but its attributes can be read.

    Models read what a block is (``attention_type``) in their own forward. The replaced module lies on meta and is
    no submodule of this one, so nothing of it is counted, moved or saved.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__["_replaced"] = (replaced,)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            (replaced,) = self.__dict__.get("_replaced", (None,))  # none yet while it is copied
            return getattr(replaced, name)


class PassThrough(StandIn):
    """A block of an earlier stage: returns its hidden state, in a tuple where blocks return tuples."""

    def __init__(self, replaced: nn.Module, chain: Chain) -> None:
        super().__init__(replaced)
        self.chain = chain

    def hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The hidden state among the arguments of a block."""
        key = self.chain.input_key
        state: torch.Tensor = args[key] if isinstance(key, int) else kwargs[key]
        return state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.returned(self.hidden(args, kwargs))

    def returned(self, hidden: torch.Tensor) -> Any:
        """``hidden`` as a block would return it."""
        outputs: list[Any] = [None] * self.chain.num_outputs
        if not outputs:
            return hidden
        outputs[self.chain.output_index] = hidden
        return tuple(outputs)


class Absent(StandIn):
    """A module of the embedding on a later stage: zeros of the shapes that it would return, which the entry drops."""

    like: torch.Tensor | None = None  # the received state: rows, length, dtype and device of the computation

    def __init__(self, replaced: nn.Module, template: Any) -> None:
        super().__init__(replaced)
        self.template = template

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.like is not None
        return _zeros(self.template, self.like)


def _zeros(template: Any, like: torch.Tensor) -> Any:
    if isinstance(template, Shape):
        return template.zeros(like)
    return tuple(_zeros(item, like) for item in template) if isinstance(template, tuple) else None


class Entry(PassThrough):
    """The block before a stage's first: drops what the model made of its embedding, returns the received state."""

    received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None
        return self.returned(received)


class _Left(Exception):
    """Carries the result of a stage out of the model's forward: what follows is other stages' work."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self.result = result


class Exit(PassThrough):
    """The block after a stage's last: ends the model's forward here, with the stage's result."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Left(self.hidden(args, kwargs))


class Stage(nn.Module):
    """A part of a model that one pipeline rank runs as a whole; ``index`` is its place among all stages.

    ``forward(x, position_ids, input_ids)``: x is [rows, length] ids on the first stage, else the hidden state
    [rows, length, hidden]; the result is the logits [rows, length, local vocabulary] on the last stage,
    else the hidden state. ``position_ids`` and ``input_ids`` are [rows, length]; the latter are needed on later
    stages too, by models that compute masks from them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        entry: Entry | None = None,
        absent: Sequence[Absent] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.blocks = list(blocks)  # a plain list: names and parameters stay those of the model
        self.entry: tuple[Any, ...] = (entry, *absent)  # a tuple for the same reason
        self.index, self.is_last = 0, True
        # Whether a gradient leaves at the input, and arrives at the output: not where nothing trains before.
        self.grads_at_ends = (True, True)
        self.dropout: DropoutStreams | None = None
        self.balance: Balance | None = None

    @property
    def is_first(self) -> bool:
        return self.entry[0] is None

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.dropout is not None and self.training:
            self.dropout.next_micro_batch()
        if self.balance is not None:
            self.balance.next_micro_batch(x.shape[1])
        entry, *absent = self.entry
        if entry is None:
            input_ids = x
        else:
            # The model's forward scales or adds to what it takes for embeddings, so that is of no value,
            # and the first block of this stage gets the received state as it is.
            entry.received = x
            for module in absent:
                module.like = x.detach()
            input_ids = torch.zeros_like(position_ids) if input_ids is None else input_ids
        try:
            return call_model(self.model, input_ids, position_ids)
        except _Left as left:
            return left.result


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


def cut_stages(model: PreTrainedModel, structure: Structure, mesh: Mesh) -> list[tuple[Stage, dict[str, ParamLayout]]]:
    """This rank's stages, in the order of the model, and the layout of each of their parameters.

    Args:
        model: on meta. The first stage is cut from it, each other one from a copy, which costs no memory.

    Returns:
        For each stage the layouts of its parameters, whole, with their owner among the stages and replicas.
        A tied embedding has a second copy on the last stage, whose owner is the first.
    """
    cuts = stage_cuts(mesh.strategy)
    own = [cuts[stage] for stage in mesh.strategy.stages_of(mesh.coordinate("pp"))]
    chain = find_chain(model, structure) if len(cuts) > 1 else None
    models = [model, *(copy.deepcopy(model) for _ in own[1:])]
    owned = mesh.coordinate("dp_replicate") == 0
    trained = _first_trained(model, structure, chain, cuts) if chain is not None else 0
    stages = []
    for part, cut in zip(models, own, strict=True):
        if chain is None:
            stage = Stage(part, list(part.get_submodule(structure.blocks)))
        else:
            stage = cut_modules(part, structure, chain, cut)
        stage.index, stage.is_last = cut.index, cut.index == len(cuts) - 1
        stage.grads_at_ends = (cut.index > trained, cut.index >= trained)
        stages.append((stage, _whole_layouts(part, structure, cut, owned)))
    return stages


def _first_trained(model: nn.Module, structure: Structure, chain: Chain, cuts: Sequence[StageCut]) -> int:
    """The first stage that holds something that trains; no gradient is needed before it."""
    before = tuple(f"{name}." for name in (structure.embedding, *chain.before))
    found = [len(cuts) - 1]
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name.startswith(before):
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
    entry: Entry | None = None
    absent: list[Absent] = []
    for index in range(structure.num_blocks):
        if index == cut.first_block - 1:
            blocks[index] = entry = Entry(blocks[index], chain)
        elif index == cut.last_block:
            blocks[index] = Exit(blocks[index], chain)
        elif not cut.first_block <= index < cut.last_block:
            blocks[index] = PassThrough(blocks[index], chain)
    if not is_first:
        for name in (structure.embedding, *chain.before):
            absent.append(Absent(model.get_submodule(name), chain.templates[name]))
            _replace(model, name, absent[-1])
    if not is_last:
        for name in (structure.head, *chain.after):
            _replace(model, name, StandIn(model.get_submodule(name)))
    return Stage(model, owned, entry, absent)


def _replace(model: nn.Module, name: str, stand_in: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, stand_in)


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
