"""What a script has said so far."""

from __future__ import annotations

from typing import Any

from shardwise.api.ambient import AMBIENT


def keys() -> dict[str, Any]:
    """Dotted key of ``run.yaml`` -> the value that the context sets."""
    return {key: value for key, (value, _) in AMBIENT.keys.items()}
