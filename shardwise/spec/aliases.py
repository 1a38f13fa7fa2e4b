"""MindFormers' section ``parallel_config`` as other names for keys of ``run.yaml``. Imports no torch."""

from __future__ import annotations

from typing import Any

from shardwise.config import nearest
from shardwise.errors import ConfigError

SECTION = "parallel_config"
# Name -> the dotted key that it stands for.
KEYS = {
    "data_parallel": "strategy.dp",
    "model_parallel": "strategy.tp",
    "pipeline_stage": "strategy.pp",
    "pp_interleave_num": "strategy.virtual_stages",  # MindFormers has it in its section of the model
    "micro_batch_num": "train.gradient_accumulation_steps",
    "context_parallel": "strategy.cp",
    "expert_parallel": "strategy.ep",
    "use_seq_parallel": "strategy.sequence_parallel",
    "gradient_aggregation_group": "strategy.gradient_aggregation_group",
}
_SWITCHES = ("optimizer_shard", "vocab_emb_dp")
_NO_EFFECT = {
    "vocab_emb_dp": "the embedding is split over the tensor ranks like every other matrix",
    "micro_batch_interleave_num": "a micro-batch is not cut further",
}


def translate(tree: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The tree with ``parallel_config`` written as our own keys, and a line for each name without an effect.

    Raises:
        ConfigError: an unknown name, with the nearest; or a name and our own key for it that differ.
    """
    if tree.get(SECTION) is None:
        return {key: value for key, value in tree.items() if key != SECTION}, []
    given = tree[SECTION]
    if not isinstance(given, dict):
        raise ConfigError(f"{SECTION} = {given!r}", "is a section of keys, not a value", f"Such as {', '.join(KEYS)}")
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in tree.items() if key != SECTION}
    notes = []
    for name, value in given.items():
        if value is None:
            continue
        if name in KEYS:
            put(result, KEYS[name], value, f"{SECTION}.{name}")
            if name == "pp_interleave_num" and isinstance(value, int) and value > 1:
                put(result, "strategy.schedule", "interleaved", f"{SECTION}.{name}")
        elif name == "optimizer_shard":
            # The optimizer's state is split over the data ranks, or whole on each of them.
            _check_switch(name, value)
            put(result, "strategy.dp_replicate" if value else "strategy.dp_shard", 1, f"{SECTION}.{name}")
        elif name in _NO_EFFECT:
            notes += _without_effect(name, value)
        else:
            known = [*KEYS, *_SWITCHES, *_NO_EFFECT]
            near = nearest(str(name), known)
            remedy = f"Did you mean {SECTION}.{near}?" if near else f"Known keys here: {', '.join(known)}"
            raise ConfigError(f"{SECTION}.{name} = {value!r}", "unknown key", remedy)
    return result, notes


def put(tree: dict[str, Any], dotted: str, value: Any, source: str) -> None:
    """Set a key that ``source`` stands for.

    Raises:
        ConfigError: the tree has another value there.
    """
    section, _, name = dotted.rpartition(".")
    place: Any = tree
    if section:
        if tree.get(section) is None:
            tree[section] = {}
        place = tree[section]
    if not isinstance(place, dict):
        rule = f"is a section of keys, not a value, and {source} stands for {dotted}"
        raise ConfigError(f"{section} = {place!r}", rule, f"Write {section}: {{KEY: VALUE}}")
    if place.get(name) not in (None, value):
        rule = f"are two names for one thing ({source} stands for {dotted})"
        raise ConfigError(f"{source} = {value!r} and {dotted} = {place[name]!r}", rule, "Give one of them")
    place[name] = value


def _check_switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{SECTION}.{name} = {value!r}", "must be true or false", "Correct it")


def _without_effect(name: str, value: Any) -> list[str]:
    if name in _SWITCHES:
        _check_switch(name, value)
        return [f"{SECTION}.{name} = {value}: no effect, {_NO_EFFECT[name]}"] if value else []
    if value == 1:
        return []
    raise ConfigError(f"{SECTION}.{name} = {value!r}", f"must be 1: {_NO_EFFECT[name]}", "Leave it out")
