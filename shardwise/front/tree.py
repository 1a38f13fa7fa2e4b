"""The tree of a run from what stands on a command line."""

from __future__ import annotations

from typing import Any

from shardwise.config import apply_overrides, full_key, load_yaml, set_key
from shardwise.errors import ConfigError
from shardwise.spec.filled import without_contrary, without_stale


def run_tree(settings: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """The tree of a run.yaml, if ``settings`` name one, with their key=value and the options that are given over it.

    Raises:
        ConfigError: more than one file, or what :func:`load_yaml` and :func:`apply_overrides` refuse.
    """
    files = [text for text in settings if "=" not in text]
    overrides = [text for text in settings if "=" in text]
    if len(files) > 1:
        raise ConfigError(", ".join(files), "more than one run.yaml", "Give one file; what it lacks as key=value")
    tree = load_yaml(files[0]) if files else {}
    given = {key: value for key, value in options.items() if value is not None}
    keys = [*given, *(full_key(text.partition("=")[0].strip()) for text in overrides)]
    tree = without_stale(tree, keys)
    for key, value in given.items():
        set_key(tree, key, value)
    return without_contrary(apply_overrides(tree, overrides), keys)


def data_tree(data: str, settings: list[str], model: str | None) -> dict[str, Any]:
    """The tree of a run whose rows are ``data``, unless that is itself a run.yaml."""
    if data.endswith((".yaml", ".yml")):
        return run_tree([data, *settings], {"model": model})
    return run_tree(settings, {"model": model, "data.train": data})
