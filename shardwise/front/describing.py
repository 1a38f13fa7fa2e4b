"""The specification of a model before a job: from its file, from the cache, or from a child that builds it.

This process never loads torch. A file that names its sizes is enough; where it leaves one to the model's class, the
model is built once, in a child, and the answer is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import shardwise.errors
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.log import say
from shardwise.spec.block import ModelCosts
from shardwise.spec.described import FIRST_MANNER, SIZES, DescriptionCache, Manner, description_folder
from shardwise.spec.model import ModelSpec, has_weights, hash_of, read_config, read_model

CHILD = "shardwise.front.describe"
_SECONDS = 600


def model_of(folder: Path, environ: Mapping[str, str]) -> ModelSpec:
    """The specification of the model in ``folder``; what its ``config.json`` breaks is refused before anything runs.

    Raises:
        ConfigError, PlanError: as :func:`shardwise.spec.model.read_model`, or what the child refuses.
        LaunchError: the child died.
    """
    known: list[ModelSpec] = []

    def look_up(path: Path) -> ModelSpec | None:
        found = DescriptionCache(description_folder(environ)).find(hash_of(read_config(path / "config.json")[1]), SIZES)
        try:
            known[:] = [replace(ModelSpec.from_json(found), has_weights=has_weights(path))] if found else []
        except TypeError:  # of another version, or damaged
            return None
        return known[0] if known else None

    spec = read_model(folder, lambda path: look_up(path) or described_in_child(path, environ))
    return spec if spec.measured else look_up(folder) or spec


def described_in_child(folder: Path, environ: Mapping[str, str]) -> ModelSpec:
    """The specification from the model's modules; takes the seconds that importing transformers takes."""
    say(f"{folder / 'config.json'} leaves sizes to the model's class: building it once to see them")
    return replace(ModelSpec.from_json(run_child([str(folder)], environ)), has_weights=has_weights(folder))


def costs_of(folder: Path, environ: Mapping[str, str], manner: Manner = FIRST_MANNER) -> ModelCosts:
    """What the model in ``folder`` costs, by kind of block: known from before, or found in a child within a minute.

    Raises:
        ShardwiseError: as :func:`run_child`.
    """
    model_hash = hash_of(read_config(folder / "config.json")[1])
    known = DescriptionCache(description_folder(environ)).find(model_hash, manner.kind)
    if known is None:
        say(f"{folder}: finding out what its blocks cost{' with eager attention' if manner.eager else ''}, once")
        known = run_child([str(folder), "--costs", *manner.arguments], environ)
    return ModelCosts.from_json(known)


def run_child(arguments: list[str], environ: Mapping[str, str]) -> dict[str, Any]:
    """What the describing child answers.

    Raises:
        ShardwiseError: its refusal.
        LaunchError: it died without one.
    """
    command = [sys.executable, "-m", CHILD, *arguments]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, timeout=_SECONDS, check=False)
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        rule = f"did not end within {_SECONDS} s"
        raise LaunchError(f"{' '.join(command[1:])}", rule, "Run it by itself to see why") from None
    except ValueError:
        last = next(iter(done.stderr.decode(errors="replace").strip().splitlines()[-1:]), "")
        rule = f"ended with status {done.returncode} ({last})"
        raise LaunchError(f"{' '.join(command[1:])}", rule, "Run it by itself to see why") from None
    if "refused" in answer:
        refused = answer["refused"]
        kind: type[ShardwiseError] = getattr(shardwise.errors, refused.pop("kind"))
        raise kind(**refused)
    return answer
