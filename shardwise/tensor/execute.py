"""A table applied to a model: parameters become this rank's slices, modules compute on them.

A split module keeps its class, its names and its place; its ``forward`` is one of :mod:`shardwise.tensor.forwards`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from transformers.pytorch_utils import Conv1D

from shardwise.models.lora import ADAPTER, has_adapter
from shardwise.spec.layout import ParamLayout, over_tensor_ranks
from shardwise.tensor.adapter import pieces
from shardwise.tensor.forwards import SharedInput, set_forward
from shardwise.tensor.group import TensorGroup
from shardwise.tensor.parts import Part, local_parameter, part_ranges
from shardwise.tensor.positions import Positions, cut_sequence
from shardwise.tensor.table import LocalValue, ModuleSplit, ParamCut, ShardingTable, Style

# The dim of a linear layer's weight [out, in] that a style cuts; that of GPT-2 is stored the other way round.
_WEIGHT_DIM = {
    Style.COLUMN: 0,
    Style.VOCAB_EMBEDDING: 0,
    Style.VOCAB_HEAD: 0,
    Style.ROW: 1,
    Style.COLUMN_GATHER: 0,
    Style.ROW_SPLIT: 1,
}


def apply_table(
    model: nn.Module,
    table: ShardingTable,
    group: TensorGroup | None,
    layouts: dict[str, ParamLayout],
    positions: Positions | None = None,
) -> dict[str, ParamLayout]:
    """Split ``model`` over the tensor axis by ``table``; a no-op at degree 1.

    Modules that another pipeline stage owns are not there, or have no parameters, and are passed over.

    Args:
        group: this rank's end of the tensor axis; None at degree 1.
        layouts: parameter name -> layout so far (whole parameters).
        positions: this rank's in the sequence, where others want to know them too; only of a table that cuts it.

    Returns:
        The layouts with the tensor axis filled in.

    Raises:
        PlanError: a style that a module's class or size does not allow.
    """
    if group is None or table.degree == 1:
        return layouts
    modules = {name: module for name, module in model.named_modules() if name in table.modules and _is_present(module)}
    cuts = _module_cuts(model, modules, table) | _listed_cuts(model, table, layouts)
    layouts = _cut_parameters(model, cuts, group, layouts)
    positions = positions or Positions(group)
    shared: dict[str, SharedInput] = {}
    for name in modules:
        key = table.modules[name].group
        if key:
            shared.setdefault(key, SharedInput(group)).readers += 1
    for name, module in modules.items():
        split = table.modules[name]
        once = {n.rpartition(".")[2]: c for n, c in table.params.items() if c.once and n.rpartition(".")[0] == name}
        set_forward(name, module, split, group, shared.get(split.group), positions, once)
    for name, values in table.values.items():
        module = _present(model, name)
        if module is not None:
            read_locally(module, values)
    if table.sequence is not None:
        cut_sequence(model, table.sequence, positions)
    return layouts


def _present(model: nn.Module, name: str) -> nn.Module | None:
    """A module that this stage owns."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return None
    return module if _is_present(module) else None


def _is_present(module: nn.Module) -> bool:
    """What stands in for a module of another stage may answer for its attributes, and has no parameters."""
    return next(module.parameters(), None) is not None


def read_locally(module: nn.Module, values: tuple[LocalValue, ...]) -> None:
    """Let the forward of ``module`` read numbers of this rank's part: head counts, widths."""
    for value in values:
        owner, _, attribute = value.attribute.rpartition(".")
        target = module
        if owner:
            # Other modules read the same configuration.
            target = copy.copy(getattr(module, owner))
            setattr(module, owner, target)
        whole = getattr(target, attribute)
        setattr(target, attribute, whole * value.times // value.over)


def _module_cuts(model: nn.Module, modules: Mapping[str, nn.Module], table: ShardingTable) -> dict[str, ParamCut]:
    """Actual parameter name -> its cut, of all split modules; PARTIAL where the whole weight sees a part."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    cuts: dict[str, ParamCut] = {}
    for name, module in modules.items():
        for piece, split in pieces(module, table.modules[name]):
            for short, parameter in piece.named_parameters(recurse=False):
                cut = _cut_of(piece, short, parameter.shape, split)
                if cut is not None:
                    cuts[names[id(parameter)]] = cut
    return cuts


def _cut_of(module: nn.Module, short: str, shape: tuple[int, ...], split: ModuleSplit) -> ParamCut | None:
    """How a parameter of a split module is cut; None: whole, with whole gradients."""
    if split.style in (Style.PARTIAL, Style.SLICE):
        return ParamCut()
    if split.style in (Style.SUM_OUTPUT, Style.EXPERTS):
        return None  # those of experts are listed by name
    dim = _WEIGHT_DIM[split.style]
    if short == "bias" or len(shape) == 1:
        return ParamCut(0, split.parts or (Part(shape[0]),)) if dim == 0 else None  # that of a row module is whole
    if isinstance(module, Conv1D):
        dim = 1 - dim
    return ParamCut(dim, split.parts or (Part(shape[dim]),))


def _listed_cuts(model: nn.Module, table: ShardingTable, layouts: Mapping[str, ParamLayout]) -> dict[str, ParamCut]:
    """Actual parameter name -> its cut, of the parameters that the table lists, and of adapters beside them."""
    actual = {layout.name: name for name, layout in layouts.items()}
    cuts = {actual[name]: cut for name, cut in table.params.items() if name in actual}
    for name, module in model.named_modules():
        if table.params.get(f"{name}.weight") == ParamCut() and _is_present(module) and has_adapter(module):
            for short in ("lora_A", "lora_B"):
                cuts[f"{name}.{short}.{ADAPTER}.weight"] = ParamCut()
    return cuts


def _cut_parameters(
    model: nn.Module, cuts: Mapping[str, ParamCut], group: TensorGroup, layouts: dict[str, ParamLayout]
) -> dict[str, ParamLayout]:
    """Replace the parameters of ``cuts`` by their slices. A tied weight is cut once and stays one object."""
    layouts = layouts | {name: _layout(layouts[name], cut, group) for name, cut in cuts.items()}
    by_identity = {id(parameter): name for name, parameter in model.named_parameters()}
    local: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        for short, parameter in list(module.named_parameters(recurse=False)):
            layout = layouts[by_identity[id(parameter)]]
            if layout.tp_dim is None:
                continue
            if id(parameter) not in local:
                local[id(parameter)] = local_parameter(parameter, layout)
            module._parameters[short] = local[id(parameter)]
    # What the tensor axis does not cut is replicated over it and owned by its first rank.
    return {
        name: layout if layout.tp_dim is not None else replace(layout, owned=layout.owned and group.rank == 0)
        for name, layout in layouts.items()
    }


def _layout(layout: ParamLayout, cut: ParamCut, group: TensorGroup) -> ParamLayout:
    if cut.dim is None:
        return replace(layout, tp_partial=True)
    parts = cut.parts or (Part(layout.shape[cut.dim]),)
    ranges = [part_ranges(parts, group.size, rank) for rank in range(group.size)]
    return over_tensor_ranks(layout, cut.dim, ranges, group.rank)
