"""Well-known models by name, described beforehand: sizes, costs, and what ``model show`` prints. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from shardwise.config import nearest
from shardwise.errors import ConfigError
from shardwise.spec.block import ModelCosts
from shardwise.spec.model import ModelSpec

CONFIGURATIONS = "configurations.json"


def preset_names() -> list[str]:
    """Names of all presets."""
    folder = files("shardwise").joinpath("presets")
    return sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name != CONFIGURATIONS)


def find_preset(name: str) -> dict[str, Any] | None:
    """The preset ``name`` as :mod:`benchmarks.presets` wrote it, None if there is none."""
    if name not in preset_names():
        return None
    text = files("shardwise").joinpath(f"presets/{name}.json").read_text(encoding="utf-8")
    preset: dict[str, Any] = json.loads(text)
    return preset


def shown_preset(name: str, degrees: Sequence[int]) -> dict[str, Any] | None:
    """What ``model show`` says of a preset, of ``degrees`` alone where any are given; None if there is no such preset.

    Raises:
        ConfigError: a degree that the preset was not described at.
    """
    preset = find_preset(name)
    if preset is None:
        return None
    shown: dict[str, Any] = preset["shown"]
    known = [found["degree"] for found in shown["tensor"]]
    for degree in degrees:
        if degree not in known:
            rule = f"the preset {name} was described at {', '.join(map(str, known))}"
            raise ConfigError(f"--tp {degree}", rule, "Give a folder with its config.json for another degree")
    return shown | {"tensor": [found for found in shown["tensor"] if not degrees or found["degree"] in degrees]}


def preset_model(name: str) -> tuple[ModelSpec, ModelCosts]:
    """Sizes and costs of the preset ``name``.

    Raises:
        ConfigError: there is none; the message names the nearest.
    """
    preset = find_preset(name)
    if preset is None:
        near = nearest(name, preset_names())
        remedy = f"Did you mean {near}?" if near else f"Presets: {', '.join(preset_names())}"
        raise ConfigError(f"model = {name!r}", "is no preset", remedy)
    return ModelSpec.from_json(preset["sizes"]), ModelCosts.from_json(preset["costs"])
