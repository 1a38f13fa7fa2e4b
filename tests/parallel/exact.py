"""Float64 that stays float64; what `check` compares in."""

from __future__ import annotations

from shardwise.check.exact import Exact

__all__ = ["Exact"]
