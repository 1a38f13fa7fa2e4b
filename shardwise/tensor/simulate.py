"""A table on all its ranks, as threads of one process, against the whole model."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from shardwise.spec.layout import ParamLayout, chunk_range
from shardwise.spec.tolerance import relative_error
from shardwise.tensor.execute import apply_table
from shardwise.tensor.group import LonelyTensorGroup, SimulatedTensorGroup
from shardwise.tensor.table import ShardingTable, Style
from shardwise.tensor.trace import LENGTH, run

_SEED = 0
Call = Callable[[nn.Module], torch.Tensor]


@dataclass(frozen=True)
class Reference:
    """A whole model's logits and gradients, by parameter name (a tied one under its first), and their norm.

    ``call``: what gave the module its inputs, and returned them.
    """

    logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]
    norm: float
    call: Call


@dataclass(frozen=True)
class Difference:
    """The largest relative error, and where it is: ``logits`` or a parameter. ``moved``: elements a rank sent."""

    error: float
    where: str
    moved: Mapping[str, float]


def reference(model: nn.Module, length: int = LENGTH) -> Reference:
    """One pass of the whole model, forward and backward; its gradients are cleared again."""
    return reference_of(model, partial(run, length=length))


def reference_of(model: nn.Module, call: Call) -> Reference:
    """The same of any module, a block of a model: ``call`` gives it its inputs and returns [rows, length, ...]."""
    logits = _pass(model, call, slice(None))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = math.sqrt(sum(float(g.norm()) ** 2 for g in gradients.values() if g is not None))
    model.zero_grad(set_to_none=True)
    return Reference(logits, gradients, norm, call)


def compare(model: nn.Module, table: ShardingTable, want: Reference) -> Difference:
    """Split copies of ``model`` on threads, and the largest difference of logits and gradients.

    Raises:
        Exception: what a forward raises on its part.
    """
    groups = SimulatedTensorGroup.make(table.degree)
    done: dict[int, _Rank] = {}

    def work(rank: int) -> None:
        split = _copied(model)
        layouts = {name: ParamLayout(name, tuple(p.shape)) for name, p in split.named_parameters()}
        layouts = apply_table(split, table, groups[rank], layouts)
        logits = _pass(split, want.call, _columns(table, want.logits.shape[-1], rank))
        done[rank] = _Rank(layouts, logits, {name: p.grad for name, p in split.named_parameters()})

    _in_threads(work, groups)
    ranks = [done[rank] for rank in range(table.degree)]
    errors: dict[str, float] = {"logits": 0.0}
    for index, rank in enumerate(ranks):
        columns = _columns(table, want.logits.shape[-1], index)
        errors["logits"] = max(errors["logits"], _error(rank.logits, want.logits[..., columns], 0.0))
        for name, grad in rank.gradients.items():
            if rank.layouts[name].tp_partial:
                error = _shares_error(name, ranks, want)
            else:
                error = _gradient_error(grad, want.gradients[name], rank.layouts[name], want.norm)
            errors[name] = max(errors.get(name, 0.0), error)
    where = max(errors, key=lambda name: errors[name])
    return Difference(errors[where], where, groups[0].moved)


def runs(model: nn.Module, table: ShardingTable, call: Call) -> bool:
    """Whether the first rank's part of ``model`` runs at all: half the work of :func:`compare`, where most fail."""
    split = _copied(model)
    try:
        layouts = {name: ParamLayout(name, tuple(p.shape)) for name, p in split.named_parameters()}
        apply_table(split, table, LonelyTensorGroup(table.degree), layouts)
        call(split)
    except Exception:  # a forward that insists on another shape
        return False
    return True


def _copied(model: nn.Module) -> nn.Module:
    """A copy with gradients of its own; values of parameters and configurations, which no pass changes, are shared."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    configs = [vars(module).get("config") for module in model.modules()]
    return copy.deepcopy(model, memo | {id(config): config for config in configs if config is not None})


@dataclass(frozen=True)
class _Rank:
    """What one rank computed: its logits and gradients, and where its parameters lie in the whole."""

    layouts: Mapping[str, ParamLayout]
    logits: torch.Tensor
    gradients: Mapping[str, torch.Tensor | None]


def _shares_error(name: str, ranks: Sequence[_Rank], want: Reference) -> float:
    """The error of the sum of the ranks' shares, each at its place in the whole parameter."""
    total: torch.Tensor | None = None
    for rank in ranks:
        share, layout = rank.gradients[name], rank.layouts[name]
        if share is None:
            continue
        total = share.new_zeros(layout.shape) if total is None else total
        for piece in layout.pieces:
            total[piece.whole_slices] += share[piece.local_slices]
    layout = ParamLayout(name, ranks[0].layouts[name].shape)
    return _gradient_error(total, want.gradients[name], layout, want.norm)


def _gradient_error(grad: torch.Tensor | None, whole: torch.Tensor | None, layout: ParamLayout, norm: float) -> float:
    if grad is None or whole is None:
        other = whole if grad is None else grad
        # Where no token of this rank's part came by there is none; zeros are as good.
        return 0.0 if other is None or not bool(other.any()) else math.inf
    return max(
        (_error(grad[piece.local_slices], whole[piece.whole_slices], norm) for piece in layout.pieces), default=0.0
    )


def _error(value: torch.Tensor, want: torch.Tensor, norm: float) -> float:
    """Relative error; a value that is no number counts as infinite."""
    if value.shape != want.shape:
        return math.inf
    error = relative_error(float((value - want).norm()), float(want.norm()), norm)
    return error if math.isfinite(error) else math.inf


def _columns(table: ShardingTable, vocab_size: int, rank: int) -> slice:
    """The logits that a rank computes."""
    if Style.VOCAB_HEAD not in {split.style for split in table.modules.values()}:
        return slice(None)
    return slice(*chunk_range(vocab_size, table.degree, rank))


def _pass(model: nn.Module, call: Call, columns: slice) -> torch.Tensor:
    """The logits, after a backward pass of a loss that weighs each of them by a fixed random number.

    Where every rank has all logits, each of them weighs them alike, and gradients are whole.
    """
    logits = call(model)
    # Drawn column by column, so that a rank's columns weigh what they do in the whole. Numbers are drawn 16 at a time:
    # with another count of them for each column, the last ones would depend on how many columns there are.
    size = logits.shape[-1] if columns.stop is None else columns.stop
    places = logits.shape[:-1]
    drawn = torch.randn(
        size, -(-places.numel() // 16) * 16, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64
    )
    weights = drawn[:, : places.numel()].view(size, *places).movedim(0, -1)[..., columns].to(logits)
    (logits * weights).sum().backward()
    return logits.detach()


def _in_threads(work: Callable[[int], None], groups: list[SimulatedTensorGroup]) -> None:
    """Run ``work`` for each rank at the same time; the first error that is not a broken meeting is raised.

    The caller's function modes hold on the ranks too, since torch keeps them for each thread: the whole model ran
    under them (a check has float64 stay float64), and a forward may run under them alone.
    """
    errors: list[Exception] = []
    modes = _get_current_function_mode_stack()

    def guarded(rank: int) -> None:
        try:
            with ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode)
                work(rank)
        except Exception as error:  # whatever a foreign forward raises on its part
            errors.append(error)
            groups[rank].abort()

    threads = [threading.Thread(target=guarded, args=(group.rank,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
