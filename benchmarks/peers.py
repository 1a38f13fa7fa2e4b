"""Whole training jobs side by side: Shardwise and what people use today, on the same rows and the same layouts.

    python -m benchmarks.peers --peers-python /path/to/environment/bin/python

The other environment needs torch, transformers, accelerate, peft and deepspeed. Every job is started as its
user would start it and watched from outside: a line with the loss ends each step; CPU time and anonymous
memory are read from /proc for all processes of the job. The jobs take turns, ``--rounds`` times.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.layouts import LEARNING_RATE, LENGTH, ROWS, num_cores
from benchmarks.watch import StepRecord, watch

WARM_UP = 2
LOSS_TOLERANCE = 1e-4
LORA = {"r": 8, "alpha": 16, "dropout": 0.0}


@dataclass(frozen=True)
class Job:
    """One way to train; jobs of the same ``group`` train the same thing on the same number of processes."""

    group: str
    side: str
    ranks: int
    strategy: tuple[str, ...] = ()  # ours alone
    lora: bool = False

    @property
    def name(self) -> str:
        return f"{self.group} {self.side}"


def jobs() -> list[Job]:
    """Full fine-tuning and LoRA, our job of a layout after those of the others."""
    full = [
        Job("one", "plain", 1),
        Job("one", "hf-trainer", 1),
        Job("one", "ours", 1),
        Job("dp2", "hf-trainer", 2),
        Job("dp2", "ours", 2, ("dp_replicate=2", "dp_shard=1")),
        Job("fsdp2", "hf-fsdp2", 2),
        Job("fsdp2", "torch-fsdp2", 2),
        Job("fsdp2", "ours", 2, ("dp_shard=2",)),
        Job("tp3", "hf-tp", 3),
        Job("tp3", "deepspeed-autotp", 3),
        Job("tp3", "ours", 3, ("tp=3",)),
    ]
    lora = [
        Job("lora one", "hf-trainer", 1, lora=True),
        Job("lora one", "ours", 1, lora=True),
        Job("lora dp2", "hf-trainer", 2, lora=True),
        Job("lora dp2", "ours", 2, ("dp_replicate=2", "dp_shard=1"), lora=True),
        Job("lora tp3", "ours", 3, ("tp=3",), lora=True),
    ]
    return [*full, *lora]


@dataclass
class Measured:
    """One job over its rounds."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failed: str = ""

    def add(self, record: StepRecord) -> None:
        ends, cpu = record.ends[WARM_UP - 1 :], record.cpu_seconds[WARM_UP - 1 :]
        self.wall += [b - a for a, b in itertools.pairwise(ends)]
        self.cpu += [b - a for a, b in itertools.pairwise(cpu)]
        self.peaks.append(record.peak_rank_bytes)
        self.starts.append(record.ends[0] - record.began)
        self.losses = record.losses

    def summary(self) -> dict[str, Any]:
        tokens = ROWS * LENGTH
        return {
            "tokens_per_second": tokens / statistics.median(self.wall),
            "tokens_per_cpu_second": tokens / statistics.median(self.cpu),
            "peak_rank_bytes": max(self.peaks),
            "seconds_to_first_step": statistics.median(self.starts),
            "losses": self.losses,
        }


