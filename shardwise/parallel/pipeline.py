"""Pipeline parallelism: one stage of an unmodified model, and the groups that its ends share.

The model's own ``forward`` stays. Blocks, embedding, norm and head that a stage does not own become
pass-through modules; the received hidden state enters as ``inputs_embeds``, and a stage that does not
own the head returns the hidden state in place of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from shardwise.models.lora import plain_name
from shardwise.models.structure import Structure
from shardwise.parallel.dropout import DropoutStreams
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout
from shardwise.spec.strategy import Strategy


class PassThrough(nn.Module):
    """Stands in for a module that another stage owns: returns its first input.

    The model may read plain attributes of a block (``attention_type``), so they are handed on.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        for name, value in vars(replaced).items():
            if name not in own and not name.startswith("_") and isinstance(value, str | int | float | bool):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


class Stage(nn.Module):
    """The part of a model that one pipeline rank runs.

    ``forward(x, position_ids)``: x is [rows, length] ids on the first stage, else the hidden state
    [rows, length, hidden]; the result is the logits [rows, length, local vocabulary] on the last stage,
    else the hidden state. ``position_ids`` is [rows, length].
    """

    def __init__(self, model: PreTrainedModel, blocks: Sequence[nn.Module], is_first: bool) -> None:
        super().__init__()
        self.model = model
        self.blocks = list(blocks)  # a plain list: names and parameters stay those of the model
        self.is_first = is_first
        self.dropout: DropoutStreams | None = None

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        if self.dropout is not None and self.training:
            self.dropout.next_micro_batch()
        key = "input_ids" if self.is_first else "inputs_embeds"
        # Always positions and never a cache: only so are masks right for every attention implementation.
        output = self.model(**{key: x}, position_ids=position_ids, use_cache=False)
        logits: torch.Tensor = output.logits
        return logits


@dataclass(frozen=True)
class StageCut:
    """Which blocks a stage owns."""

    first_block: int
    last_block: int  # exclusive


def stage_cuts(strategy: Strategy) -> list[StageCut]:
    """The block range of every stage, in order."""
    ends = list(accumulate(strategy.stages))
    return [StageCut(end - size, end) for end, size in zip(ends, strategy.stages, strict=True)]


def cut_stage(model: PreTrainedModel, structure: Structure, mesh: Mesh) -> tuple[Stage, dict[str, ParamLayout]]:
    """Take away (on meta) what this rank's stage does not own; nothing at one stage.

    Returns:
        The stage and the layout of each of its parameters, whole, with its owner among the stages and
        replicas. A tied embedding has a second copy on the last stage, whose owner is the first.
    """
    cut = stage_cuts(mesh.strategy)[mesh.coordinate("pp")]
    blocks = model.get_submodule(structure.blocks)
    for index in range(structure.num_blocks):
        if not cut.first_block <= index < cut.last_block:
            blocks[index] = PassThrough(blocks[index])
    foreign = [] if mesh.is_first_stage else [structure.embedding]
    foreign += [] if mesh.is_last_stage else [structure.head, *structure.after]
    for name in foreign:
        _pass_through(model, name)
    stage = Stage(model, [blocks[i] for i in range(cut.first_block, cut.last_block)], mesh.is_first_stage)
    return stage, _whole_layouts(model, structure, mesh)


def _pass_through(model: nn.Module, name: str) -> None:
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    setattr(owner, child, PassThrough(getattr(owner, child)))


def _whole_layouts(model: nn.Module, structure: Structure, mesh: Mesh) -> dict[str, ParamLayout]:
    owned = mesh.coordinate("dp_replicate") == 0
    layouts = {
        name: ParamLayout(plain_name(name), tuple(parameter.shape), owned=owned)
        for name, parameter in model.named_parameters()
    }
    if structure.tied and mesh.size("pp") > 1:
        embedding, head = f"{structure.embedding}.weight", f"{structure.head}.weight"
        names = {layout.name: name for name, layout in layouts.items()}
        if mesh.is_first_stage:
            layouts[names[embedding]] = replace(layouts[names[embedding]], has_copy=True)
        if mesh.is_last_stage:
            layouts[names[head]] = replace(layouts[names[head]], tied_to=embedding, owned=False)
    return layouts


def tied_group(structure: Structure, mesh: Mesh) -> dist.ProcessGroup | None:
    """The two ranks that hold the copies of a tied embedding's slice; None on every other rank.

    Called by all ranks: each creates every group, as torch asks.
    """
    if not structure.tied or mesh.size("pp") == 1:
        return None
    own = None
    ranks = mesh.device_mesh.mesh.flatten(1)  # [stages, ranks of a stage]
    for first, last in zip(ranks[0].tolist(), ranks[-1].tolist(), strict=True):
        group = dist.new_group([first, last])
        if dist.get_rank() in (first, last):
            own = group
    return own
