"""A table that somebody wrote or edited: honoured where it is right, refused with the reason where it is not.

It is proven as a found one is, on simulated ranks with a small copy. What the found table of the model says too is
taken over to the copy as it was found; the rest is scaled to the copy's sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.structure import Structure, find_structure
from shardwise.spec.tolerance import PROOF
from shardwise.tensor.find import find_tables
from shardwise.tensor.kind import signature, width
from shardwise.tensor.parts import Parts, scaled
from shardwise.tensor.sequence import uneven_length
from shardwise.tensor.simulate import Reference, compare, reference
from shardwise.tensor.table import LocalValue, ModuleSplit, ParamCut, ShardingTable

VALUE = "the table of strategy.plan"
REMEDY = "Undo the edit, or leave table: null for the table that is found"
_MOST_NAMES = 3


@dataclass(frozen=True)
class _Block:
    """What a table says of one block; names are relative to it."""

    modules: Mapping[str, ModuleSplit] = field(default_factory=dict)
    params: Mapping[str, ParamCut] = field(default_factory=dict)
    values: Mapping[str, tuple[LocalValue, ...]] = field(default_factory=dict)


def same_split(one: ShardingTable, other: ShardingTable) -> bool:
    """Whether two tables split alike, whatever they tell of costs and reasons."""
    plain = [replace(table, cost=None, refused={}, alternatives=()) for table in (one, other)]
    return plain[0] == plain[1]


def check_edited(model: nn.Module, small: nn.Module, table: ShardingTable, whole: float | None = None) -> ShardingTable:
    """``table`` as it runs, with what its edits leave whole among the refused.

    Args:
        model: the whole model, on meta.
        small: a copy as for :func:`shardwise.tensor.find.find_table`.
        whole: the bound within which the table was found that was edited.

    Raises:
        PlanError: it names what the model has not, cuts the sequence in its own way, or its split of the small copy
            does not run or differs from the whole.
    """
    found, small_found = find_tables(model, small, table.degree, sequence=table.sequence is not None, whole=whole)
    if same_split(table, found):
        return found
    _check_names(model, table)
    if table.sequence != found.sequence:
        raise PlanError(VALUE, "cuts the sequence at other modules than those that can be shown to be right", REMEDY)
    _check_parts(model, table, found)
    edited = _edited_names(table, found)
    structure, small_structure = find_structure(model), find_structure(small)
    want = reference(small, uneven_length(table.degree)) if table.sequence is not None else reference(small)
    for small_table in _variants(model, structure, small, small_structure, (table, found, small_found)):
        _prove(small, small_table, want, edited)
    left = {name: "whole in the plan" for name in found.modules if name not in table.modules}
    return replace(table, cost=None, alternatives=(), refused={**table.refused, **left})


def _check_names(model: nn.Module, table: ShardingTable) -> None:
    modules = {name for name, _ in model.named_modules()}
    params = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name in (*table.modules, *table.values):
        if name not in modules:
            raise PlanError(VALUE, f"names the module {name!r}, which the model has not", REMEDY)
    for name in table.params:
        if name not in params:
            raise PlanError(VALUE, f"names the parameter {name!r}, which the model has not", REMEDY)


def _check_parts(model: nn.Module, table: ShardingTable, found: ShardingTable) -> None:
    """Parts of the real model cannot be proven on a copy, whose parts have other proportions: they stay as found."""
    dims: list[tuple[str, Parts, Parts, int]] = [
        (name, split.parts, found.modules[name].parts if name in found.modules else (), _size(model, name))
        for name, split in table.modules.items()
        if split.parts
    ]
    dims += [
        (name, cut.parts, found.params[name].parts if name in found.params else (), _dim(model, name, cut))
        for name, cut in table.params.items()
        if cut.parts
    ]
    for name, parts, right, size in dims:
        sizes = [part.size for part in parts]
        if right and parts != right:
            rule = f"has parts {sizes} of {name}, which holds {[part.size for part in right]} side by side"
            raise PlanError(VALUE, rule, REMEDY)
        if sum(sizes) != size:
            raise PlanError(VALUE, f"has parts {sizes} of {name}, which is {size} wide", REMEDY)


def _size(model: nn.Module, name: str) -> int:
    return width(model.get_submodule(name))


def _dim(model: nn.Module, name: str, cut: ParamCut) -> int:
    return 0 if cut.dim is None else model.get_parameter(name).shape[cut.dim]


def _edited_names(table: ShardingTable, found: ShardingTable) -> str:
    """The first of what differs, for a message."""
    names: dict[str, None] = {}
    for own, other in ((table.modules, found.modules), (table.params, found.params), (table.values, found.values)):
        names |= dict.fromkeys(n for n in {**other, **own} if own.get(n) != other.get(n))  # type: ignore[attr-defined]
    shown = list(names)[:_MOST_NAMES]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _variants(
    model: nn.Module,
    structure: Structure,
    small: nn.Module,
    small_structure: Structure,
    tables: tuple[ShardingTable, ShardingTable, ShardingTable],
) -> list[ShardingTable]:
    """Tables of the small copy that together have every way in which ``tables[0]`` splits a kind of block."""
    table, found, small_found = tables
    ways: dict[Any, list[_Block]] = {}  # kind -> its splits on the copy
    small_blocks = list(small.get_submodule(small_structure.blocks).children())
    first = {signature(block): index for index, block in reversed(list(enumerate(small_blocks)))}
    for index, block in enumerate(model.get_submodule(structure.blocks).children()):
        kind, prefix = signature(block), f"{structure.blocks}.{index}"
        own, known = _of_block(table, prefix), _of_block(found, prefix)
        if kind not in first:
            if own != _Block():
                raise PlanError(VALUE, f"splits {prefix}, of a kind that no small copy has", REMEDY)
            continue
        small_prefix = f"{small_structure.blocks}.{first[kind]}"
        here = _of_block(small_found, small_prefix)
        on_copy = _on_copy(own, known, here, small_blocks[first[kind]])
        if on_copy not in ways.setdefault(kind, []):
            ways[kind].append(on_copy)
    outside = f"{structure.blocks}."
    ends = {name: split for name, split in table.modules.items() if not name.startswith(outside)}
    number = max((len(found_ways) for found_ways in ways.values()), default=1)
    result = []
    for turn in range(number):
        modules: dict[str, ModuleSplit] = dict(ends)
        params = {name: cut for name, cut in table.params.items() if not name.startswith(outside)}
        values: dict[str, tuple[LocalValue, ...]] = {}
        for index, block in enumerate(small_blocks):
            known_ways = ways.get(signature(block))
            if known_ways:
                prefix = f"{small_structure.blocks}.{index}."
                way = known_ways[turn % len(known_ways)]
                modules |= {
                    prefix + n: replace(s, group=prefix + s.group if s.group else "") for n, s in way.modules.items()
                }
                params |= {prefix + n: cut for n, cut in way.params.items()}
                values |= {prefix + n: numbers for n, numbers in way.values.items()}
        result.append(ShardingTable(table.degree, modules, params, values, sequence=small_found.sequence))
    return result


def _of_block(table: ShardingTable, prefix: str) -> _Block:
    start = f"{prefix}."

    def inside(entries: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(start): entry for name, entry in entries.items() if name.startswith(start)}

    modules = {n: replace(s, group=s.group.removeprefix(start)) for n, s in inside(table.modules).items()}
    return _Block(modules, inside(table.params), inside(table.values))


def _on_copy(own: _Block, found: _Block, small_found: _Block, small_block: nn.Module) -> _Block:
    """A block's split on the small copy: as found there where the table says what was found, else scaled."""

    def module(name: str, split: ModuleSplit) -> ModuleSplit:
        if found.modules.get(name) == split and name in small_found.modules:
            return small_found.modules[name]
        return replace(split, parts=_scaled(name, split.parts, _size(small_block, name)) if split.parts else ())

    def param(name: str, cut: ParamCut) -> ParamCut:
        if found.params.get(name) == cut and name in small_found.params:
            return small_found.params[name]
        return replace(cut, parts=_scaled(name, cut.parts, _dim(small_block, name, cut)))

    def numbers(name: str, given: tuple[LocalValue, ...]) -> tuple[LocalValue, ...]:
        same = found.values.get(name) == given and name in small_found.values
        return small_found.values[name] if same else given

    return _Block(
        {name: module(name, split) for name, split in own.modules.items()},
        {name: param(name, cut) for name, cut in own.params.items()},
        {name: numbers(name, given) for name, given in own.values.items()},
    )


def _scaled(name: str, parts: Parts, size: int) -> Parts:
    if not parts:
        return ()
    found = scaled(parts, size)
    if found is None:
        rule = f"has parts {[part.size for part in parts]} of {name} that no small copy can have in {size}"
        raise PlanError(VALUE, rule, REMEDY)
    return tuple(found)


def _prove(small: nn.Module, table: ShardingTable, want: Reference, edited: str) -> None:
    """Raises PlanError where the split copy does not compute what the whole one does."""
    try:
        difference = compare(small, table, want)
    except Exception as error:  # whatever a foreign forward raises on its part
        told = " ".join(f"{type(error).__name__}: {error}".split())
        rule = f"edited at {edited}: on a small copy it does not run ({told})"
        raise PlanError(VALUE, rule, REMEDY) from None
    if difference.error > PROOF:
        where = f"{difference.where}: {difference.error:.1e}"
        rule = f"edited at {edited}: on a small copy the split differs from one process ({where})"
        raise PlanError(VALUE, rule, REMEDY)
