"""What modules return on a rank, beside what they return in one process: where a difference begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from shardwise.models.standin import StandIn
from shardwise.spec.tolerance import relative_error
from shardwise.tensor.parts import Part, part_ranges
from shardwise.tensor.table import ShardingTable, Style

Outputs = dict[str, list[torch.Tensor]]  # module -> what it returned, call by call


@dataclass(frozen=True)
class RankView:
    """Which part of the whole a rank sees.

    Args:
        tensor_rank: its place on the tensor axis, by ``table``.
        first_row: index of its first row in the step.
        lengths: tokens of each of its rows.
        micro_batch_size: rows of a forward pass.
    """

    table: ShardingTable
    tensor_rank: int
    first_row: int
    lengths: Sequence[int]
    micro_batch_size: int


def output_errors(
    model: nn.Module, got: Mapping[str, Sequence[torch.Tensor]], want: Outputs, view: RankView
) -> dict[str, float]:
    """Module -> relative error of what it returned, over this rank's rows and without padding.

    Modules that are left out: those without parameters, those whose output has no rows and tokens, and those that
    run more than once.
    """
    calls = -(-len(view.lengths) // view.micro_batch_size)
    errors = {}
    for name, module in model.named_modules():
        outputs, whole = got.get(name, ()), want.get(name, [])
        if isinstance(module, StandIn) or not any(True for _ in module.parameters()):
            continue
        last_row = view.first_row + len(view.lengths)
        if not view.lengths or len(outputs) < calls or len(whole) < last_row:
            continue
        error = _error(outputs, [_local(whole[row], name, view) for row in range(view.first_row, last_row)], view)
        if error is not None:
            errors[name] = error
    return errors


def _error(outputs: Sequence[torch.Tensor], rows: Sequence[torch.Tensor], view: RankView) -> float | None:
    """None where an output is not of a row's shape."""
    difference = norm = 0.0
    for place, (expected, length) in enumerate(zip(rows, view.lengths, strict=True)):
        micro_batch, row = divmod(place, view.micro_batch_size)
        output = outputs[micro_batch]
        if output.dim() < 2 or output.shape[0] != view.micro_batch_size or output.shape[1] < length:
            return None
        value = output[row : row + 1, :length]
        if value.shape != expected.shape:
            return None
        difference += float((value - expected).norm()) ** 2
        norm += float(expected.norm()) ** 2
    return relative_error(difference**0.5, norm**0.5)


def _local(whole: torch.Tensor, name: str, view: RankView) -> torch.Tensor:
    """What this tensor rank returns of ``whole``: columns, where the module is split by them."""
    split = view.table.modules.get(name)
    if split is None or split.style not in (Style.COLUMN, Style.VOCAB_HEAD):
        return whole
    parts = split.parts or (Part(whole.shape[-1]),)
    if sum(part.size for part in parts) != whole.shape[-1]:
        return whole
    ranges = part_ranges(parts, view.table.degree, view.tensor_rank)
    return torch.cat([whole[..., start:stop] for start, stop in ranges], -1)
