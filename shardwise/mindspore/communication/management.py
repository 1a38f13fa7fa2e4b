"""``communication.management``: another place where scripts look for the functions of ``communication``."""

from __future__ import annotations

from typing import Any

from shardwise.mindspore import communication

__all__ = communication.__all__


def __getattr__(name: str) -> Any:
    """What ``communication`` has, or its refusal."""
    return getattr(communication, name)
