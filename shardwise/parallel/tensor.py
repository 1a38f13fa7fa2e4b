"""Tensor parallelism: modules compute on their local weights, with one collective where the table says so.

A split module keeps its class, its names and its place; its parameters become the local slices and its
``forward`` becomes one of the functions below. The gradient of an input that several column modules
share (q, k and v; gate and up) is summed over the ranks once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.lora import has_adapter
from shardwise.models.sharding import ShardingTable, Style
from shardwise.parallel.adapter import LowRank, add_low_rank, low_rank, pieces
from shardwise.parallel.collectives import gather_forward, sum_backward, sum_forward
from shardwise.parallel.mesh import Mesh
from shardwise.spec.layout import ParamLayout, chunk_range

_SPLIT_DIM = {
    Style.COLUMN: 0,
    Style.VOCAB_EMBEDDING: 0,
    Style.VOCAB_HEAD: 0,
    Style.ROW: 1,
    Style.COLUMN_GATHER: 0,
    Style.ROW_SPLIT: 1,
}
_READS_INPUT = (Style.COLUMN, Style.KV_SLICE, Style.COLUMN_GATHER)


class SharedInput:
    """Wraps an input once for all column modules that read it, so that its gradient is summed once.

    ``readers`` modules read each input one after the other; the wrapped tensor is let go after the last.
    """

    def __init__(self, readers: int, group: dist.ProcessGroup) -> None:
        self.readers, self.group = readers, group
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
class _Context:
    """What a local forward needs to know of the tensor axis and of the attention heads."""

    group: dist.ProcessGroup
    degree: int
    rank: int
    num_heads: int
    num_kv_heads: int

    def kv_rows(self, module: nn.Linear) -> slice:
        """Rows of the key/value head that this rank's query heads attend to (more ranks than such heads)."""
        rows = module.weight.shape[0] // self.num_kv_heads
        head = self.rank * self.num_kv_heads // self.degree
        return slice(head * rows, (head + 1) * rows)


