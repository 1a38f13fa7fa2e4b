"""What a model is made of and how it can be split, from its ``config.json``: nothing of true size is built."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.check.costs import module_costs
from shardwise.errors import PlanError
from shardwise.models.build import build_on_meta, recompute_buffers
from shardwise.models.chain import find_chain
from shardwise.models.describe import describe_sizes
from shardwise.models.init import distributions
from shardwise.models.shrink import build_small, shrink
from shardwise.models.structure import Structure, find_structure
from shardwise.parallel.tensor import proven_table
from shardwise.spec.model import ModelSpec, check_config
from shardwise.spec.run import RunConfig, StrategyConfig
from shardwise.spec.strategy import resolve
from shardwise.tensor.alternatives import share_of
from shardwise.tensor.cache import TableCache
from shardwise.tensor.table import ShardingTable

SCHEMA = 1
MAX_DEGREE = 16


def describe(
    folder: Path, degrees: Sequence[int], tables: TableCache, tell: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The answer of ``model show``, plain data.

    Args:
        degrees: tensor degrees whose tables are wanted; none: every legal one up to :data:`MAX_DEGREE`.
        tables: where they are looked for first, and kept.
        tell: is called with what is being done, before it takes seconds.

    Raises:
        ConfigError: the folder holds no causal language model that can be read.
    """
    check_config(folder)
    model = build_on_meta(folder, None)
    answer: dict[str, Any] = {
        "schema": SCHEMA,
        "architecture": type(model).__name__,
        "model_type": model.config.model_type,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "unsupported": _unsupported(model),
    }
    try:
        structure = find_structure(model)
    except PlanError as error:
        answer["unsupported"].append({"part": "structure", "rule": error.rule})
        return answer
    spec = describe_sizes(model, structure, folder)
    answer["structure"] = {
        "blocks": structure.blocks,
        "num_blocks": structure.num_blocks,
        "embedding": structure.embedding,
        "head": structure.head,
        "tied": structure.tied,
    }
    answer["parts"] = part_sizes(model, structure)
    answer["kinds"] = kinds(model, structure)
    answer["pipeline"] = _pipeline(model, structure)
    answer["tensor"] = [
        _degree(model, structure, spec, degree, tables, tell) for degree in degrees or range(1, MAX_DEGREE + 1)
    ]
    return answer


def part_sizes(model: nn.Module, structure: Structure) -> dict[str, int]:
    """Parameters by part; a tied head has none of its own, ``other`` is what stands before and behind the blocks."""
    sizes = {id(p): p.numel() for p in model.parameters()}
    parts: dict[str, int] = {}
    seen: set[int] = set()
    for part in ("embedding", "blocks", "head"):
        own = {id(p) for p in model.get_submodule(getattr(structure, part)).parameters()} - seen
        seen |= own
        parts[part] = sum(sizes[key] for key in own)
    return parts | {"other": sum(size for key, size in sizes.items() if key not in seen)}


def kinds(model: nn.Module, structure: Structure) -> list[dict[str, Any]]:
    """Each kind of block: which blocks are of it, and its modules with parameters."""
    blocks = list(model.get_submodule(structure.blocks).children())
    found = []
    for kind in sorted(set(structure.kinds)):
        places = [index for index, other in enumerate(structure.kinds) if other == kind]
        block = blocks[places[0]]
        modules = [
            {"name": name, "class": type(module).__name__, "shapes": {n: list(p.shape) for n, p in own}}
            for name, module in block.named_modules()
            if (own := list(module.named_parameters(recurse=False)))
        ]
        parameters = sum(p.numel() for p in block.parameters())
        found.append(
            {"kind": kind, "class": type(block).__name__, "blocks": ranges(places), "number": len(places)}
            | {"parameters": parameters, "modules": modules}
        )
    return found


