"""What a script has set before its Trainer, and every Trainer takes over: the context of ``shardwise.mindspore``."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError


class Ambient:
    """Settings of the process.

    Attributes:
        keys: dotted key of ``run.yaml`` -> (value, the argument that said so).
        device_num: number of processes that the script expects, None if it has not said.
        compile_by_rule: whether the rule decides if blocks are compiled; what a Trainer is given comes first.
        micro_batch_num: micro-batches of a step on each data rank, None if it has not said.
        planned: degrees that are not given are searched for, on processes of this machine's CPU.
    """

    def __init__(self) -> None:
        self.keys: dict[str, tuple[Any, str]] = {}
        self.device_num: int | None = None
        self.micro_batch_num: int | None = None
        self.compile_by_rule = False
        self.planned = False

    def set(self, key: str, value: Any, source: str) -> None:
        """Set a key; None takes it back."""
        if value is None:
            self.keys.pop(key, None)
        else:
            self.keys[key] = (value, source)

    def add_to(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A copy of ``tree`` with the settings in it.

        Raises:
            ConfigError: the tree says something else.
        """
        result = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items()}
        for key, (value, source) in self.keys.items():
            section, _, name = key.rpartition(".")
            place = result.setdefault(section, {}) if section else result
            if place.get(name) not in (None, value):
                rule = f"contradicts {key} = {place[name]!r}, which the Trainer was given"
                raise ConfigError(f"{source} = {value!r}", rule, "Give one of them")
            place[name] = value
        return result


AMBIENT = Ambient()