def apply_tensor(
    model: PreTrainedModel, table: ShardingTable, mesh: Mesh, layouts: dict[str, ParamLayout]
) -> dict[str, ParamLayout]:
    """Split ``model`` (on meta) over the tensor axis by ``table``; a no-op at degree 1.

    Args:
        layouts: module parameter name -> layout so far (whole parameters).

    Returns:
        The layouts with the tensor axis filled in.

    Raises:
        PlanError: a style that the module's class does not allow.
    """
    if table.degree == 1:
        return layouts
    config = model.config.get_text_config()
    context = _Context(
        mesh.group("tp"),
        table.degree,
        mesh.coordinate("tp"),
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    modules = {
        name: module
        for name, module in model.named_modules()
        # A module of another stage is a pass-through without parameters.
        if name in table.styles and (has_adapter(module) or any(True for _ in module.parameters(recurse=False)))
    }
    layouts = _split_parameters(model, modules, table, context, layouts)
    for parent, siblings in _by_parent(modules).items():
        styles = {name: table.styles[name] for name in siblings}
        readers = sum(style in _READS_INPUT for style in styles.values())
        shared = SharedInput(readers, context.group)
        for name, style in styles.items():
            _set_forward(name, modules[name], style, context, shared)
        if Style.KV_SLICE in styles.values():
            # One key/value head serves all query heads of this rank.
            model.get_submodule(parent).num_key_value_groups = context.num_heads // context.degree
        if Style.COLUMN in styles.values():
            _count_local_heads(model.get_submodule(parent), context)
    return layouts


def _count_local_heads(attention: nn.Module, context: _Context) -> None:
    """Head counts that some forwards read of their module become those of this rank."""
    counts = dict.fromkeys(("num_heads", "num_attention_heads", "n_head"), context.num_heads)
    counts |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), context.num_kv_heads)
    for name, whole in counts.items():
        if vars(attention).get(name) == whole:
            setattr(attention, name, max(1, whole // context.degree))


def _split_parameters(
    model: nn.Module,
    modules: dict[str, nn.Module],
    table: ShardingTable,
    context: _Context,
    layouts: dict[str, ParamLayout],
) -> dict[str, ParamLayout]:
    """Replace the parameters of ``modules`` by their slices. A tied weight is cut once and stays one object."""
    cut: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    split: dict[str, ParamLayout] = {}
    parts = [part for name, module in modules.items() for part in pieces(module, table.styles[name])]
    for module, style in parts:
        for short, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in cut:
                name = names[id(parameter)]
                split[name] = _layout(layouts[name], style, context)
                cut[id(parameter)] = _cut(parameter, split[name])
            module._parameters[short] = cut[id(parameter)]
    merged = layouts | split
    # What the tensor axis does not cut is replicated over it and owned by its first rank.
    return {
        name: layout if layout.tp_dim is not None else replace(layout, owned=layout.owned and context.rank == 0)
        for name, layout in merged.items()
    }


def _layout(layout: ParamLayout, style: Style, context: _Context) -> ParamLayout:
    dim = _SPLIT_DIM.get(style)
    if dim is None:  # whole on every rank, which sees only its heads
        return replace(layout, tp_partial=True)
    if dim >= len(layout.shape):  # the bias of a row module is whole on every rank
        return layout
    return replace(layout, tp_dim=dim, tp_ranges=(chunk_range(layout.shape[dim], context.degree, context.rank),))


def _cut(parameter: nn.Parameter, layout: ParamLayout) -> nn.Parameter:
    empty = torch.empty(layout.local_shape, dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def _by_parent(names: Iterable[str]) -> dict[str, list[str]]:
    parents: dict[str, list[str]] = {}
    for name in names:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    return parents


def _set_forward(name: str, module: nn.Module, style: Style, context: _Context, shared: SharedInput) -> None:
    if style is Style.PARTIAL:
        return  # computes as it is; only its gradient is summed
    base = module.base_layer if has_adapter(module) else module
    is_embedding = style is Style.VOCAB_EMBEDDING
    if not isinstance(base, nn.Embedding) if is_embedding else type(base) is not nn.Linear:
        expected = "embedding" if is_embedding else "linear layer"
        raise PlanError(
            f"strategy.tp = {context.degree}", f"{name} is a {type(base).__name__}, no {expected}", "Use tp=1"
        )
    if is_embedding:
        module.forward = _embedding_forward(base, context)  # type: ignore[method-assign]
        return
    if style in (Style.COLUMN_GATHER, Style.ROW_SPLIT):
        size = base.out_features if style is Style.COLUMN_GATHER else base.in_features
        if size % context.degree:
            raise PlanError(f"strategy.tp = {context.degree}", f"does not divide the {size} features of {name}", "tp=1")
    layer = _Layer(base, low_rank(module, context.kv_rows(base) if style is Style.KV_SLICE else slice(None)))
    module.forward = {  # type: ignore[method-assign]
        Style.COLUMN: _column_forward,
        Style.VOCAB_HEAD: _head_forward,
        Style.ROW: _row_forward,
        Style.COLUMN_GATHER: _column_gather_forward,
        Style.ROW_SPLIT: _row_split_forward,
        Style.KV_SLICE: _kv_slice_forward,
    }[style](layer, context, shared)


Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    """A linear module with its local weight, and the low-rank path of its adapter, None without one."""

    module: nn.Linear
    path: LowRank | None


def _column_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = shared(x)
        return add_low_rank(F.linear(x, layer.module.weight, layer.module.bias), x, layer.path)

    return forward


def _head_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x = sum_backward(x, context.group)
        return add_low_rank(F.linear(x, layer.module.weight, layer.module.bias), x, layer.path)

    return forward


def _row_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        # The adapter's share joins before the sum: one all-reduce for both.
        out = sum_forward(add_low_rank(F.linear(x, layer.module.weight), x, layer.path), context.group)
        return out if layer.module.bias is None else out + layer.module.bias  # once, not once a rank

    return forward


def _column_gather_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    column = _column_forward(layer, context, shared)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return gather_forward(column(x), context.group)

    return forward


def _row_split_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    row = _row_forward(layer, context, shared)
    start, stop = chunk_range(layer.module.in_features, context.degree, context.rank)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return row(x[..., start:stop])

    return forward


def _kv_slice_forward(layer: _Layer, context: _Context, shared: SharedInput) -> Forward:
    rows = context.kv_rows(layer.module)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x, bias = shared(x), layer.module.bias
        out = F.linear(x, layer.module.weight[rows], None if bias is None else bias[rows])
        return add_low_rank(out, x, layer.path)

    return forward


def _embedding_forward(module: nn.Embedding, context: _Context) -> Forward:
    start, stop = chunk_range(module.num_embeddings, context.degree, context.rank)
    padding = module.padding_idx
    module.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    look_up = module.forward  # the class's own: it may scale what it looks up

    def forward(ids: torch.Tensor) -> torch.Tensor:
        foreign = (ids < start) | (ids >= stop)
        rows = look_up((ids - start).masked_fill(foreign, 0))
        return sum_forward(rows.masked_fill(foreign.unsqueeze(-1), 0.0), context.group)

    return forward
