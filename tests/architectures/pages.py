"""The generated part of both pages on architectures; their prose stays."""

from __future__ import annotations

from collections.abc import Mapping


def write_pages(versions: Mapping[str, str], rows: Mapping[str, object]) -> None:
    pass
