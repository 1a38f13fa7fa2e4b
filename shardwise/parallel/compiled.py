"""Compiled blocks: each block's forward and backward pass as one generated program."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanError
from shardwise.parallel.dropout import SeededDropout


def compile_blocks(blocks: Sequence[nn.Module], device: torch.device, compiled: bool) -> None:
    """Compile the forward pass of each of ``blocks`` at its first call; a no-op unless ``compiled``.

    Rows and length are symbols from the start, so that a step of another length does not compile again,
    and blocks of one kind share one program. A block that cannot be compiled as a whole raises at its
    first call, and so does one that would be compiled too often: nothing falls back to eager. The block's
    own ``forward`` is wrapped, inside of any hook.

    Raises:
        PlanError: a block with dropout layers. Dropout of attention is no layer, and compiles.
    """
    if not compiled:
        return
    # Imported here: it takes seconds, and a run without compilation does not need it.
    import torch._inductor.config

    if device.type == "cpu":
        # Ranks compile at the same time, and each would start a worker with torch in memory for every core.
        torch._inductor.config.compile_threads = 1
    for block in blocks:
        if any(isinstance(module, SeededDropout) for module in block.modules()):
            rule = "dropout layers draw their masks by name, which does not compile"
            raise PlanError("train.compile = true", rule, "Set their dropout to 0, or use train.compile=false")
        block.forward = torch.compile(block.forward, dynamic=True, fullgraph=True)  # type: ignore[method-assign]


def has_dropout_layers(model: nn.Module) -> bool:
    """Whether a model, before any split, has dropout layers that draw; its blocks then do not compile."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


class CompileClock:
    """Counts the seconds that this process spends in compiling, whenever that happens."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler

        self._began = self._seconds = 0.0
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _start(self, _: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, _: Any) -> None:
        self._seconds += time.perf_counter() - self._began
