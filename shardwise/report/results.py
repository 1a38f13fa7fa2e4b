"""Results on stdout: as data, or for people."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console

_WIDTH = 160  # of tables that go to no terminal


def results_console() -> Console:
    """A console on stdout; without a terminal a wide one, so that no name is broken."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def print_json(answer: dict[str, Any]) -> None:
    """One JSON object on stdout; a number that JSON has no way to write is null."""
    print(json.dumps(_plain(answer), ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
