"""A process that must not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send it another signal, as soon as its parent ends, however that ends.

    The kernel watches from this call on, so a parent that has ended before is looked for afterwards.
    Only Linux offers it; elsewhere only the second half happens.

    Args:
        parent: process id that the parent is known to have.
    """
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        if prctl(_PR_SET_PDEATHSIG, int(by), 0, 0, 0) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)
