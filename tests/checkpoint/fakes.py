"""Checkpoints as far as they can be seen without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import MANIFEST_FILE, checkpoint_name, manifest_text, record_of


def fake_checkpoint(folder: Path, step: int, state: dict[str, Any], *more: str) -> Path:
    """A complete checkpoint with ``state`` and further files of these names, without a tensor."""
    path = folder / checkpoint_name(step)
    path.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp", *more):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("{}", encoding="utf-8")
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = {str(each.relative_to(path)): record_of(each) for each in path.rglob("*") if each.is_file()}
    (path / MANIFEST_FILE).write_text(manifest_text(step, files), encoding="utf-8")
    return path
