"""``dataset``: rows for the Trainer from a Python source."""

from __future__ import annotations

from typing import NoReturn

from shardwise.mindspore.absent import refuse
from shardwise.mindspore.dataset import config
from shardwise.mindspore.dataset.generator import GeneratorDataset

__all__ = ["GeneratorDataset", "config"]


def __getattr__(name: str) -> NoReturn:
    """Refuse what MindSpore has in this module and Shardwise has elsewhere, or not."""
    refuse(__name__, name)
