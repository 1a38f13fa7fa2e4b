"""What the fork server imports before it forks workers. Never imported by anything else: importing it acts.

Its first lines bind the fork server to the launcher. The imports come after, and must leave the process without a
second thread and without an OpenMP pool, neither of which survives a fork.
"""

from __future__ import annotations

import importlib
import os
import signal
from contextlib import suppress

from shardwise.launch.forkserver import LAUNCHER_PID, PRELOAD_MORE
from shardwise.lifeline import die_with_parent

SERVER_PID = os.getpid()

MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic.multiprocessing.api",
    "safetensors.torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "shardwise.launch.worker",
)
# Preloaded to save time only: a worker that needs them imports them and reports failure.
TO_SAVE_TIME = ("shardwise.train.worker", "shardwise.launch.warm")


def _import_all() -> str | None:
    """Import everything; the first failure as text. The worker reports it: the fork server would swallow it."""
    more = [name for name in os.environ.get(PRELOAD_MORE, "").split(",") if name]
    for name in (*MODULES, *more):
        try:
            importlib.import_module(name)
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    for name in TO_SAVE_TIME:
        with suppress(Exception):
            importlib.import_module(name)
    return None


die_with_parent(int(os.environ[LAUNCHER_PID]))
# Ctrl-C, and a signal sent to the whole process group (as timeout and batch systems send it), are for the launcher
# alone, which turns them into a request; a session of its own keeps them from the fork server and the workers.
signal.signal(signal.SIGINT, signal.SIG_IGN)
os.setsid()
FAILURE = _import_all()
