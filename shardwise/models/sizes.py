"""Small sizes in the place of a configuration's own, such that what divides what stays as it is.

A configuration is a tree of named whole numbers. The name tells what a number is (heads, a head's width, another
width, a vocabulary ...), and each kind has its own rule:

- *Counts* that split something evenly (heads, groups): each prime's exponents are renumbered from below, which
  keeps every ``a divides b`` between them, every inequality of a ratio with 1, and what ``degree`` divides.
- *Head widths* are scaled together, so ratios between them (a rotary part of a head) stay.
- *Widths* take the smallest values that keep products (heads times head width), multiples of the counts that
  divided them, and what ``degree`` divides; different widths stay different, so that no fault hides behind an
  accidental equality.

Only numbers: no torch here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Path = tuple[str | int, ...]
Tree = dict[str, Any]

SMALL_HEAD = 8  # the narrowest head
MAX_HEAD = 64
POSITIONS = 64
WINDOW = 4
VOCABULARY = 64
EXPERTS_PER_DEGREE = 2

# Dictionaries that hold no sizes, or sizes of another kind (treated apart).
SKIPPED = ("id2label", "label2id", "rope_parameters", "rope_scaling", "quantization_config", "task_specific_params")


class Role(Enum):
    """What a number of a configuration means."""

    TOKEN = "token"
    BLOCKS = "blocks"
    COUNT = "count"
    HEAD = "head"
    VOCABULARY = "vocabulary"
    EXPERTS = "experts"
    EXPERT_GROUPS = "expert groups"
    TOP_GROUPS = "top groups"
    TOP_K = "top_k"
    POSITIONS = "positions"
    WINDOW = "window"
    WIDTH = "width"


# The first pattern that is found in the name decides.
_ROLES: tuple[tuple[str, Role | None], ...] = (
    (r"token_(id|index|offset)s?$|(^|_)(pad|bos|eos|unk|mask|sep|cls)_index$|suppress_tokens$", Role.TOKEN),
    (r"^(num_(hidden_)?layers|n_layers?|(num_)?(en|de)coder_layers|num_blocks|depth)$", Role.BLOCKS),
    (r"vocab", Role.VOCABULARY),
    (r"^n_group$|^num_expert_groups?$", Role.EXPERT_GROUPS),
    (r"^topk_group$", Role.TOP_GROUPS),
    (r"per_tok(en)?$|top_?k(_|$)|^moe_k$", Role.TOP_K),
    (r"(^|_)shared_experts$|^n_shared|_top_k_", None),
    (r"(^|_)experts$|^zero_expert_num$", Role.EXPERTS),
    (r"head_?dim|(^|_)d_head$|head_size$|kv_channels|dim_head|rotary_dim|head_dim_", Role.HEAD),
    (r"heads?(_|$)|^n_groups$|_n?groups$", Role.COUNT),
    (r"expert_(layer|group)|_(period|offset|interval|step|stride|every_n_layers)$", None),
    (r"conv|kernel|(^|_)(num_)?(mem_blocks|random_blocks|buckets|hashes|cycles|inputs)$", None),
    (r"window|chunk_(size|length)|(^|_)block_size$|^floor_scale$", Role.WINDOW),
    (r"position|^n_ctx$|^max_seq_len$|^context_length$|^mem_len$", Role.POSITIONS),
    (
        r"size|dim|width|rank|inner|_inner|d_model|n_embd|ffn|dff|dim_ff|d_rel|d_ssm|d_state|intermediate|length",
        Role.WIDTH,
    ),
)


def role_of(name: str, value: int) -> Role | None:
    """What the number ``value`` under the key ``name`` means; None: it stays as it is."""
    role = next((role for pattern, role in _ROLES if re.search(pattern, name)), None)
    least = {Role.WIDTH: 8, Role.POSITIONS: POSITIONS, Role.WINDOW: WINDOW, Role.HEAD: 2}.get(role, 0) if role else 0
    return None if role is None or value <= least else role


@dataclass(frozen=True)
class Number:
    """A number of a configuration: where it stands, its key, what it is and its meaning."""

    path: Path
    name: str
    value: int
    role: Role


def numbers(tree: Tree, prefix: Path = ()) -> Iterator[Number]:
    """Every number of a configuration that has a role, in the nested ones too; a list has the role of its key."""
    for key, value in tree.items():
        path = (*prefix, key)
        if key in SKIPPED:
            continue
        if isinstance(value, dict):
            yield from numbers(value, path)
            continue
        items = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
        for index, item in items:
            if isinstance(item, int) and not isinstance(item, bool):
                role = role_of(key, item)
                if role is not None:
                    yield Number(path if index is None else (*path, index), key, item, role)


def compress_counts(values: Iterable[int], degree: int) -> dict[int, int]:
    """Small counts with the same divisibility: among each other, by ``degree``, and by 1.

    For each prime the exponents that occur are renumbered in their order; those up to ``degree``'s own stay.
    Primes above 3 that ``degree`` has not become 3 (5 if ``degree`` has 3).
    """
    known = sorted({value for value in values if value > 0})
    anchors = _factors(degree)
    ranks: dict[int, dict[int, int]] = {}
    for prime in {p for value in known for p in _factors(value)}:
        least = anchors.get(prime, 0)
        higher = sorted({e for value in known if (e := _factors(value).get(prime, 0)) > least})
        if prime not in anchors:
            ranks[prime] = {e: rank for rank, e in enumerate(higher, 1)}
        else:
            present = any(_factors(value).get(prime, 0) == least for value in known)
            ranks[prime] = {e: least + rank for rank, e in enumerate(higher, 1 if present else 0)}
    odd = 5 if 3 in anchors else 3
    result = {}
    for value in known:
        small = 1
        for prime, exponent in _factors(value).items():
            small *= (prime if prime in anchors or prime <= 3 else odd) ** ranks[prime].get(exponent, exponent)
        result[value] = min(small, value)
    return result


def _factors(value: int) -> dict[int, int]:
    factors: dict[int, int] = {}
    prime = 2
    while prime * prime <= value:
        while value % prime == 0:
            factors[prime] = factors.get(prime, 0) + 1
            value //= prime
        prime += 1
    if value > 1:
        factors[value] = factors.get(value, 0) + 1
    return factors


def scale_heads(values: Iterable[int], least: int = SMALL_HEAD) -> dict[int, int]:
    """Head widths scaled together so that the smallest becomes ``least``; even stays even, ratios up to 8 stay."""
    known = sorted(set(values))
    if not known or known[0] <= least:
        least = known[0] if known else least
    small: dict[int, int] = {}
    for value in known:
        scaled = min(value, MAX_HEAD, max(least, value * least // known[0]))
        small[value] = scaled if value % 2 else max(2, scaled - scaled % 2)
    return small


def next_width(start: int, accept: Callable[[int], bool], taken: Iterable[int]) -> int:
    """The smallest width from ``start`` on that is accepted and not taken; ``start`` itself if there is none."""
    used = set(taken)
    return next((width for width in range(start, start + 4096) if width not in used and accept(width)), start)


def small_vocabulary(values: Sequence[int], degree: int) -> dict[int, int]:
    """Small vocabularies in the same order, each with its remainder by ``degree``.

    Each is so large that the last of ``degree`` ranks has a part of it, as it has of a large one: of q x degree + r
    rows all ranks but the last take q + 1, so q must be at least degree - r.
    """
    least = max((degree - value % degree for value in values if value % degree), default=0)
    base = degree * max(math.ceil(VOCABULARY / degree), least)
    large = sorted({value for value in values if value > base + degree})
    return {value: base + 2 * degree * rank + value % degree for rank, value in enumerate(large)}


def small_experts(value: int, degree: int) -> int:
    """About two experts for each of ``degree``: even, and divisible by ``degree``, where they were."""
    start = EXPERTS_PER_DEGREE * degree
    fits = (n for n in range(start, value) if (n % degree == 0) == (value % degree == 0) and n % 2 == value % 2)
    return next(fits, value)
