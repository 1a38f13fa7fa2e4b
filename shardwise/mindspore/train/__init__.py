"""``train``: the callbacks of a script for MindSpore; the training itself is ``shardwise.Trainer``'s."""

from __future__ import annotations

from typing import NoReturn

from shardwise.mindspore.absent import refuse
from shardwise.mindspore.train.callback import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor

__all__ = ["CheckpointConfig", "LossMonitor", "ModelCheckpoint", "TimeMonitor"]


def __getattr__(name: str) -> NoReturn:
    """Refuse what MindSpore has in this module and Shardwise has elsewhere, or not."""
    refuse(__name__, name)