def write_rows(path: Path, vocab_size: int, steps: int) -> None:
    """Random rows of one length, so that no side pads."""
    random = Random(0)
    rows = ({"input_ids": [random.randrange(vocab_size) for _ in range(LENGTH)]} for _ in range(steps * ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(job: Job, options: argparse.Namespace, rows: Path, out: Path) -> tuple[list[str], Path]:
    """The command line of a job, and the file that gets a line for each step."""
    model = str(Path(options.model).resolve())
    if job.side == "ours":
        settings = [
            *(f"model={model}", f"data.train={rows}", f"output_dir={out}", "device=cpu", f"devices={job.ranks}"),
            *(f"train.max_steps={options.steps}", f"train.global_batch_size={ROWS}", "train.lr_scheduler=constant"),
            *(f"train.learning_rate={LEARNING_RATE}", "data.shuffle=false", "save.export=false"),
            *job.strategy,
            *([f"lora.{key}={value}" for key, value in LORA.items()] if job.lora else []),
        ]
        return [sys.executable, "-m", "shardwise.cli", "train", *settings], out / "metrics.jsonl"
    out.mkdir()
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.ranks}"] if job.ranks > 1 else []
    side = Path(__file__).with_name("peer_side.py")
    arguments = [*(f"--side={job.side}", f"--model={model}", f"--rows={rows}"), f"--out={out / 'steps.jsonl'}"]
    arguments += [f"--steps={options.steps}", *([f"--adapter={options.adapter}"] if job.lora else [])]
    return [options.peers_python, *start, str(side), *arguments], out / "steps.jsonl"


def write_adapter(options: argparse.Namespace, rows: Path, out: Path) -> Path:
    """The adapter that ours starts from, in PEFT's format: one step with a learning rate of 0, exported."""
    job = Job("lora one", "ours", 1, lora=True)
    settings = ["train.max_steps=1", "train.learning_rate=0", "save.export=true"]
    subprocess.run([*command(job, options, rows, out)[0], *settings], check=True, capture_output=True)
    return next(out.rglob("adapter_model.safetensors")).parent


def run_job(job: Job, options: argparse.Namespace, rows: Path, out: Path, measured: Measured) -> None:
    """Run a job once and add what was seen of it; a job that fails says so and is not run again."""
    line, steps_file = command(job, options, rows, out)
    threads = str(max(1, num_cores() // job.ranks))
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= {"TOKENIZERS_PARALLELISM": "false", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"}
    record = watch(line, environment, steps_file, out.with_suffix(".log"), options.timeout)
    if record.exit_code != 0 or len(record.losses) < options.steps:
        text = out.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [entry for entry in text if "Error" in entry and "ChildFailed" not in entry] or text or [""]
        measured.failed = f"exit {record.exit_code} after {len(record.losses)} steps: {errors[-1][:160]}"
        return
    measured.add(record)


def report(measured: dict[Job, Measured]) -> tuple[list[dict[str, Any]], bool]:
    """A row for each job with its ratio to ours; and whether ours is at least as fast, with equal losses."""
    rows, good = [], True
    for job, values in measured.items():
        row: dict[str, Any] = {"group": job.group, "side": job.side, "ranks": job.ranks}
        ours = next((v for j, v in measured.items() if j.group == job.group and j.side == "ours"), None)
        if values.failed or ours is None or ours.failed:
            row["failed"] = values.failed or "no job of ours to compare with"
            good &= job.side != "ours"
        else:
            row |= values.summary()
            mine = ours.summary()
            row |= {f"ours_{key}": mine[key] / row[key] for key in ("tokens_per_second", "tokens_per_cpu_second")}
            pairs = zip(row["losses"], mine["losses"], strict=True)
            row["loss_difference"] = max(abs(a - b) / abs(a) for a, b in pairs)
            good &= row["loss_difference"] <= LOSS_TOLERANCE and row["ours_tokens_per_second"] >= 1.0
        rows.append(row)
    return rows, good


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The rows as a table."""
    print(f"{'layout':9} {'side':17} {'tok/s':>7} {'tok/CPU-s':>9} {'MiB/rank':>9} {'first step':>10}", end="")
    print(f" {'ours tok/s':>10} {'ours tok/CPU-s':>14} {'loss diff':>9}")
    for row in rows:
        head = f"{row['group']:9} {row['side']:17}"
        if "failed" in row:
            print(f"{head} failed: {row['failed']}")
            continue
        print(
            f"{head} {row['tokens_per_second']:7.1f} {row['tokens_per_cpu_second']:9.1f} "
            f"{row['peak_rank_bytes'] / 2**20:9.0f} {row['seconds_to_first_step']:8.1f} s "
            f"{row['ours_tokens_per_second']:9.2f}x {row['ours_tokens_per_cpu_second']:13.2f}x "
            f"{row['loss_difference']:9.1e}"
        )


def main() -> None:
    """Run the benchmark; exit status 1 where a peer is faster, a loss differs or our job fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder")
    parser.add_argument("--peers-python", default=sys.executable, help="interpreter of the peers' environment")
    parser.add_argument("--only", default="", help="run the jobs whose name contains this alone")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a job may take")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON too")
    options = parser.parse_args()
    vocab = json.loads((Path(options.model) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    chosen = [job for job in jobs() if options.only in job.name]
    measured = {job: Measured() for job in chosen}
    with tempfile.TemporaryDirectory(prefix="shardwise-peers-") as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, vocab, options.steps)
        if any(job.lora for job in chosen):
            options.adapter = write_adapter(options, rows, Path(folder) / "adapter")
        for turn in range(options.rounds):
            for index, (job, values) in enumerate(measured.items()):
                if not values.failed:
                    print(f"round {turn + 1}: {job.name}", file=sys.stderr, flush=True)
                    run_job(job, options, rows, Path(folder) / f"{turn}-{index}", values)
    result, good = report(measured)
    show(result)
    if options.json:
        print(json.dumps(result, indent=1))
    sys.exit(not good)


if __name__ == "__main__":
    main()
