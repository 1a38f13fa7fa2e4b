"""Where results and messages go: as data, or for people."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.console import Console

_WIDTH = 160  # of tables that go to no terminal


def results_console() -> Console:
    """A console on stdout."""
    return unbroken(Console())


def messages_console() -> Console:
    """A console on stderr."""
    return unbroken(Console(stderr=True))


def unbroken(console: Console) -> Console:
    """The console itself; without a terminal it becomes a wide one, so that no name in a file or a pipe is broken."""
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def print_json(answer: dict[str, Any]) -> None:
    """One JSON object on stdout; a number that JSON has no way to write is null."""
    print(json.dumps(_plain(answer), ensure_ascii=False), flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
