"""``python -m shardwise.launch.describe DIR``: one JSON object that describes a model, from the model itself.

Run as a child by what must not load torch. A description that is known from before is answered at once. A refusal is
an answer too: ``{"refused": ...}``, with status 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.spec.described import COSTS, EAGER_COSTS, SIZES, DescriptionCache, description_folder
from shardwise.spec.model import check_config, hash_of, read_config


def main(arguments: Sequence[str], cache: DescriptionCache) -> int:
    """Print the description of a folder, and keep it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.describe", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--costs", action="store_true", help="what it costs, by kind of block and tensor degree")
    parser.add_argument("--eager", action="store_true", help="with eager attention")
    given = parser.parse_args(arguments)
    kind = SIZES if not given.costs else EAGER_COSTS if given.eager else COSTS
    try:
        print(json.dumps(_answer(given.folder, kind, cache)))
    except ShardwiseError as error:
        refused = {"kind": type(error).__name__, "value": error.value, "rule": error.rule, "remedy": error.remedy}
        print(json.dumps({"refused": refused}))
        return error.exit_code
    return 0


def _answer(folder: Path, kind: str, cache: DescriptionCache) -> dict[str, Any]:
    model_hash = hash_of(read_config(folder / "config.json")[1])
    # Sizes are asked for where the cache has none that can be read.
    answer = cache.find(model_hash, kind) if kind != SIZES else None
    if answer is None:
        logging.getLogger("torch").setLevel(logging.CRITICAL)  # a forward that cannot be traced is an answer here
        answer = _sizes(folder) if kind == SIZES else _costs(folder, cache, "eager" if kind == EAGER_COSTS else None)
        cache.keep(model_hash, kind, answer)
    return answer


def _sizes(folder: Path) -> dict[str, Any]:
    from shardwise.models.describe import describe_folder

    return describe_folder(folder).to_json()


def _costs(folder: Path, cache: DescriptionCache, attention: str | None) -> dict[str, Any]:
    from shardwise.check.costing import model_costs
    from shardwise.tensor.cache import TableCache

    check_config(folder)
    tables = None if cache.folder is None else cache.folder.with_name("tables")
    return model_costs(folder, TableCache(tables), None, attention=attention).to_json()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DescriptionCache(description_folder(os.environ))))
