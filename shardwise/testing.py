"""Run a function on several ranks of this machine, for tests of parallel code.

Ranks are forked from one server process that has torch and transformers imported: a rank starts in
well under a second, where a fresh process takes many. They talk over gloo and a file store, so no port
is taken, and nothing outlives the call.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from shardwise.launch.culprit import is_connection_error

# What ranks find imported; to be added to before the first ranks start.
PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.mistral.modeling_mistral",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "peft",
    "shardwise.parallel.apply",
    "shardwise.train.step",
    "shardwise.launch.warm",
]


_CONNECTING = "Gloo connectFullMesh failed"
_PEERS_SECONDS = 10.0  # how long the other ranks are heard after one has failed


class RankError(RuntimeError):
    """A rank raised or died; the message holds the traceback of the first that did, and a line of each other."""


class _NoMeshError(RankError):
    """All ranks lost each other while gloo connected them: no function of a rank has failed."""


@dataclass(frozen=True)
class _Failure:
    text: str
    lost_a_peer: bool  # the connection to another rank ended: that one failed before


def run_distributed(function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call ``function(rank, *args)`` on ``num_ranks`` processes of one gloo group.

    Args:
        function: importable by name; its arguments and its result are pickled.
        timeout: seconds after which all ranks are killed.

    Returns:
        The results by rank.

    Raises:
        RankError: a rank raised, died, or the time was up.
    """
    try:
        return _run_once(function, num_ranks, args, timeout)
    except _NoMeshError as error:
        # Seen once in some ten thousand groups: gloo's connections end while they are made, and no rank failed before.
        warnings.warn(f"the ranks could not connect, once more: {error}", stacklevel=2)
        return _run_once(function, num_ranks, args, timeout)


def _run_once(function: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout: float) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="shardwise-test-") as folder:
        processes: list[BaseProcess] = []
        receivers: list[Connection] = []
        try:
            for rank in range(num_ranks):
                receiver, sender = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=_rank_main, args=(function, rank, num_ranks, f"{folder}/store", sender, args), daemon=True
                )
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            return _collect(receivers, processes, time.monotonic() + timeout, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(
    receivers: Sequence[Connection], processes: Sequence[BaseProcess], deadline: float, timeout: float
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    pending = {receiver: rank for rank, receiver in enumerate(receivers)}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = pending.pop(receiver)
            answer = _receive(receiver, rank, processes[rank])
            if isinstance(answer, _Failure):
                # The peers of a rank that failed lose it and fail too: hear them before one is named.
                failures[rank] = answer
                deadline = min(deadline, time.monotonic() + _PEERS_SECONDS)
            else:
                results[rank] = answer
    if failures:
        first = sorted(failures.values(), key=lambda failure: failure.lost_a_peer)  # stable: else as they came
        others = [f"{failure.text.splitlines()[0]} {failure.text.splitlines()[-1]}" for failure in first[1:]]
        no_mesh = all(failure.lost_a_peer and _CONNECTING in failure.text for failure in first)
        raise (_NoMeshError if no_mesh else RankError)("\n".join([first[0].text, *others]))
    if pending:
        raise RankError(f"ranks {sorted(pending.values())} did not finish within {timeout:.0f} s")
    return [results[rank] for rank in range(len(receivers))]


def _receive(receiver: Connection, rank: int, process: BaseProcess) -> Any:
    """What a rank has sent: its result, or a :class:`_Failure`."""
    try:
        ok, value = pickle.loads(receiver.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join(5)
        return _Failure(f"rank {rank} died with exit code {process.exitcode}", lost_a_peer=False)
    return value if ok else _Failure(f"rank {rank} raised:\n{value[0]}", lost_a_peer=value[1])


def _rank_main(
    function: Callable[..., Any], rank: int, num_ranks: int, store: str, sender: Connection, args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
        # Plain bytes: a tensor sent as such would live in shared memory that ends with this process.
        sender.send_bytes(pickle.dumps((True, function(rank, *args))))
    except BaseException as error:
        sender.send_bytes(pickle.dumps((False, (traceback.format_exc(), is_connection_error(error)))))
    finally:
        sender.close()
        # The peers of a rank that raised sit in a collective; leaving without a goodbye frees them.
        os._exit(0)
