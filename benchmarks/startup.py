"""Seconds from launch to the beginning of the first step: the product's launcher against spawned ranks.

    python -m benchmarks.startup

The model is tiny, so that reading its weights is nothing. Both ways run in turn; each rank writes the
time at which it would begin its first step, and the last one counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.layouts import quiet_environment

if TYPE_CHECKING:
    from shardwise.train.context import WorkerContext

SECONDS_LIMIT, SHARE_LIMIT = 6.0, 0.5
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "vocab_size": 132,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class _NeverStops:
    """A stop signal that is never given."""

    def requested(self) -> None:
        return None


def reach_first_step(context: WorkerContext) -> dict[str, Any]:
    """What a worker does up to its first step; leaves the time at which it got there."""
    import torch.distributed as dist

    from shardwise.config import load_yaml
    from shardwise.spec.plan import Plan
    from shardwise.spec.rules import parse_run
    from shardwise.train.worker import build_parts

    run = parse_run(load_yaml(context.output_dir / "run.yaml"))
    parts = build_parts(run, Plan.load(context.output_dir / "plan.json"), context)
    next(parts.loader.batches())
    dist.barrier()  # the first step begins when the last rank is there
    (context.output_dir / f"began-{context.rank}").write_text(str(time.time()), encoding="ascii")
    return {}


def spawned_rank(rank: int, num_ranks: int, folder: str) -> None:
    """The same job in a rank that imports everything by itself."""
    import torch
    import torch.distributed as dist

    from shardwise.train.context import WorkerContext

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", num_ranks), rank=rank, world_size=num_ranks)
    reach_first_step(WorkerContext(Path(folder), rank, rank, num_ranks, _NeverStops(), None))
    dist.destroy_process_group()


def lay_out(tree: dict[str, Any]) -> Path:
    """Write what the workers of a job read; its output folder."""
    from shardwise.front.resolve import prepare
    from shardwise.launch.lock import release_all
    from shardwise.launch.output import write_run

    output = write_run(*prepare(tree))
    release_all()  # another process starts the job
    return output


def prepare_job(folder: Path, num_ranks: int) -> Path:
    """Model, rows and an output folder with ``run.yaml`` and ``plan.json``; its path."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8]}\n' * 8, encoding="utf-8")
    tree = {
        "model": str(model),
        "model_init": "random",
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"max_steps": 1},
        "strategy": {"tp": 3, "pp": num_ranks // 3},
        "device": "cpu",
        "output_dir": str(folder / "output"),
    }
    return lay_out(tree)


def launch_job(output: Path, num_ranks: int, how: str) -> None:
    """Start the job's ranks and wait for their end. Runs in a fresh process, as a user's command does."""
    if how == "launcher":
        from shardwise.launch.agent import launch

        sys.exit(launch(output, num_ranks, target="benchmarks.startup:reach_first_step"))
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=spawned_rank, args=(rank, num_ranks, str(output))) for rank in range(num_ranks)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


def measure(how: str, num_ranks: int) -> float:
    """Seconds from the start of the command to the beginning of the first step.

    Raises:
        CalledProcessError: the job failed.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-startup-") as folder:
        output = prepare_job(Path(folder), num_ranks)
        environment = os.environ | quiet_environment(1)
        command = [
            sys.executable,
            "-m",
            "benchmarks.startup",
            "--ranks",
            str(num_ranks),
            "--job",
            str(output),
            "--how",
            how,
        ]
        began = time.time()
        subprocess.run(command, env=environment, check=True)
        return max(float(path.read_text(encoding="ascii")) for path in output.glob("began-*")) - began


def main() -> None:
    """Run the benchmark; exit status 1 where a limit is passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=6, help="processes, a multiple of 3")
    parser.add_argument("--repeats", type=int, default=3, help="jobs of each kind")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--how", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        launch_job(Path(options.job), options.ranks, options.how)
    seconds: dict[str, list[float]] = {"launcher": [], "spawned": []}
    for _ in range(options.repeats):
        for how, values in seconds.items():
            values.append(measure(how, options.ranks))
            print(f"{how:9} {values[-1]:6.1f} s", flush=True)
    ours, spawned = (statistics.median(values) for values in seconds.values())
    good = ours <= SECONDS_LIMIT and ours <= SHARE_LIMIT * spawned
    print(f"medians: {ours:.1f} s by the launcher, {spawned:.1f} s spawned, ratio {ours / spawned:.2f}")
    print(
        f"limits {'kept' if good else 'missed'}: at most {SECONDS_LIMIT:.0f} s and {SHARE_LIMIT:.0%} of spawned ranks"
    )
    sys.exit(not good)


if __name__ == "__main__":
    main()
