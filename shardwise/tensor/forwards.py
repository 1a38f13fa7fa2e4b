"""What split modules compute: their product on local weights, with one collective where the style says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.errors import PlanError
from shardwise.models.lora import has_adapter
from shardwise.spec.layout import chunk_range
from shardwise.tensor.adapter import LowRank, add_low_rank, low_rank
from shardwise.tensor.collectives import gather_forward, sum_backward, sum_forward
from shardwise.tensor.group import TensorGroup
from shardwise.tensor.positions import Positions
from shardwise.tensor.table import ModuleSplit, ParamCut, Style

Forward = Callable[[torch.Tensor], torch.Tensor]


class SharedInput:
    """Wraps an input once for all modules that read it, so that its gradient is summed once.

    ``readers`` modules read each input one after the other; the wrapped tensor is let go after the last.
    """

    def __init__(self, group: TensorGroup) -> None:
        self.readers, self.group = 0, group
        self._source: torch.Tensor | None = None
        self._wrapped: torch.Tensor | None = None
        self._reads = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._source is not x or self._wrapped is None:
            self._source, self._wrapped, self._reads = x, sum_backward(x, self.group), 0
        wrapped = self._wrapped
        self._reads += 1
        if self._reads == self.readers:
            self._source = self._wrapped = None
        return wrapped


@dataclass(frozen=True)
class _Layer:
    """A linear module with its local weight, and the low-rank path of its adapter, None without one."""

    module: nn.Module
    path: LowRank | None

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], as F.linear wants it."""
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return weight.t() if isinstance(self.module, Conv1D) else weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.module.bias  # type: ignore[return-value]


@dataclass(frozen=True)
class _Context:
    """What a forward needs beside its layer."""

    split: ModuleSplit
    group: TensorGroup
    shared: SharedInput | None
    positions: Positions

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """A row module's result: the sum over the ranks, of all positions or of this rank's."""
        return self.positions.scatter(partial) if self.split.sequence else sum_forward(partial, self.group)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """The input of a column module: its gradient is summed for the whole group, or stays a share."""
        return x if self.shared is None else self.shared(x)


def set_forward(
    name: str,
    module: nn.Module,
    split: ModuleSplit,
    group: TensorGroup,
    shared: SharedInput | None,
    positions: Positions,
    once: Mapping[str, ParamCut] | None = None,
) -> None:
    """Let ``module``, whose parameters are cut already, compute as ``split`` says.

    Args:
        shared: of the module's group; None where the gradient of its input stays a share.
        positions: this rank's in the sequence.
        once: parameters of an expert stack of which something counts on the first rank alone.

    Raises:
        PlanError: a style that the module's class or size does not allow.
    """
    style, base = split.style, module.base_layer if has_adapter(module) else module
    if style is Style.PARTIAL:
        return  # computes as it is; only its gradient is summed
    if style is Style.SUM_OUTPUT:
        module.forward = _sum_output(module.forward, group)  # type: ignore[method-assign]
        return
    if style is Style.SLICE:
        module.forward = _slice(module.forward, positions)  # type: ignore[method-assign]
        return
    if style is Style.EXPERTS:
        module.forward = _experts(module, group, once or {}, positions if split.sequence else None)  # type: ignore[method-assign]
        return
    expected = (nn.Embedding,) if style is Style.VOCAB_EMBEDDING else (nn.Linear, Conv1D)
    if not isinstance(base, expected):
        kind = "embedding" if style is Style.VOCAB_EMBEDDING else "linear layer"
        raise PlanError(f"strategy.tp = {group.size}", f"{name} is a {type(base).__name__}, no {kind}", "Use tp=1")
    if style is Style.VOCAB_EMBEDDING:
        module.forward = _embedding_forward(base, group)  # type: ignore[method-assign]
        return
    if style in (Style.COLUMN_GATHER, Style.ROW_SPLIT):
        _check_even(name, _Layer(base, None), style, group)
    context = _Context(split, group, shared, positions)
    module.forward = _FORWARDS[style](_Layer(base, low_rank(module)), context)  # type: ignore[method-assign]


def _check_even(name: str, layer: _Layer, style: Style, group: TensorGroup) -> None:
    """Equal parts alone are gathered; the weight is local already, so the other ranks' parts are as large."""
    size = whole_features(layer.module, style)
    if size is not None and size % group.size:
        raise PlanError(f"strategy.tp = {group.size}", f"does not divide the {size} features of {name}", "Use tp=1")