def ranges(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5] -> '0-2, 5'``; ascending."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and groups[-1][1] == number - 1:
            groups[-1][1] = number
        else:
            groups.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in groups)


def illegal_by_numbers(spec: ModelSpec, degree: int) -> str | None:
    """The rule of heads, KV heads and vocabulary that ``degree`` breaks; None if none."""
    run = RunConfig(model="", strategy=StrategyConfig(tp=degree, pp=1, dp=1))
    try:
        resolve(run, spec, degree)
    except PlanError as error:
        return error.rule
    return None


def table_rows(model: nn.Module, structure: Structure, table: ShardingTable) -> list[dict[str, Any]]:
    """The table with blocks that are alike in one row: module, style, collectives, and elements moved a token."""
    place = _place(structure)
    rows: dict[str, dict[str, Any]] = {}
    places: dict[str, list[int]] = {}
    for cost in module_costs(model, table):
        match = place.match(cost.module)
        short = place.sub(f"{structure.blocks}.*", cost.module)
        row = cost.to_json() | {"module": short}
        key = repr(row)
        rows.setdefault(key, row)
        if match:
            places.setdefault(key, []).append(int(match[1]))
    return [row | {"blocks": ranges(sorted(places.get(key, [])))} for key, row in rows.items()]


def _place(structure: Structure) -> re.Pattern[str]:
    """The beginning of a name inside of a block, with the block's number."""
    return re.compile(rf"^{re.escape(structure.blocks)}\.(\d+)(?=\.|$)")


def _degree(
    model: PreTrainedModel,
    structure: Structure,
    spec: ModelSpec,
    degree: int,
    tables: TableCache,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    rule = illegal_by_numbers(spec, degree)
    if rule is None and degree > 1:
        tell(f"tensor degree {degree}: looking for a table")
        try:
            table = proven_table(model, degree, tables)
        except PlanError as error:
            rule = error.rule
        else:
            return {"degree": degree, "legal": True, "rule": None} | _table(model, structure, table)
    return {"degree": degree, "legal": rule is None, "rule": rule}


def _table(model: nn.Module, structure: Structure, table: ShardingTable) -> dict[str, Any]:
    cost = table.cost
    place = _place(structure)
    refused: dict[str, str] = {}
    for name, reason in table.refused.items():
        refused.setdefault(place.sub(f"{structure.blocks}.*", name), reason)
    plain = table.to_json()
    return {
        "modules": table_rows(model, structure, table),
        "whole": refused,
        "cost": None
        if cost is None
        else {
            "whole_parameters": cost.whole,
            "block_parameters": cost.total,
            "forward_elements_per_token": cost.forward,
            "backward_elements_per_token": cost.backward,
        },
        "alternatives": [
            {"tp_whole": share_of(one), "whole_parameters": one.whole, "elements_per_token": one.moved}
            for one in table.alternatives[1:]
        ],
        "params": plain["params"],
        "values": plain["values"],
    }


def _pipeline(model: PreTrainedModel, structure: Structure) -> dict[str, Any]:
    try:
        chain = find_chain(model, structure)
    except PlanError as error:
        return {"cut": False, "rule": error.rule, "before": [], "after": [], "max_stages": 1}
    after = [*chain.after, structure.head]
    before = [structure.embedding, *chain.before]
    return {"cut": True, "rule": None, "before": before, "after": after, "max_stages": structure.num_blocks}


def _unsupported(model: PreTrainedModel) -> list[dict[str, str]]:
    """What training would refuse whatever the strategy, or with random weights."""
    found = []
    try:
        recompute_buffers(build_small(shrink(model.config)))
    except PlanError as error:
        found.append({"part": error.value, "rule": error.rule})
    except Exception as error:  # whatever a foreign class raises
        found.append({"part": "a small copy", "rule": f"{type(error).__name__}: {error}"})
    try:
        distributions(model)
    except PlanError as error:
        found.append({"part": error.value, "rule": error.rule})
    return found
