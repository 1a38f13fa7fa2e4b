"""Which keys of a resolved ``run.yaml`` Shardwise has filled in, so that an override can fill them in anew.

Else ``run.yaml pp=2`` would contradict the stages that were the default of another ``pp``. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from shardwise.spec.aliases import KEYS, SECTION
from shardwise.spec.keys import get
from shardwise.spec.run import RunConfig

_DEGREES = tuple(f"strategy.{name}" for name in ("pp", "tp", "dp_replicate", "dp_shard"))
_ROWS, _SHARE, _STEPS = "train.global_batch_size", "strategy.micro_batch_size", "train.gradient_accumulation_steps"
_STAGES = ("strategy.virtual_stages", "strategy.stages")
_LAYOUT = ("devices", *_DEGREES, *_STAGES, "strategy.reshard", _SHARE, _ROWS)
_BATCH = (_ROWS, _SHARE)
PLANNED = tuple(f"strategy.{name}" for name in ("schedule", "recompute", "sequence_parallel", "tp_whole", "cp", "ep"))

# (keys, what is filled in from them): an override of one of the first makes the second void.
_FOLLOWS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("devices", *_DEGREES, "strategy.dp", "strategy.stages", "model", "device", "nnodes"), (*_LAYOUT, *PLANNED)),
    (("strategy.schedule", "strategy.virtual_stages"), _STAGES),
    ((*_BATCH, _STEPS), _BATCH),
    (("train.max_steps",), ("train.epochs",)),
    (("train.seed",), ("data.seed",)),
    (("device",), ("train.precision",)),
    (("use_lora",), ("lora",)),
)
_FILLABLE = ("device", "use_lora", "lora", "data.seed", "train.epochs", "train.precision", *_LAYOUT)
_OPEN = (None, False, "auto")  # what stands for "not given"


def filled_keys(given: RunConfig, run: RunConfig) -> tuple[str, ...]:
    """The keys that ``run`` has and ``given`` left open, with those that ``given`` had noted as such before.

    A global batch that stands for accumulation steps is noted under their name.
    """
    keys = [key for key in _FILLABLE if get(given, key) in _OPEN and get(given, key) != get(run, key)]
    if given.train.gradient_accumulation_steps is not None:
        keys[keys.index(_ROWS)] = _STEPS
    return tuple(dict.fromkeys([*given.filled, *keys]))


def without_stale(tree: dict[str, Any], overridden: Iterable[str]) -> dict[str, Any]:
    """A copy of ``tree`` without the filled-in keys that follow from one of ``overridden``, which will be set in it.

    Args:
        overridden: dotted keys; names of the section ``parallel_config`` count as the keys that they stand for.
    """
    filled = tree.get("filled")
    if not isinstance(filled, list) or not all(isinstance(key, str) for key in filled):
        return tree
    changed = {_own_key(key) for key in overridden}
    stale = {key for sources, keys in _FOLLOWS if changed & set(sources) for key in keys if key in filled}
    if _STEPS in filled and _STEPS in changed:
        stale.add(_ROWS)
    result = deepcopy(tree)
    for key in stale:
        section, _, name = key.rpartition(".")
        place = result.get(section) if section else result
        if isinstance(place, dict):
            place.pop(name, None)
    result["filled"] = [key for key in filled if key not in stale | changed]
    return result


def without_contrary(tree: dict[str, Any], overridden: Iterable[str]) -> dict[str, Any]:
    """A copy of ``tree`` in which what was just given wins: a file that says ``overwrite`` is resumed by ``resume``.

    And the other way round. A resolved ``run.yaml`` keeps what its run was started with, and a run that goes on is
    started otherwise than the one that began.

    Args:
        overridden: dotted keys that are set in ``tree`` already.
    """
    if not tree.get("overwrite") or tree.get("resume") in (None, "no"):
        return tree
    given = {"overwrite", "resume"} & set(overridden)
    stale = {"overwrite", "resume"} - given if given else set()
    return {key: value for key, value in tree.items() if key not in stale}


def _own_key(key: str) -> str:
    section, _, name = key.partition(".")
    return KEYS.get(name, key) if section == SECTION else key
