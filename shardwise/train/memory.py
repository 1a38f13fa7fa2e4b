"""Memory of this process, as the metrics report it."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import torch

_SAMPLE_SECONDS = 0.02
_RSS_ANON = re.compile(r"^RssAnon:\s+(\d+) kB", re.MULTILINE)


def anonymous_bytes() -> int:
    """Anonymous memory of this process (RssAnon): what it allocated, without mapped files; 0 where /proc is absent."""
    try:
        match = _RSS_ANON.search(Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


class MemoryMeter:
    """Peak memory since it was made: the allocator's own peak on a device, sampled anonymous memory on CPU.

    On CPU the value before the model was built is subtracted, so that imports do not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base = self._peak = anonymous_bytes()
        self._stop = threading.Event()
        if device.type == "cpu":
            threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())

    def peak_bytes(self) -> int:
        if self._device.type != "cpu":
            return int(torch.get_device_module(self._device.type).max_memory_allocated())
        self._peak = max(self._peak, anonymous_bytes())
        return self._peak - self._base

    def close(self) -> None:
        self._stop.set()
