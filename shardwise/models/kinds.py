"""Which blocks of a model are alike: the kinds that a plan has to be proved for."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from torch import nn

# Numbers that only say where a block stands.
_PLACE = re.compile(r"(layer|block)_?(idx|id|index|number|num)$|_layer_index$|^idx$|^layer$|^seed$")


def block_signatures(blocks: Sequence[nn.Module], config: Any = None) -> list[Hashable]:
    """For each block what makes it a kind: its modules, parameter shapes and plain settings.

    Settings are the texts, whole numbers and truth values that its modules keep, those that say where the block
    stands left out, and its entries in the configuration's lists of one value for each block (``layer_types``).
    Floats (scales, dropout) are none: they change numbers, not the way in which a block can be split.
    """
    lists = _lists_per_block(config, len(blocks))
    return [(_signature(block), tuple(values[i] for values in lists)) for i, block in enumerate(blocks)]


def number_kinds(signatures: Sequence[Hashable]) -> tuple[int, ...]:
    """The kinds numbered in the order of their first block."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(signature, len(numbers)) for signature in signatures)


def _signature(block: nn.Module) -> Hashable:
    parts = []
    for name, module in block.named_modules():
        shapes = tuple((key, tuple(value.shape)) for key, value in module.named_parameters(recurse=False))
        parts.append((name, type(module).__qualname__, shapes, _settings(module)))
    return tuple(parts)


def _settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (key, value)
        for key, value in sorted(vars(module).items())
        if isinstance(value, str | bool | int) and not key.startswith("_") and not _PLACE.search(key)
    )


def _lists_per_block(config: Any, num_blocks: int) -> list[Sequence[Any]]:
    if config is None:
        return []
    found: list[Sequence[Any]] = []
    for key, value in sorted(vars(config).items()):
        if key.startswith("_") or not isinstance(value, list | tuple) or len(value) != num_blocks:
            continue
        if all(isinstance(item, str | bool | int) for item in value) and not _ascending(value):
            found.append(value)
    return found


def _ascending(values: Sequence[Any]) -> bool:
    """Whether it is a list of places, which tells nothing of a kind."""
    return all(isinstance(v, int) and not isinstance(v, bool) for v in values) and len(set(values)) == len(values) > 1
