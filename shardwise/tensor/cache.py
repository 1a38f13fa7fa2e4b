"""Tables that were found and proven before, kept on disk: a search takes seconds a degree, reading its result none.

A file is named by everything that its table depends on, so none is ever out of date; one that cannot be read counts
as none. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardwise.errors import PlanError
from shardwise.spec.cache import cache_folder, code_hash, hash_of_all, write_whole
from shardwise.tensor.table import ShardingTable

_PASSING = ("_name_or_path", "transformers_version")  # where a configuration was found, and who wrote it
_ROOMS = ("models", "parallel", "spec", "tensor")  # the code that makes tables


def table_folder(environ: Mapping[str, str]) -> Path | None:
    """``shardwise/tables`` in the user's cache; None for a user without a home."""
    return cache_folder(environ, "tables")


@dataclass(frozen=True)
class TableCache:
    """The tables in a folder, which need not be there yet; None: nothing is kept."""

    folder: Path | None

    def find(
        self, config: Any, degree: int, *, sequence: bool = False, whole: float | None = None
    ) -> ShardingTable | None:
        """The table of a configuration over ``degree`` ranks, None where there is none that can be read."""
        if self.folder is None:
            return None
        try:
            data = json.loads(self._path(config, degree, sequence, whole).read_text(encoding="utf-8"))
            table = ShardingTable.from_json(data)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, PlanError):
            return None
        return table if table.degree == degree else None

    def keep(self, config: Any, table: ShardingTable, *, sequence: bool = False, whole: float | None = None) -> None:
        """Write a table, whole or not at all; a folder that cannot be written to keeps nothing."""
        if self.folder is None:
            return
        write_whole(self._path(config, table.degree, sequence, whole), json.dumps(table.to_json()))

    def _path(self, config: Any, degree: int, sequence: bool, whole: float | None) -> Path:
        assert self.folder is not None
        versions = [version("torch"), version("transformers"), code_hash(_ROOMS)]
        attention = str(getattr(config, "_attn_implementation", None))
        fields = {key: value for key, value in config.to_dict().items() if key not in _PASSING}
        described = json.dumps(fields, sort_keys=True, default=str)
        parts = [type(config).__name__, described, attention, str(degree), str(sequence), str(whole), *versions]
        return self.folder / f"{hash_of_all(parts)}.json"
