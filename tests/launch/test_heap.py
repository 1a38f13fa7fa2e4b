"""What glibc's allocator is told."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

from shardwise.launch.heap import keep_freed_pages

TRIM, MAP = -1, -3


def told(most: int, environ: dict[str, str], gathers: bool = False) -> list[tuple[int, int]]:
    """The calls of ``mallopt``, of a version that maps from ``most`` bytes on at the latest."""
    calls: list[tuple[int, int]] = []

    def mallopt(option: int, value: int) -> int:
        calls.append((option, value))
        return int(option != MAP or value <= most)

    with mock.patch("ctypes.CDLL", return_value=SimpleNamespace(mallopt=mallopt)):
        keep_freed_pages(environ, gathers)
    return calls


def test_an_older_version_maps_as_late_as_it_can() -> None:
    """What is given back alone would fix the other size where it begins, at 128 KiB."""
    assert told(2**40, {}) == [(MAP, 2**30), (TRIM, 2**30)]
    assert told(2**25, {}) == [(MAP, 2**30), (MAP, 2**25), (TRIM, 2**30)]
    assert told(2**25, {}, gathers=True) == [(MAP, 2**23), (TRIM, 2**23)]


@pytest.mark.parametrize("name", ["MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_are_left_alone(name: str) -> None:
    assert told(2**40, {name: "1"}) == []
