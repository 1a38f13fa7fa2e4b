"""The sizes of a configuration, all of them together, replaced by small ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from shardwise.models.sizes import (
    MAX_HEAD,
    POSITIONS,
    SKIPPED,
    SMALL_HEAD,
    WINDOW,
    Number,
    Path,
    Role,
    Tree,
    compress_counts,
    next_width,
    numbers,
    scale_heads,
    small_experts,
    small_vocabulary,
)

_HEADS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads", "encoder_attention_heads")
_HIDDEN = ("hidden_size", "d_model", "n_embd", "dim_model")
_HEAD_WIDTH = ("head_dim", "d_head", "dim_head", "d_kv")
_OTHER_BLOCKS = 2
_AT_MOST = {
    Role.TOP_K: 2,
    Role.EXPERT_GROUPS: 2,
    Role.TOP_GROUPS: 1,
    Role.WINDOW: WINDOW,
    Role.POSITIONS: POSITIONS,
}


def text_path(config: Any) -> Path:
    """Where the configuration of the language part stands inside ``config``."""
    text = config.get_text_config(decoder=True)
    for key, value in vars(config).items():
        if value is text:
            return (key,)
    return ()


def shrink_sizes(tree: Tree, path: Path, degree: int, scale: int = 1) -> Tree:
    """``tree`` with small sizes and all the blocks of its language part; widths are about ``scale`` times the least."""
    found = sorted(numbers(tree), key=lambda number: number.path[: len(path)] != path)  # the language part first
    sizes = _Sizes(tree, path, found, degree, scale)
    small = copy.deepcopy(tree)
    for number in found:
        _put(small, number.path, sizes.small(number))
    for part in _parts(small):
        _fit_rope(part, sizes)
    return small


def _put(tree: Any, path: Path, value: int) -> None:
    for key in path[:-1]:
        if isinstance(tree[key], tuple):
            tree[key] = list(tree[key])
        tree = tree[key]
    tree[path[-1]] = value


def _parts(tree: Tree) -> Iterator[Tree]:
    yield tree
    for key, value in tree.items():
        if isinstance(value, dict) and key not in SKIPPED:
            yield from _parts(value)


def _first(tree: Tree, keys: tuple[str, ...]) -> int | None:
    return next((tree[key] for key in keys if isinstance(tree.get(key), int)), None)


class _Sizes:
    """Old size -> small size, for each meaning."""

    def __init__(self, tree: Tree, path: Path, found: list[Number], degree: int, scale: int) -> None:
        self.degree, self.path, self._found, self._scale = degree, path, found, scale
        by_role = {role: [n.value for n in found if n.role is role] for role in Role}
        self.counts = compress_counts(by_role[Role.COUNT], degree)
        self._main = _inner(tree, path)
        parts = [self._main, *(part for part in _parts(tree) if part is not self._main)]
        implied = [width for part in parts if (width := _implied_head(part)) is not None]
        heads = [*by_role[Role.HEAD], *implied]
        self.heads = scale_heads(heads, scale * _least_head(tree, heads))
        self._vocabulary = small_vocabulary(by_role[Role.VOCABULARY], degree)
        self._tokens = _small_tokens(found, min(self._vocabulary.values(), default=0))
        self.widths: dict[int, int] = {}
        for part in parts:
            self._tie_width(part)
        self._products = self._known_products(parts)
        for number in sorted((n for n in found if n.role is Role.WIDTH), key=lambda n: n.value):
            self._add_width(number)
        self._fit_inner_heads(parts)

    def small(self, number: Number) -> int:
        """The small value of a number."""
        value, role = number.value, number.role
        if role is Role.EXPERTS:
            return small_experts(value, self.degree)
        if role is Role.BLOCKS:
            return value if number.path[:-1] == self.path else min(value, _OTHER_BLOCKS)
        if role in _AT_MOST:
            return min(value, _AT_MOST[role])
        known = {
            Role.COUNT: self.counts,
            Role.HEAD: self.heads,
            Role.WIDTH: self.widths,
            Role.VOCABULARY: self._vocabulary,
            Role.TOKEN: self._tokens,
        }
        return known[role].get(value, value)

    def _tie_width(self, part: Tree) -> None:
        """The hidden size of a part: heads times their width where it is that, else apart from it as before."""
        hidden, heads = _first(part, _HIDDEN), _first(part, _HEADS)
        if hidden is None or hidden in self.widths or heads is None or heads not in self.counts:
            return
        width = _first(part, _HEAD_WIDTH)
        small_heads = self.counts[heads]
        expand = _expansion(part)
        if width is not None and expand is not None and heads * width == expand * hidden:
            self.widths[hidden] = round(small_heads * self.heads.get(width, width) / expand)
            return
        if width is None or heads * width == hidden:
            if hidden % heads:
                return
            self.widths[hidden] = small_heads * self.heads.get(hidden // heads, SMALL_HEAD)
        elif hidden % heads == 0:
            own = self.heads.get(width, SMALL_HEAD)
            step = max(2, own // 2) if hidden < heads * width else own + SMALL_HEAD
            self.widths[hidden] = small_heads * step

    def _add_width(self, number: Number) -> None:
        value = number.value
        if value in self.widths:
            return
        product = self._product(number)
        if product is not None and self._stays_apart(number, product):
            self.widths[value] = product
            return
        for known, small in list(self.widths.items()):
            times = value // known  # four times the hidden size, twice ...
            if value % known == 0 and times <= 8 and self._stays_apart(number, times * small):
                self.widths[value] = times * small
                return
        counts = {small for count, small in self.counts.items() if value % count == 0 and small > 1}

        def accept(width: int) -> bool:
            divisible = (width % self.degree == 0) == (value % self.degree == 0)
            whole = all(width % small == 0 for small in counts) and (value % 8 != 0 or width % 4 == 0)
            return divisible and whole and self._stays_apart(number, width)

        small = min(value, next_width(16 * self._scale, accept, self.widths.values()))
        if not self._stays_apart(number, small):  # there is no room above
            small = next((width for width in range(small - 1, 1, -1) if accept(width)), small)
        self.widths[value] = small

    def _known_products(self, parts: list[Tree]) -> list[tuple[float, float]]:
        """Widths of state-space layers inside: in the model and in the copy."""
        return [(expand * hidden, expand * self.widths[hidden]) for expand, hidden in self._expansions(parts)]

    def _expansions(self, parts: list[Tree]) -> list[tuple[float, int]]:
        found = [(_expansion(part), _first(part, _HIDDEN)) for part in parts]
        return [(expand, hidden) for expand, hidden in found if expand is not None and hidden in self.widths]

    def _stays_apart(self, number: Number, width: int) -> bool:
        """Whether states of ``width``, times groups, are as wide as heads together only where the model has them so.

        State-space layers fuse both in one weight, whose parts are told by their sizes.
        """
        if "state" not in number.name:
            return True
        counts = {n.value for n in self._found if n.role is Role.COUNT and "group" in n.name}
        groups = [(1, 1), *((count, self.counts[count]) for count in counts)]
        return not any(
            small * width == narrow and count * number.value != wide
            for count, small in groups
            for wide, narrow in self._products
        )

    def _product(self, number: Number) -> int | None:
        """A width that is a number of heads times a head's width: of those that fit, the pair of the likest names."""
        stem = number.name.partition("_")[0]
        near = [n for n in self._found if n.path[:-1] == number.path[:-1]]
        fitting = [
            (
                count.name.startswith(stem) + head.name.startswith(stem),
                self.counts[count.value] * self.heads[head.value],
            )
            for count in near
            for head in near
            if count.role is Role.COUNT and head.role is Role.HEAD
            if count.value > 1 and count.value * head.value == number.value
        ]
        return max(fitting)[1] if fitting else None

    def _fit_inner_heads(self, parts: list[Tree]) -> None:
        """State-space heads: their number times their width stays the expansion of the hidden size."""
        for part in parts:
            hidden = _first(part, _HIDDEN)
            expand = _expansion(part)
            if hidden is None or expand is None or hidden not in self.widths:
                continue
            for count, head in ((c, h) for c in list(self.counts) for h in list(self.heads)):
                if count * head == expand * hidden and not self._is_attention_head(part, head):
                    small = expand * self.widths[hidden] / self.counts[count]
                    if small == int(small):
                        self.heads[head] = int(small)

    def _is_attention_head(self, part: Tree, head: int) -> bool:
        return head in (_implied_head(part), _first(part, _HEAD_WIDTH))


