"""Descriptions of models that were built before, kept on disk: building one takes seconds, reading its result none.

A file is named by everything that its content depends on, so none is ever out of date; one that cannot be read counts
as none. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.spec.cache import cache_folder, code_hash, hash_of_all, write_whole

SIZES = "sizes"  # the kind of description that is a ModelSpec; Manner.kind names those that are ModelCosts
_ROOMS = ("check", "models", "parallel", "spec", "tensor")  # the code that describes


@dataclass(frozen=True)
class Manner:
    """What of a run the costs of its model depend on.

    Attributes:
        eager: eager attention; otherwise the attention that the model has first.
        whole: ``strategy.tp_whole``: the share of the blocks' weights that tables may leave whole for less traffic;
            None: the tables that leave least whole.
    """

    eager: bool = False
    whole: float | None = None

    @property
    def kind(self) -> str:
        """The kind of description that costs of this manner are."""
        within = "" if self.whole is None else f" within {self.whole!r}"
        return f"{'eager ' if self.eager else ''}costs{within}"

    @property
    def arguments(self) -> list[str]:
        """What a describing child is told of it."""
        return [*(["--eager"] if self.eager else []), *([] if self.whole is None else ["--whole", str(self.whole)])]


FIRST_MANNER = Manner()


def description_folder(environ: Mapping[str, str]) -> Path | None:
    """``shardwise/models`` in the user's cache; None for a user without a home."""
    return cache_folder(environ, "models")


@dataclass(frozen=True)
class DescriptionCache:
    """Descriptions (JSON objects) in a folder, which need not be there yet; None: nothing is kept."""

    folder: Path | None

    def find(self, model_hash: str, kind: str) -> dict[str, Any] | None:
        """The description ``kind`` of the model with this :func:`shardwise.spec.model.hash_of`, None if unknown."""
        if self.folder is None:
            return None
        try:
            data = json.loads(self._path(model_hash, kind).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None
        return data if isinstance(data, dict) else None

    def keep(self, model_hash: str, kind: str, data: Mapping[str, Any]) -> None:
        """Write a description, whole or not at all; a folder that cannot be written to keeps nothing."""
        if self.folder is not None:
            write_whole(self._path(model_hash, kind), json.dumps(data))

    def _path(self, model_hash: str, kind: str) -> Path:
        assert self.folder is not None
        parts = [model_hash, kind, version("torch"), version("transformers"), code_hash(_ROOMS)]
        return self.folder / f"{hash_of_all(parts)}.json"