def whole_features(module: nn.Module, style: Style) -> int | None:
    """Features of the whole layer in the dim that ``style`` cuts, where the class remembers them."""
    if isinstance(module, Conv1D):
        return int(module.nf) if style is Style.COLUMN_GATHER else None
    return int(module.out_features if style is Style.COLUMN_GATHER else module.in_features)  # type: ignore[arg-type]


def _column_forward(layer: _Layer, context: _Context) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = context.read(x)
        return add_low_rank(F.linear(x, layer.weight, layer.bias), x, layer.path)

    return forward


def _row_forward(layer: _Layer, context: _Context) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        # The adapter's share joins before the sum: one all-reduce for both.
        out = context.sum(add_low_rank(F.linear(x, layer.weight), x, layer.path))
        return out if layer.bias is None else out + layer.bias  # once, not once a rank

    return forward


def _column_gather_forward(layer: _Layer, context: _Context) -> Forward:
    column = _column_forward(layer, context)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return gather_forward(column(x), context.group, shares=context.split.shares)

    return forward


def _row_split_forward(layer: _Layer, context: _Context) -> Forward:
    row = _row_forward(layer, context)

    def forward(x: torch.Tensor) -> torch.Tensor:
        start, stop = chunk_range(x.shape[-1], context.group.size, context.group.rank)
        return row(x[..., start:stop])

    return forward


_FORWARDS: dict[Style, Callable[[_Layer, _Context], Forward]] = {
    Style.COLUMN: _column_forward,
    Style.VOCAB_HEAD: _column_forward,
    Style.ROW: _row_forward,
    Style.COLUMN_GATHER: _column_gather_forward,
    Style.ROW_SPLIT: _row_split_forward,
}


def _embedding_forward(module: nn.Embedding, group: TensorGroup) -> Forward:
    start, stop = chunk_range(module.num_embeddings, group.size, group.rank)
    padding = module.padding_idx
    module.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    look_up = module.forward  # the class's own: it may scale what it looks up

    def forward(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < start) | (ids >= stop)
        rows = look_up((ids - start).masked_fill(foreign, 0))
        return sum_forward(rows.masked_fill(foreign.unsqueeze(-1), 0.0), group)

    return forward


def _sum_output(own: Callable[..., torch.Tensor], group: TensorGroup) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return sum_backward(own(*args, **kwargs), group)

    return forward


def _slice(own: Callable[..., torch.Tensor], positions: Positions) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return positions.keep(own(*args, **kwargs))

    return forward


def _experts(
    module: nn.Module, group: TensorGroup, once: Mapping[str, ParamCut], positions: Positions | None
) -> Callable[..., torch.Tensor]:
    """The stack's own forward on a part of every expert's inner features: its result is a partial sum.

    Every input with a gradient (hidden states, routing weights) meets the same parts on each rank, so its gradient is
    a share. A bias of the result counts on the first rank alone, and so does what passes by the matrices (experts that
    hand on their input): the other ranks compute it once more, and take it off. With ``positions`` (the residual
    stream is cut along the sequence) the ranks' tokens are gathered, whatever is told of them, and the results
    scattered again.
    """
    own = module.forward
    num_experts = max((p.shape[0] for p in module.parameters(recurse=False) if p.dim() > 2), default=1)
    silent = [name for name, cut in once.items() if cut.dim is None] if group.rank else []
    matrices = [name for name, cut in once.items() if cut.dim is not None] if group.rank else []

    def read(value: torch.Tensor) -> torch.Tensor:
        if positions is not None:
            return positions.gather(value, num_experts)
        return sum_backward(value, group) if value.requires_grad else value

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(read(value) if isinstance(value, torch.Tensor) else value for value in args)
        kwargs = {key: read(value) if isinstance(value, torch.Tensor) else value for key, value in kwargs.items()}
        with _silenced(module, silent):
            out = own(*args, **kwargs)
            if matrices:
                with _silenced(module, matrices):
                    out = out - own(*args, **kwargs)
        return sum_forward(out, group) if positions is None else positions.scatter(out, num_experts)

    return forward


@contextmanager
def _silenced(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Parameters of ``module`` read as zeros, with a gradient of zeros."""
    parameters = {short: module._parameters.pop(short) for short in names}
    for short, parameter in parameters.items():
        setattr(module, short, parameter * 0.0)
    try:
        yield
    finally:
        for short, parameter in parameters.items():
            delattr(module, short)
            module._parameters[short] = parameter
