"""One run at a time in an output folder: a lock on a file in it, which the kernel takes back when its owner ends."""

from __future__ import annotations

import atexit
import errno
import fcntl
import os
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.log import say

FILE_NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_held: dict[Path, int] = {}


def claim(output_dir: Path) -> None:
    """Make the folder and hold its lock until :func:`release_all`, or until this process ends; a second claim of the
    same process changes nothing.

    Raises:
        ConfigError: another process holds it, or the folder cannot be made.
    """
    value = f"output_dir = {str(output_dir)!r}"
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        path = output_dir.resolve() / FILE_NAME
        if path not in _held:
            _held[path] = _lock(path)
            atexit.register(release_all)
    except BlockingIOError as error:
        raise ConfigError(value, f"another run is at work in it ({error.filename})", "Wait, or name another") from None
    except OSError as error:
        raise ConfigError(value, f"cannot be used ({error.strerror})", "Name another folder") from None


def release_all() -> None:
    """Give back every lock of this process, and remove the files."""
    while _held:
        path, descriptor = _held.popitem()
        path.unlink(missing_ok=True)  # while it is locked, so that nobody can lock a file that is about to go
        os.close(descriptor)


def _lock(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise BlockingIOError(error.errno, error.strerror, f"process {owner or 'unknown'}") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise
            say(f"{path.parent}: this file system has no locks; nothing keeps a second run out")
        if _is_at(path, descriptor):
            os.truncate(descriptor, 0)
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
        os.close(descriptor)  # its owner has removed it between our two calls


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
