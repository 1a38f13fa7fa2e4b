"""Numbers that a forward reads and that are those of the whole model: head counts, widths.

A split module computes on its part with the class's own forward, so what that reads as ``self.num_heads`` or
``self.config.num_attention_heads`` must be this rank's number. Which of them are read is seen by watching; which of
those must change is found by trying, the likely sets first.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from shardwise.tensor.table import LocalValue
from shardwise.tensor.trace import run

Candidate = tuple[str, LocalValue]  # module name, what it could read instead
_MOST_TRIALS = 96


def read_numbers(model: nn.Module, scope: str) -> dict[str, dict[str, int]]:
    """The whole numbers above 1 that modules of ``scope`` read of themselves and of their configuration in a pass.

    Returns:
        Module name -> attribute (``config.NAME`` where it is the configuration's) -> value.
    """
    seen: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        for name, module in model.get_submodule(scope).named_modules(prefix=scope):
            found = seen.setdefault(name, {})
            config = vars(module).get("config")
            if config is not None:
                watched = copy.copy(config)
                module.config = watched
                stack.callback(setattr, module, "config", config)
                stack.enter_context(_watched(watched, found, "config."))
            stack.enter_context(_watched(module, found, ""))
        run(model)
    return {name: found for name, found in seen.items() if found}


@contextmanager
def _watched(target: Any, found: dict[str, int], prefix: str) -> Iterator[None]:
    """Note in ``found`` the whole numbers that are read of ``target``."""
    kind = type(target)

    def read(self: Any, name: str) -> Any:
        value = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if type(value) is int and value > 1 and not name.startswith("_"):
            found[f"{prefix}{name}"] = value
        return value

    watching = type(kind.__name__, (kind,), {"__getattribute__": read})
    target.__class__ = watching
    try:
        yield
    finally:
        target.__class__ = kind


def candidate_sets(
    numbers: dict[str, dict[str, int]], widths: Sequence[int], degree: int, units: int
) -> Iterator[dict[str, tuple[LocalValue, ...]]]:
    """Sets of numbers to read otherwise, the likely ones first, at most some dozens.

    Args:
        numbers: what :func:`read_numbers` saw.
        widths: sizes of dims that the split makes smaller.
        units: number of key/value heads where several ranks share one, else 0.
    """
    divided = [
        (module, LocalValue(attribute, 1, degree))
        for module, found in numbers.items()
        for attribute, value in found.items()
        if value % degree == 0
    ]
    value_of = {(m, a): v for m, found in numbers.items() for a, v in found.items()}
    heads = [c for c in divided if "head" in c[1].attribute and not _is_width(c[1].attribute)]
    wide = [c for c in divided if value_of[c[0], c[1].attribute] in widths and c not in heads]
    if units:
        shared = _shared(value_of, units, degree)
        heads = [c for c in heads if c[1].attribute not in {s[1].attribute for s in shared}] + shared
        divided = [c for c in divided if c not in shared] + shared
    tried = set()
    likely: list[Sequence[Candidate]] = [(), heads, [*heads, *wide], wide]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(divided, size) for size in range(1, len(divided) + 1)
    )
    for chosen in itertools.chain(likely, subsets):
        key = frozenset(chosen)
        if key in tried:
            continue
        tried.add(key)
        yield _by_module(chosen)
        if len(tried) >= _MOST_TRIALS:
            return


def _is_width(attribute: str) -> bool:
    """Whether a name with "head" in it is the size of one, which no split changes."""
    return any(word in attribute for word in ("dim", "size", "groups"))


def _shared(value_of: dict[tuple[str, str], int], units: int, degree: int) -> list[Candidate]:
    """With fewer key/value heads than ranks a rank has one of them, and the query heads of one group."""
    found: list[Candidate] = []
    for (module, attribute), value in value_of.items():
        if value == units and "head" in attribute:
            found.append((module, LocalValue(attribute, 1, units)))
        elif "groups" in attribute and value * units % degree == 0:
            found.append((module, LocalValue(attribute, units, degree)))
    return found


def _by_module(chosen: Sequence[Candidate]) -> dict[str, tuple[LocalValue, ...]]:
    table: dict[str, tuple[LocalValue, ...]] = {}
    for module, value in chosen:
        table[module] = (*table.get(module, ()), value)
    return table
