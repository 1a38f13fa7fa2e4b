"""What was timed: plain records that travel as JSON. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ProductSample:
    """Seconds of a product [rows, inner] x [inner, outer] in a precision."""

    precision: str
    rows: int
    inner: int
    outer: int
    seconds: float


@dataclass(frozen=True)
class AttentionSample:
    """Seconds of causal attention, forward and backward together, over rows of ``length`` tokens."""

    kernel: str  # fused or eager
    rows: int
    heads: int
    length: int
    head_dim: int
    seconds: float


@dataclass(frozen=True)
class ElementwiseSample:
    """Seconds of an operator that reads and writes ``moved_bytes``."""

    operator: str
    moved_bytes: float
    seconds: float


@dataclass(frozen=True)
class CollectiveSample:
    """Seconds of a collective; ``num_bytes`` counts as in ``planner/collectives``.

    All groups of ``ranks`` ranks that the processes form are at work at once.
    """

    op: str  # all_reduce all_gather reduce_scatter all_to_all send
    ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Samples:
    """All that one measurement has timed, and where.

    Args:
        processes: ranks that were at work at once, each with ``threads`` threads, on ``cores`` cores.
        operator_seconds: of the least operator, its share of a backward pass with it.
        level: ``quick`` or ``full``.
    """

    device_type: str
    processes: int
    threads: int
    cores: int
    level: str
    memory_bytes: float
    operator_seconds: float
    products: tuple[ProductSample, ...]
    attention: tuple[AttentionSample, ...]
    elementwise: tuple[ElementwiseSample, ...]
    collectives: tuple[CollectiveSample, ...]
    took_seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Samples:
        """The inverse of :meth:`to_json`."""
        lists = {
            "products": tuple(ProductSample(**one) for one in data["products"]),
            "attention": tuple(AttentionSample(**one) for one in data["attention"]),
            "elementwise": tuple(ElementwiseSample(**one) for one in data["elementwise"]),
            "collectives": tuple(CollectiveSample(**one) for one in data["collectives"]),
        }
        return cls(**{**data, **lists})
