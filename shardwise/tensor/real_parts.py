"""The parts of a split in the real model, from those that were found on its small copy.

Parts of a fused weight (z, x, B, C and dt of a state space model) shrink by different factors, so proportions do not
tell what they are. Three things do: the parts sum to the real dim; features that are a whole dim elsewhere in the same
block (what the next row layer reads, a norm's weight) have its size; sizes come from numbers of the configuration.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from shardwise.errors import PlanError
from shardwise.models.structure import text_config
from shardwise.tensor.parts import Parts, scaled

Dims = Mapping[str, tuple[Parts, int]]  # name -> its parts in the small copy, its size in the real model
# name -> sizes of the same features, in the small copy and in the real model
Pairs = Mapping[str, tuple[int, int]]
_Facts = Mapping[int, set[int]]
_Way = dict[int, int]  # size in the small copy -> in the real model


@dataclass(frozen=True)
class RealSizes:
    """What numbers of the small copy are in the real model.

    Args:
        units: key/value heads, where there are fewer of them than ranks.
        products: numbers of the configuration, and products of two of them -> what these are in the real model.
    """

    units: Mapping[int, int] = field(default_factory=dict)
    products: Mapping[int, frozenset[int]] = field(default_factory=dict)

    def unit(self, number: int) -> int:
        """A number of heads that ranks share."""
        return self.units.get(number, number)


def real_sizes(small: nn.Module, model: nn.Module, degree: int) -> RealSizes:
    """Numbers of the two configurations, beside each other."""
    own, real = ({} if (c := text_config(m)) is None else c.to_dict() for m in (small, model))
    few, many = own.get("num_key_value_heads"), real.get("num_key_value_heads")
    units = {few: many} if isinstance(few, int) and isinstance(many, int) and 1 < few < degree else {}
    pairs = {(n, real.get(key)) for key, n in own.items() if type(n) is int and type(real.get(key)) is int and n > 1}
    products: dict[int, set[int]] = {}
    for (a, real_a), (b, real_b) in itertools.product(pairs | {(1, 1)}, repeat=2):
        products.setdefault(a * b, set()).add(real_a * real_b)
    return RealSizes(units, {size: frozenset(found) for size, found in products.items()})


def real_parts(dims: Dims, same: Pairs, sizes: RealSizes) -> dict[str, Parts]:
    """The parts of every dim of a block in the real model; names are relative to the block.

    Args:
        same: features that are a whole dim in both models.

    Raises:
        PlanError: the parts of a dim have no sizes that fit, or more than one way to.
    """
    known = dict(same) | {name: (parts[0].size, size) for name, (parts, size) in dims.items() if len(parts) == 1}
    ways = {name: _ways(name, parts, size, known, sizes) for name, (parts, size) in dims.items()}
    out = {}
    for name, (parts, size) in dims.items():
        fitting = ways[name]
        if len(fitting) > 1:
            others = [found[0] for other, found in ways.items() if len(found) == 1 and _scope(other) == _scope(name)]
            fitting = [way for way in fitting if all(_agree(way, other) for other in others)]
        if len(fitting) != 1:
            how = "more than one way to have" if fitting else "no"
            rule = f"are {[part.size for part in parts]} in a small copy, and {size} has {how} such parts"
            raise PlanError(f"the parts of {name}", rule, "Use tp=1")
        way = fitting[0]
        out[name] = tuple(part._replace(size=way[part.size], units=sizes.unit(part.units)) for part in parts)
    return out


def _scope(name: str) -> str:
    """The part of the block (attention, MLP) that a name lies in: elsewhere other features may have the same size."""
    return name.partition(".")[0]


def _facts(known: Pairs, scope: str | None) -> dict[int, set[int]]:
    facts: dict[int, set[int]] = {}
    for name, (small, real) in known.items():
        if scope in (None, _scope(name)):
            facts.setdefault(small, set()).add(real)
    return facts


def _ways(name: str, parts: Parts, size: int, known: Pairs, sizes: RealSizes) -> list[_Way]:
    """What the sizes of the parts may be: of what is known to be the same, if that fits, else of all that may be."""
    if len(parts) == 1:
        return [{parts[0].size: size}]
    alike = {part.size: real.size for part, real in zip(parts, scaled(parts, size) or (), strict=False)}
    numbers = {part.size: set(sizes.products.get(part.size, ())) for part in parts}
    near, everywhere = _facts(known, _scope(name)), _facts(known, None)
    # Proportions are for sizes of which nothing else is known.
    guesses = {s: found | {alike[s]} if s in alike and s not in everywhere else found for s, found in numbers.items()}
    # The nearest facts that say anything and fit decide: wider ones would only seem to end a choice that they leave.
    levels: list[_Facts] = [facts for facts in (near, everywhere) if any(s in facts for s in guesses)]
    ways = (_fitting(parts, size, {s: f.get(s) or guesses[s] for s in guesses}, f) for f in (*levels, {}))
    return next((found for found in ways if found), [])


def _fitting(parts: Parts, size: int, candidates: _Facts, facts: _Facts) -> list[_Way]:
    """The ways to have ``size``. Beside facts alone, one unknown size follows from the sum, whatever was guessed."""
    *first, last = sorted(candidates, key=lambda s: (s not in facts, len(candidates[s]), s))
    counts = {s: sum(part.size == s for part in parts) for s in candidates}
    follows = last not in facts and bool(first) and all(s in facts for s in first)
    found = []
    for chosen in itertools.product(*(sorted(candidates[s]) for s in first)):
        way = dict(zip(first, chosen, strict=True))
        rest = size - sum(counts[s] * real for s, real in way.items())
        if rest > 0 and rest % counts[last] == 0 and (follows or rest // counts[last] in candidates[last]):
            found.append(way | {last: rest // counts[last]})
    return found


def _agree(one: _Way, other: _Way) -> bool:
    return all(other.get(size, real) == real for size, real in one.items())
