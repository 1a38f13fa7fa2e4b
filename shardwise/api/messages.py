"""How a script's process speaks to its user."""

from __future__ import annotations

import sys
from types import TracebackType

from shardwise.config import nearest
from shardwise.errors import ConfigError, ShardwiseError


def show_refusals() -> None:
    """From now on, let an error of ours that a script does not catch end it as it ends a command: with one message
    and the exit status of the contract, without a traceback. Other errors are shown as before."""
    before = sys.excepthook
    if getattr(before, "_is_ours", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShardwiseError):
            before(kind, error, trace)
            return
        print(f"shardwise: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)  # the interpreter honours it in a hook

    hook._is_ours = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def unknown(function: str, name: str, value: object, known: list[str]) -> ConfigError:
    """The refusal of an argument that does not exist, with the nearest that does."""
    near = nearest(name, known)
    remedy = f"Did you mean {near}?" if near else f"Known: {', '.join(known)}"
    return ConfigError(f"{function}({name}={value!r})", "unknown argument", remedy)
