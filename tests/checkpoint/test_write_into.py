"""A folder that the user names keeps what is the user's."""

from __future__ import annotations

from pathlib import Path

import torch

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import export_model
from shardwise.checkpoint.naming import plain_naming
from shardwise.models.shard import Shard
from shardwise.spec.layout import ParamLayout
from shardwise.testing import run_distributed


def _export(rank: int, source: Path, target: Path, *, replace: bool) -> None:
    shard = Shard(ParamLayout("w", (2, 2)), torch.nn.Parameter(torch.ones(2, 2)))
    export_model(Companions(source), target, plain_naming({"w": (2, 2)}, torch.float32), [shard], replace=replace)


def _folder(root: Path) -> tuple[Path, Path]:
    source, target = root / "source", root / "mine"
    source.mkdir()
    target.mkdir()
    (source / "config.json").write_text("{}")
    for name in ("thesis.txt", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"):
        (target / name).write_text("earlier")
    (target / "checkpoints").mkdir()
    return source, target


def test_saving_into_a_folder_replaces_the_weights_and_nothing_else(tmp_path: Path) -> None:
    source, target = _folder(tmp_path)
    run_distributed(_into, 1, source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "checkpoints",
        "config.json",
        "model.safetensors",
        "thesis.txt",
    ]
    assert (target / "thesis.txt").read_text() == "earlier"
    assert (target / "config.json").read_text() == "{}"


def _into(rank: int, source: Path, target: Path) -> None:
    _export(rank, source, target, replace=False)


def test_the_runs_own_export_is_replaced_as_a_whole(tmp_path: Path) -> None:
    source, target = _folder(tmp_path)
    run_distributed(_whole, 1, source, target)
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]


def _whole(rank: int, source: Path, target: Path) -> None:
    _export(rank, source, target, replace=True)
