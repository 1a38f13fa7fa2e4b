"""``python -m shardwise.front.describe DIR``: one JSON object that describes a model, from the model itself.

Run as a child by what must not load torch. A description that is known from before is answered at once. A refusal is
an answer too: ``{"refused": ...}``, with status 2.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.spec.described import SIZES, DescriptionCache, Manner, description_folder
from shardwise.spec.model import check_config, hash_of, read_config


def main(arguments: Sequence[str], cache: DescriptionCache) -> int:
    """Print the description of a folder, and keep it; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.front.describe", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--costs", action="store_true", help="what it costs, by kind of block and tensor degree")
    parser.add_argument("--eager", action="store_true", help="with eager attention")
    parser.add_argument("--whole", type=float, help="of the blocks, the share that tables may leave whole")
    given = parser.parse_args(arguments)
    try:
        manner = Manner(given.eager, given.whole)
        print(json.dumps(_costs(given.folder, manner, cache) if given.costs else _sizes(given.folder, cache)))
    except ShardwiseError as error:
        refused = {"kind": type(error).__name__, "value": error.value, "rule": error.rule, "remedy": error.remedy}
        print(json.dumps({"refused": refused}))
        return error.exit_code
    return 0


def _sizes(folder: Path, cache: DescriptionCache) -> dict[str, Any]:
    """Asked for where the cache has none that can be read."""
    from shardwise.models.describe import describe_folder

    return _kept(folder, SIZES, cache, lambda: describe_folder(folder).to_json())


def _costs(folder: Path, manner: Manner, cache: DescriptionCache) -> dict[str, Any]:
    kind = manner.kind
    known = cache.find(_hash(folder), kind)
    return known or _kept(folder, kind, cache, lambda: _traced(folder, manner, cache))


def _traced(folder: Path, manner: Manner, cache: DescriptionCache) -> dict[str, Any]:
    from shardwise.check.costing import model_costs
    from shardwise.tensor.cache import TableCache

    check_config(folder)
    tables = None if cache.folder is None else cache.folder.with_name("tables")
    attention = "eager" if manner.eager else None
    return model_costs(folder, TableCache(tables), None, attention=attention, whole=manner.whole).to_json()


def _kept(folder: Path, kind: str, cache: DescriptionCache, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a forward that cannot be traced is an answer here
    answer = make()
    cache.keep(_hash(folder), kind, answer)
    return answer


def _hash(folder: Path) -> str:
    return hash_of(read_config(folder / "config.json")[1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], DescriptionCache(description_folder(os.environ))))
