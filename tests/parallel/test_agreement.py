"""What rank 0 finds out for all, on the thread that it may need."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest

from shardwise.errors import ConfigError
from shardwise.parallel import agreement


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """What rank 0 of a group has broadcast, each with whether the main thread did."""
    found: list[tuple[Any, bool]] = []
    busy = threading.Lock()

    def broadcast(box: list[Any], src: int) -> None:
        assert src == 0
        assert busy.acquire(blocking=False), "two collectives at a time"
        time.sleep(0.02)
        found.append((box[0], threading.current_thread() is threading.main_thread()))
        busy.release()

    monkeypatch.setattr(agreement, "_TELL_SECONDS", 0.01)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    return found


def test_rank_0_works_on_the_main_thread_while_another_tells(sent: list[tuple[Any, bool]]) -> None:
    def make() -> bool:
        while not sent:
            time.sleep(0.01)
        return threading.current_thread() is threading.main_thread()

    assert agreement.from_rank_0(make)
    *told, last = sent
    assert told
    assert set(told) == {(agreement._AT_WORK, False)}
    assert last == (True, True)


def test_a_refusal_is_told_and_other_errors_are_raised(
    sent: list[tuple[Any, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_TELL_SECONDS", 60.0)  # nothing else is told meanwhile
    refusal = ConfigError("rows", "none", "Give some")
    with pytest.raises(ConfigError):
        agreement.from_rank_0(mock.Mock(side_effect=refusal))
    assert sent == [(refusal, True)]
    with pytest.raises(ZeroDivisionError):
        agreement.from_rank_0(lambda: 1 // 0)
    assert len(sent) == 1, "the others are told by this rank's end"
