"""What ``model show`` answers of a folder, or of a preset, for which nothing is imported."""

from __future__ import annotations

import logging
import os
from typing import Any

from shardwise.errors import ConfigError
from shardwise.front.hub import locate_model
from shardwise.log import say
from shardwise.spec.model import find_model
from shardwise.spec.presets import shown_preset


def shown_model(name: str, degrees: list[int], models_dir: str | None) -> dict[str, Any]:
    """See the module. ``degrees`` are those of tensor parallelism that are asked for, all legal ones where empty."""
    preset = shown_preset(name, degrees) if not _is_folder(name, models_dir) else None
    if preset is not None:
        return preset
    from shardwise.check.description import describe
    from shardwise.tensor.cache import TableCache, table_folder

    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a forward that cannot be traced is an answer here
    found = locate_model(name, models_dir, only_config=True)
    return describe(found, degrees, TableCache(table_folder(os.environ)), say)


def _is_folder(name: str, models_dir: str | None) -> bool:
    try:
        find_model(name, models_dir)
    except ConfigError:
        return False
    return True
