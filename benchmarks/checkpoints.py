"""Saving and loading a training state on four ranks: the product, plain DCP, and ``torch.save`` of the gathered state.

    python -m benchmarks.checkpoints

All three hold the same values, 1 GiB of matrices cut by rows over the ranks, and run in turn. Memory is what all ranks
together need beyond the values. Then steps are made with and without a background save under way.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.layouts import quiet_environment

NUM_RANKS, COLUMNS = 4, 4096
SHARE_LIMIT = 1.15  # of the median step while a checkpoint is written in the background


def _peak_rss(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds of ``act``, and by how many bytes anonymous memory rose in it at most."""

    def resident() -> int:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])

    before, peak, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    return seconds, float(max(peak, resident()) - before)


class _State:
    """One rank's part of the values, and each side's way with them."""

    def __init__(self, rank: int, folder: Path, rows: int) -> None:
        import torch
        import torch.distributed.checkpoint  # here, so that no side pays for an import
        import torch.distributed.tensor

        import shardwise.checkpoint.save_job  # noqa: F401
        from shardwise.spec.layout import ParamLayout, chunk_range

        self.rank, self.folder = rank, folder
        self.part = chunk_range(rows, NUM_RANKS, rank)
        self.layouts = [ParamLayout(f"layers.{i}.weight", (rows, COLUMNS), shard_range=self.part) for i in range(16)]
        self.values = {each.name: torch.rand(self.part[1] - self.part[0], COLUMNS) for each in self.layouts}

    def slices(self) -> Any:
        """The values as the product saves them."""
        from shardwise.checkpoint.store import tensor_state

        return tensor_state([(layout, self.values[layout.name]) for layout in self.layouts], "model")

    def _tensors(self) -> dict[str, Any]:
        from torch.distributed.tensor import DTensor, Shard, init_device_mesh

        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        return {name: DTensor.from_local(value, mesh, [Shard(0)]) for name, value in self.values.items()}

    def save_ours(self) -> None:
        from shardwise.checkpoint.companions import Companions
        from shardwise.checkpoint.save_job import save_checkpoint

        save_checkpoint(self.folder / "shardwise", 1, self.slices(), {}, Companions(self.folder))

    def load_ours(self) -> None:
        """With the comparison of all content, as a resume makes it."""
        from shardwise.checkpoint.save_job import damage_in
        from shardwise.checkpoint.store import load_checkpoint

        checkpoint = self.folder / "shardwise" / "step-00000001"
        assert not damage_in(checkpoint)
        load_checkpoint(checkpoint, self.slices())

    def save_dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._tensors(), checkpoint_id=self.folder / "dcp")

    def load_dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._tensors(), checkpoint_id=self.folder / "dcp")

    def save_gathered(self) -> None:
        import torch
        import torch.distributed as dist

        whole = {}
        for name, value in self.values.items():
            parts = [torch.empty_like(value) for _ in range(NUM_RANKS)] if self.rank == 0 else None
            dist.gather(value, parts)
            if parts is not None:
                whole[name] = torch.cat(parts)
        if self.rank == 0:
            torch.save(whole, self.folder / "whole.pt")
        dist.barrier()

    def load_gathered(self) -> None:
        import torch

        whole = torch.load(self.folder / "whole.pt", weights_only=True)
        for name, value in self.values.items():
            value.copy_(whole[name][slice(*self.part)])


def _rank(rank: int, folder: Path, rows: int, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Every side's saves and loads, in turn: (seconds, bytes) by ``side save`` and ``side load``.

    The first round warms up (imports, files of the folder, pages of the values) and is left out.
    """
    import torch.distributed as dist

    state = _State(rank, folder, rows)
    acts = {
        "shardwise save": state.save_ours,
        "shardwise load": state.load_ours,
        "dcp save": state.save_dcp,
        "dcp load": state.load_dcp,
        "torch.save save": state.save_gathered,
        "torch.save load": state.load_gathered,
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in acts}
    for number in range(1 + repeats):
        if rank == 0:
            for path in ("shardwise", "dcp"):
                shutil.rmtree(folder / path, ignore_errors=True)
        for name, act in acts.items():
            dist.barrier()
            measured = _peak_rss(act)
            if number:
                found[name].append(measured)
    return found


@dataclass(frozen=True)
class Round:
    """Seconds of each step without a save under way and beside one, and of the first save from its begin to its end."""

    alone: list[float]
    beside: list[float]
    save: float


def _steps(rank: int, folder: Path, rows: int, num_steps: int, rounds: int) -> list[Round]:
    """Steps (products and an all-reduce) without a save and beside one, which is begun anew until there are enough of
    them; one more round before those that count warms up."""
    import torch
    import torch.distributed as dist

    from shardwise.checkpoint.companions import Companions
    from shardwise.checkpoint.save_job import Content, SaveJob

    state = _State(rank, folder, rows).slices()
    matrix, grad = torch.rand(1024, 1024), torch.rand(2**20)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            torch.mm(matrix, matrix)
        dist.all_reduce(grad)
        return time.perf_counter() - began

    number = 0

    def beside_saves() -> tuple[list[float], float]:
        nonlocal number
        beside: list[float] = []
        save = 0.0
        while len(beside) < num_steps:
            number += 1
            content = Content(number, state, {}, Companions(folder))
            job = SaveJob(folder / "background", content, background=True)
            began, busy = time.perf_counter(), torch.ones(1)
            while busy.item():
                beside.append(step())
                busy = torch.tensor([float(not job.is_written)])
                dist.all_reduce(busy)
            path = job.finish()
            save = save or time.perf_counter() - began
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
        return beside, save

    return [Round([step() for _ in range(num_steps)], *beside_saves()) for _ in range(1 + rounds)][1:]


def share_of(rounds: list[Round]) -> float:
    """The median step beside a save over the median step alone: of each round, and of these the median."""
    return statistics.median(statistics.median(each.beside) / statistics.median(each.alone) for each in rounds)


def main() -> int:
    """Entry point; the exit status is 1 where steps beside a save take longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that count, of either part")
    parser.add_argument("--steps", type=int, default=20, help="of a round, without a save and beside one")
    options = parser.parse_args()
    rows = options.mib * 2**20 // (16 * COLUMNS * 4)
    os.environ |= quiet_environment(1)
    from shardwise.testing import run_distributed

    with tempfile.TemporaryDirectory(prefix="shardwise-checkpoints-") as name:
        folder = Path(name)
        ranks = run_distributed(_rank, NUM_RANKS, folder, rows, options.repeats, timeout=3600)
        for key in ranks[0]:
            seconds = statistics.median(max(each[key][i][0] for each in ranks) for i in range(options.repeats))
            memory = statistics.median(sum(each[key][i][1] for each in ranks) for i in range(options.repeats))
            print(f"{key:16} {seconds:6.2f} s  {memory / 2**20:8.0f} MiB more on all ranks")
        rounds = run_distributed(_steps, NUM_RANKS, folder, rows, options.steps, options.repeats, timeout=3600)[0]
    share = share_of(rounds)
    seconds = statistics.median(each.save for each in rounds)
    print(f"a step while a checkpoint is written: {share:.2f} of one without (limit {SHARE_LIMIT})")
    print(f"{'beside steps':16} {seconds:6.2f} s  from the copy to the checkpoint's name")
    print(json.dumps([asdict(each) for each in rounds]))
    return int(share > SHARE_LIMIT)


if __name__ == "__main__":
    sys.exit(main())
