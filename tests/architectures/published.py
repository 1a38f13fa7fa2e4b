"""The tensor plan that a configuration class publishes, as a table that the same executor runs. For comparison only."""

from __future__ import annotations

import fnmatch
from typing import Any

from shardwise.models.structure import Structure, text_config
from shardwise.tensor.table import ModuleSplit, ParamCut, ShardingTable, Style
from shardwise.tensor.trace import trace_blocks

_STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "colwise_gather_output": Style.COLUMN_GATHER,
    "rowwise_split_input": Style.ROW_SPLIT,
    "mla_kv_a_proj": Style.SUM_OUTPUT,
    "moe_tp_experts": Style.EXPERTS,
}
# What a table says of parameters, or of the stack of experts around them.
_OF_PARAMETERS = ("packed_colwise", "packed_rowwise", "local_params", "moe_identity_expert")


def published_table(model: Any, structure: Structure, own: ShardingTable) -> tuple[ShardingTable | None, set[str]]:
    """The published plan of a small model, None without one; and the styles in it that have no counterpart here.

    Embedding and head are those of ``own``; so are the parts of fused weights and the numbers that modules read,
    of which a plan says nothing.
    """
    plan: dict[str, str] = getattr(type(text_config(model)), "base_model_tp_plan", None) or {}
    base = structure.blocks.rpartition(".")[0]
    wanted = {f"{base}.{pattern}" if base else pattern: style for pattern, style in plan.items()}
    wanted = {pattern: style for pattern, style in wanted.items() if fnmatch.fnmatch(pattern, f"{structure.blocks}.*")}
    if not wanted:
        return None, set()
    modules: dict[str, ModuleSplit] = {}
    params: dict[str, ParamCut] = {}
    unknown: set[str] = set()
    groups = _groups(model, structure)
    for name, module in model.named_modules():
        style = next((s for p, s in wanted.items() if fnmatch.fnmatchcase(name, p)), None)
        if style is None:
            continue
        if style == "replicated_with_grad_allreduce":
            params |= {f"{name}.{short}": ParamCut() for short, _ in module.named_parameters(recurse=False)}
        elif style in _STYLES:
            modules[name] = _split(name, _STYLES[style], own, groups)
            if style == "moe_tp_experts":
                params |= {n: c for n, c in own.params.items() if n.rpartition(".")[0] == name}
        elif style not in _OF_PARAMETERS:
            unknown.add(style)
    _settle(model, modules, params)
    # What a module reads changes where its results are split as ours are, and not gathered again.
    narrow = {name for name, split in modules.items() if split.style is own.style(name) is Style.COLUMN}
    values = {n: v for n, v in own.values.items() if any(name.startswith(f"{n}.") for name in narrow)}
    ends = {n: s for n, s in own.modules.items() if n in (structure.embedding, structure.head)}
    return ShardingTable(own.degree, ends | modules, params, values), unknown


def _split(name: str, style: Style, own: ShardingTable, groups: dict[str, str]) -> ModuleSplit:
    mine = own.modules.get(name)
    parts = mine.parts if mine is not None and mine.style is style else ()
    return ModuleSplit(style, parts, groups.get(name, name) if style in (Style.COLUMN, Style.COLUMN_GATHER) else "")


def _settle(model: Any, modules: dict[str, ModuleSplit], params: dict[str, ParamCut]) -> None:
    """What a plan leaves to its hooks: gathered results that are taken apart again, norms of latent projections."""
    by_parent: dict[str, list[str]] = {}
    for name in modules:
        by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    for parent, names in by_parent.items():
        styles = {modules[name].style for name in names}
        if Style.ROW_SPLIT in styles:
            for name in names:
                if modules[name].style is Style.COLUMN_GATHER:
                    modules[name] = ModuleSplit(Style.COLUMN_GATHER, (), modules[name].group, shares=True)
            inside = model.get_submodule(parent).named_parameters(prefix=parent)
            params |= {n: ParamCut() for n, _ in inside if n.rpartition(".")[0] not in modules}
        if Style.SUM_OUTPUT in styles:
            # The sum of kv_a's gradient stands for that of kv_b's input, and the norm between them sees shares.
            for name in names:
                if name.endswith("kv_b_proj"):
                    modules[name] = ModuleSplit(Style.COLUMN, modules[name].parts, "")
            norm = f"{parent}.kv_a_layernorm.weight"
            params |= {norm: ParamCut()} if norm in dict(model.named_parameters()) else {}


def _groups(model: Any, structure: Structure) -> dict[str, str]:
    """Product -> the first product that reads the same tensor: one sum serves all, as ours does."""
    groups: dict[str, str] = {}
    for trace in trace_blocks(model, structure.blocks):
        first: dict[int, str] = {}
        for product in trace.products:
            groups[product.name] = first.setdefault(id(product.inputs[0]), product.name)
    return groups
