"""Each test begins in a process that no launcher started, and leaves nothing that a script has said."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwise.mindspore as ms
from shardwise.api.ambient import AMBIENT

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*PLACE, "SHARDWISE_PRESETS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    yield
    ms.reset_auto_parallel_context()
    ms.reset_algo_parameters()
    AMBIENT.keys.clear()
    ms.communication._Holder.place = None
