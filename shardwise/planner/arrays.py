"""The few operations of numpy that the formulas need, quick for plain numbers too.

A configuration on its own is a handful of numbers, for which numpy takes ten times as long as Python does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

_PLAIN = (int, float)


def largest(a: Any, b: Any) -> Any:
    """The larger of two, element by element."""
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return a if a > b else b
    return np.maximum(a, b)


def smallest(a: Any, b: Any) -> Any:
    """The smaller of two, element by element."""
    if isinstance(a, _PLAIN) and isinstance(b, _PLAIN):
        return a if a < b else b
    return np.minimum(a, b)


def log2(a: Any) -> Any:
    """The binary logarithm."""
    return math.log2(a) if isinstance(a, _PLAIN) else np.log2(a)


def choose(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where the condition holds, else ``b``."""
    if isinstance(condition, bool):
        return a if condition else b
    return np.where(condition, a, b)
