"""``python -m benchmarks.presets [NAME ...]``: describe the well-known models of ``configurations.json`` anew.

Their shapes are public; each preset is what the description of a model's own folder gives, and takes some seconds.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.check.costing import DEGREES, model_costs
from shardwise.check.description import describe
from shardwise.models.describe import describe_folder
from shardwise.spec.presets import CONFIGURATIONS
from shardwise.tensor.cache import TableCache

FOLDER = Path(__file__).resolve().parents[1] / "shardwise/presets"
# Of the tables what a reader sees; a run finds its own.
_LEFT_OUT = ("params", "values")


def make_preset(name: str, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The preset of a configuration; ``folder`` is empty and takes what is written on the way."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tables = TableCache(folder / "tables")
    shown = describe(folder, DEGREES, tables)
    for degree in shown["tensor"]:
        for key in _LEFT_OUT:
            degree.pop(key, None)
    sizes = describe_folder(folder).to_json()
    costs = model_costs(folder, tables, name=name).to_json()
    return {"schema": 1, "name": name, "config": config, "sizes": sizes, "costs": costs, "shown": shown}


def main(names: Sequence[str]) -> None:
    """Write the presets ``names``, or all."""
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # a forward that cannot be traced is an answer here
    configurations: dict[str, Any] = json.loads((FOLDER / CONFIGURATIONS).read_text(encoding="utf-8"))
    for name in names or configurations:
        with tempfile.TemporaryDirectory() as folder:
            preset = make_preset(name, configurations[name], Path(folder))
        text = json.dumps(preset, separators=(",", ":")) + "\n"
        (FOLDER / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {preset['shown']['num_parameters'] / 1e9:.2f} B parameters, {len(text)} bytes", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
