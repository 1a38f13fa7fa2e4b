"""From bytes of whole passes to amounts a token: by length, by precision, and by what tensor ranks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.spec.block import Amount

_NOISE = 1e-4  # of a quantity, what rounding and padding may make of it


@dataclass(frozen=True)
class Fit:
    """Bytes of a pass of one row of n tokens: ``token`` n + ``growing`` n^2, and a rest that no token causes."""

    token: float = 0.0
    growing: float = 0.0

    def __add__(self, other: Fit) -> Fit:
        return Fit(self.token + other.token, self.growing + other.growing)


def make_fit(by_length: Mapping[int, float]) -> Fit:
    """The parabola through three lengths."""
    lengths = np.array(sorted(by_length), dtype=float)
    values = np.array([by_length[int(n)] for n in lengths])
    growing, token, _ = np.polyfit(lengths, values, 2)
    largest = max(float(values[-1] / lengths[-1]), 1e-12)
    small = abs(growing) * lengths[-1] < _NOISE * largest
    if small:
        token, growing = np.polyfit(lengths, values, 1)[0], 0.0
    return Fit(float(token) if abs(token) > _NOISE * largest else 0.0, float(growing))


def make_amount(fits: Sequence[Fit], degree: int) -> Amount:
    """An amount from four fits: in half precision the whole and one rank of ``degree``, then in single precision."""
    token = [_shared(whole.token, one.token, degree) for whole, one in (fits[:2], fits[2:])]
    growing = [whole.growing for whole in (fits[0], fits[2])]
    split, split_bytes = _elements(token[0][0], token[1][0])
    kept, kept_bytes = _elements(token[0][1], token[1][1])
    grown, grown_bytes = _elements(*growing)
    return Amount(split, kept, split_bytes, kept_bytes, grown, grown_bytes)


def shared_elements(whole: Fit, one: Fit, degree: int) -> tuple[float, float]:
    """Elements of two bytes a token: what ``degree`` ranks share of a quantity, and what each has."""
    shared, each = _shared(whole.token, one.token, degree)
    return round(shared / 2, 2), round(each / 2, 2)


def _shared(whole: float, one: float, degree: int) -> tuple[float, float]:
    """(what the ranks share, what each has) of a quantity, from all of it and that of one rank."""
    if degree == 1 or one >= whole:  # a part that splits nothing may do a little more
        return 0.0, whole
    split = (whole - one) * degree / (degree - 1)
    kept = whole - split
    return (whole, 0.0) if abs(kept) < _NOISE * whole else (split, kept)


def _elements(half: float, single: float) -> tuple[float, float]:
    """(elements in the compute precision, bytes whatever it is) that make so many bytes in either precision.

    Either may be below 0: what bf16 copies to fp32 takes no copy in fp32.
    """
    elements = (single - half) / 2
    return round(elements, 2) + 0.0, round(half - 2 * elements, 2) + 0.0  # no -0.0