def _inner(tree: Any, path: Path) -> Tree:
    for key in path:
        tree = tree[key]
    part: Tree = tree
    return part


def _expansion(part: Tree) -> float | None:
    """How much wider a state-space layer is inside than outside."""
    return next((v for k, v in part.items() if k.endswith("expand") and isinstance(v, int | float)), None)


def _implied_head(part: Tree) -> int | None:
    """The width of a head that no field holds."""
    hidden, heads = _first(part, _HIDDEN), _first(part, _HEADS)
    if hidden is None or heads is None or heads < 1 or hidden % heads or _first(part, _HEAD_WIDTH) is not None:
        return None
    return hidden // heads


def _nested_items(tree: Tree) -> Iterator[tuple[str, Any]]:
    """The entries of a dictionary, and of those in it: ``rope_parameters``, one for each kind of attention."""
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict):
            yield from _nested_items(value)


def _least_head(tree: Tree, values: list[int]) -> int:
    """The narrowest head that leaves rotary positions an even part of it."""
    shares = [
        value
        for part in _parts(tree)
        for key, value in _nested_items(part)
        if key in ("partial_rotary_factor", "rotary_pct", "rotary_percentage") and isinstance(value, float | int)
    ]
    candidates = (
        width
        for width in range(SMALL_HEAD, MAX_HEAD + 1, 2)
        if all(int(width * share) % 2 == 0 < int(width * share) for share in shares if share)
    )
    return next(candidates, min(values, default=SMALL_HEAD))


