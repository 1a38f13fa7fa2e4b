"""Calls the callbacks of a run, decides what an exception of one means, and lets the ranks agree on a stop."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.train.callbacks import Callback, CallbackError, Hook
from shardwise.train.step import sum_over_ranks


class Dispatcher:
    """The callbacks of one rank. ``callbacks`` are the same on every rank, also those for rank 0 alone."""

    def __init__(
        self, callbacks: Sequence[Callback], *, is_main: bool, device: torch.device, say: Callable[[str], None]
    ) -> None:
        self._device, self._say = device, say
        self._exchanges = any(callback.may_stop for callback in callbacks)
        self._named = _names(callbacks)
        self._active = [callback for callback in callbacks if is_main or not callback.main_only]

    def call(self, hook: Hook, *arguments: Any) -> None:
        """Call one hook of every callback.

        Raises:
            CallbackError: a callback raised that is not optional.
            ShardwiseError: what a callback refuses, as it is.
        """
        for callback in tuple(self._active):
            try:
                getattr(callback, hook)(*arguments)
            except ShardwiseError:
                raise
            except Exception as error:
                text = f"{callback.name}.{hook} raised {type(error).__name__}: {error}"
                if not callback.optional:
                    raise CallbackError(text) from error
                self._active.remove(callback)
                _to_log(error)
                self._say(f"warning: {text}; {callback.name} is switched off, the run goes on")

    def failed(self, error: BaseException) -> None:
        """Tell all of a failure. Nothing is raised: the failure itself is what has to be reported."""
        for callback in self._active:
            try:
                callback.on_exception(error)
            except Exception as second:
                _to_log(second)

    def stop_reason(self) -> str | None:
        """Why a callback of any rank wants the run to end, the same on every rank; None if none does.

        To be called by all ranks at a step boundary.
        """
        if not self._exchanges:
            return None
        own = next((callback.stop_reason for callback in self._active if callback.stop_reason), None)
        (num_asking,) = sum_over_ranks([float(own is not None)], self._device)
        if not num_asking:
            return None
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, own)
        return next(reason for reason in reasons if reason is not None)

    def state_dict(self) -> dict[str, Any]:
        """The states that callbacks want to be kept, by their names."""
        states = {name: callback.state_dict() for name, callback in self._named.items() if callback in self._active}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, states: dict[str, Any]) -> None:
        """Give each callback what the checkpoint kept under its name."""
        for name, callback in self._named.items():
            if name in states and callback in self._active:
                callback.load_state_dict(states[name])


def _names(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Each callback by its name, a second of one name as ``NAME#2``."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        same = sum(name.split("#")[0] == callback.name for name in named)
        named[f"{callback.name}#{same + 1}" if same else callback.name] = callback
    return named


def _to_log(error: BaseException) -> None:
    """A traceback for the log alone: ``sys.stderr`` of rank 0 is shown on the terminal, too."""
    traceback.print_exception(error, file=sys.__stderr__)
