"""How glibc's allocator keeps what a CPU step frees."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

# From malloc.h. Above the one size, tensors are mapped and given back to the system when they are freed; above the
# other, what is free at the heap's end is given back.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 2**30
_MOST_MAPPED_BYTES = 2**25  # what older versions take for the first at most
_GATHERED_BYTES = 2**23
_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_pages(environ: Mapping[str, str], gathers: bool = False) -> None:
    """Let the process use freed memory of large tensors again, where it has glibc.

    By default glibc maps every tensor above 32 MiB anew, and the kernel fills its pages with zeros each time: a tenth
    of a step of SmolLM2 on a CPU (docs/en/comparison.md says what was measured).

    Args:
        environ: where a user's own settings of the allocator stand; they are left alone.
        gathers: weights are shared out over data ranks. Gathered weights and summed gradients come and go in sizes
            that leave holes between them: kept, they made one rank of four a third to nine tenths larger. Then only
            what is smaller than most of them is kept.
    """
    if any(name in environ for name in _SETTINGS):
        return
    with suppress(OSError, AttributeError):  # another C library: it has no such switch
        mallopt = ctypes.CDLL(None).mallopt
        kept = _GATHERED_BYTES if gathers else _KEPT_BYTES
        # The second alone would end the rise of the first, which would stay at 128 KiB.
        if not mallopt(_M_MMAP_THRESHOLD, kept):
            mallopt(_M_MMAP_THRESHOLD, _MOST_MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, kept)