def _small_tokens(found: list[Number], vocabulary: int) -> dict[int, int]:
    """Ids of special tokens moved to the end of the vocabulary where they would lie outside of it."""
    outside = sorted({n.value for n in found if n.role is Role.TOKEN and vocabulary and n.value >= vocabulary})
    return {value: max(vocabulary - 1 - place, 0) for place, value in enumerate(reversed(outside))}


def _fit_rope(part: Tree, sizes: _Sizes) -> None:
    """Lists of a value for each rotary frequency, and sections of a head, as long as the small head wants."""
    for key in ("rope_parameters", "rope_scaling"):
        for rope in _ropes(part.get(key)):
            for name, value in rope.items():
                if not isinstance(value, list | tuple) or not value:
                    continue
                if all(isinstance(item, int) for item in value):
                    old = sum(value)
                    rope[name] = _sections(list(value), max(1, round(old * _ratio(old, rope, sizes))))
                elif all(isinstance(item, int | float) for item in value):
                    rope[name] = list(value[: max(1, round(len(value) * _ratio(len(value), rope, sizes)))])


def _ropes(value: Any) -> Iterator[Tree]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _ropes(inner)


def _ratio(half: int, rope: Tree, sizes: _Sizes) -> float:
    """Small over old width of the head whose rotary part has ``half`` frequencies."""
    share = rope.get("partial_rotary_factor") or 1.0
    for old, small in sizes.heads.items():
        if round(old * share) == 2 * half or old == 2 * half:
            return small / old
    old, small = next(iter(sizes.heads.items()), (1, 1))
    return small / old


def _sections(values: list[int], total: int) -> list[int]:
    """``values`` scaled so that they sum to ``total``."""
    old = sum(values)
    exact = [value * total / old for value in values]
    small = [math.floor(value) for value in exact]
    for index in sorted(range(len(values)), key=lambda i: small[i] - exact[i])[: total - sum(small)]:
        small[index] += 1
    return small
