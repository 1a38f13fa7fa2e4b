"""Pipeline parallelism: the stages of an unmodified model, and the groups that its ends share.

The model's own ``forward`` stays. Blocks, embedding, norm and head that a stage does not own become
stand-ins; the received hidden state enters where the block before the stage's first would have returned it,
and a stage that does not own the head returns what its last block does. A rank may hold several stages; each is
cut from a copy of the model, so names stay those of the model, and FSDP, recomputation and dropout see one stage.
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

from shardwise.models.chain import Chain, find_chain
from shardwise.models.lora import plain_name
from shardwise.models.structure import Structure
from shardwise.parallel.balance import Balance
from shardwise.parallel.dropout import DropoutStreams
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout
from shardwise.spec.strategy import Strategy


class PassThrough(nn.Module):
    """Stands in for a module that another stage owns: returns its first input.

    The model may read plain attributes of a block (``attention_type``), so they are handed on. With
    ``num_outputs`` above 0 a tuple of that length is returned, as the blocks of some models do.
    """

    def __init__(self, replaced: nn.Module, num_outputs: int = 0) -> None:
        super().__init__()
        self._num_outputs = num_outputs
        own = vars(self)
        for name, value in vars(replaced).items():
            if name not in own and not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) + (None,) * (self._num_outputs - 1) if self._num_outputs else hidden_states


class Absent(nn.Module):
    """Stands in for a module of the embedding (positions, norms) on a later stage, where its result is not used.

    A hidden state passes through; in place of looked-up positions there is a zero, to which any shape adds.
    """

    def forward(self, x: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x if isinstance(x, torch.Tensor) and x.dim() > 2 else torch.zeros(())


class Entry(PassThrough):
    """The block before a stage's first: drops what the model made of its embedding, returns the received state."""

    received: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        received, self.received = self.received, None
        assert received is not None
        return super().forward(received)


class Exit(PassThrough):
    """The block after a stage's last: keeps the stage's result, and hands on a stand-in without gradient.

    What follows the blocks (soft-capping, scaling) must not touch the hidden state that is sent.
    """

    result: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.result = hidden_states
        return super().forward(hidden_states.detach())

    def take(self) -> torch.Tensor:
        """The result of the last pass, let go of here."""
        result, self.result = self.result, None
        assert result is not None
        return result


class Stage(nn.Module):
    """A part of a model that one pipeline rank runs as a whole; ``index`` is its place among all stages.

    ``forward(x, position_ids)``: x is [rows, length] ids on the first stage, else the hidden state
    [rows, length, hidden]; the result is the logits [rows, length, local vocabulary] on the last stage,
    else the hidden state. ``position_ids`` is [rows, length].
    """

    def __init__(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
        entry: Entry | None = None,
        exit_: Exit | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.blocks = list(blocks)  # a plain list: names and parameters stay those of the model
        self.ends = (entry, exit_)  # a tuple for the same reason
        self.index, self.is_last = 0, True
        # Whether a gradient leaves at the input, and arrives at the output: not where nothing trains before.
        self.grads_at_ends = (True, True)
        self.dropout: DropoutStreams | None = None
        self.balance: Balance | None = None

    @property
    def is_first(self) -> bool:
        return self.ends[0] is None

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.dropout is not None and self.training:
            self.dropout.next_micro_batch()
        if self.balance is not None:
            self.balance.next_micro_batch(x.shape[1])
        entry, exit_ = self.ends
        if entry is not None:
            # The model's forward scales or adds to what it takes for embeddings, so it gets a stand-in of this
            # shape, and the first block of this stage the received state as it is.
            entry.received, x = x, x.detach()
        key = "input_ids" if entry is None else "inputs_embeds"
        # Always positions and never a cache: only so are masks right for every attention implementation.
        output = self.model(**{key: x}, position_ids=position_ids, use_cache=False)
        result: torch.Tensor = output.logits if exit_ is None else exit_.take()
        return result


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
    """The stage of the blocks of ``cut``: stand-ins (on meta) for every module with weights that others own."""
    blocks = model.get_submodule(structure.blocks)
    owned = [blocks[i] for i in range(cut.first_block, cut.last_block)]
    entry, exit_ = None, None
    for index in range(structure.num_blocks):
        if index == cut.first_block - 1:
            blocks[index] = entry = Entry(blocks[index], chain.num_outputs)
        elif index == cut.last_block:
            blocks[index] = exit_ = Exit(blocks[index], chain.num_outputs)
        elif not cut.first_block <= index < cut.last_block:
            blocks[index] = PassThrough(blocks[index], chain.num_outputs)
    if cut.first_block > 0:
        for name in (structure.embedding, *chain.before):
            _replace(model, name, Absent())
    if cut.last_block < structure.num_blocks:
        for name in (structure.head, *chain.after):
            _replace(model, name, PassThrough(model.get_submodule(name)))
    return Stage(model, owned, entry, exit_)


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
