"""Speed of a training step: Shardwise against plain PyTorch, alternating in the same processes.

    python -m benchmarks.step --model models/SmolLM2-135M-Instruct --layouts one,tp3 --json

Both sides see the same batches, so their losses are compared too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.layouts import LAYOUTS, LEARNING_RATE, LENGTH, MAX_GRAD_NORM, ROWS, Layout, num_cores, quiet_environment

if TYPE_CHECKING:
    from torch import Tensor

WARM_UP = 2
LOSS_TOLERANCE = 1e-5
OURS, BASELINE = "ours", "baseline"


@dataclass(frozen=True)
class Setting:
    """What every rank is told."""

    layout: Layout
    model_dir: str
    repeats: int
    micro_batch_size: int
    optimizer: str
    head: str
    sides: tuple[str, ...] = (OURS, BASELINE)


@dataclass
class Measured:
    """One side of one layout on one rank: a value a step, without warm-up; losses with it."""

    wall: list[float] = field(default_factory=list)
    user: list[float] = field(default_factory=list)
    system: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass(frozen=True)
class SideResult:
    """One side over all ranks, medians over the repeats; ``peak_bytes`` is the largest rank's."""

    tokens_per_second: float
    tokens_per_cpu_second: float
    system_share: float
    losses: list[float]
    peak_bytes: int


def ours(setting: Setting) -> Callable[[Tensor, Tensor], float]:
    """The product's step on this rank, made of its own parts."""
    import torch

    from shardwise.checkpoint.hf import load_slices
    from shardwise.checkpoint.naming import naming_of_folder
    from shardwise.data.batch import START, Batch
    from shardwise.models.build import build_on_meta
    from shardwise.parallel.apply import parallelize
    from shardwise.parallel.mesh import build_mesh
    from shardwise.spec.run import TrainConfig
    from shardwise.spec.strategy import Strategy, default_stages
    from shardwise.train.optim import Optimizer
    from shardwise.train.step import train_step

    layout, folder = setting.layout, Path(setting.model_dir)
    hf_model = build_on_meta(folder, "sdpa")
    rows = setting.micro_batch_size if layout.pp > 1 else ROWS // layout.dp_shard
    strategy = Strategy(
        pp=layout.pp,
        tp=layout.tp,
        dp_shard=layout.dp_shard,
        micro_batch_size=rows,
        stages=default_stages(hf_model.config.num_hidden_layers, layout.pp),
    )
    mesh = build_mesh(strategy, torch.device("cpu"))
    naming = naming_of_folder(folder, hf_model)
    model, _ = parallelize(hf_model, mesh)
    load_slices(folder, model.shards, naming)
    optimizer = Optimizer(model.shards, TrainConfig())
    positions = torch.arange(LENGTH).expand(ROWS // layout.dp_shard // rows, rows, LENGTH)

    def step(ids: Tensor, targets: Tensor) -> float:
        own = slice(mesh.data_rank * ROWS // layout.dp_shard, (mesh.data_rank + 1) * ROWS // layout.dp_shard)
        shape = positions.shape
        num_tokens = ids.numel()
        batch = Batch(
            ids[own].view(shape),
            targets[own].view(shape),
            positions,
            torch.full(shape[:2], shape[2]),
            num_tokens,
            num_tokens,
            num_tokens,
            ROWS,
            (),
            None,
            0,
            0,
            START,
        )
        result = train_step(model, optimizer, batch, LEARNING_RATE, MAX_GRAD_NORM, [])
        assert result.loss is not None
        return result.loss

    return step


def baseline(setting: Setting) -> Callable[[Tensor, Tensor], float]:
    """The plain PyTorch step on this rank."""
    from benchmarks.baselines import Baseline

    side = Baseline(setting.layout, Path(setting.model_dir), setting.micro_batch_size, setting.optimizer, setting.head)
    return side.step


SIDES = {OURS: ours, BASELINE: baseline}


def measure_rank(rank: int, setting: Setting) -> dict[str, Measured]:
    """All steps of one layout on this rank, the sides taking turns."""
    import torch
    import torch.distributed as dist

    from shardwise.train.memory import MemoryMeter

    torch.set_num_threads(setting.layout.num_threads)
    meter = MemoryMeter(torch.device("cpu"))
    steps = {name: SIDES[name](setting) for name in setting.sides}
    measured = {name: Measured() for name in setting.sides}
    generator = torch.Generator().manual_seed(0)
    vocab = json.loads((Path(setting.model_dir) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    for index in range(WARM_UP + setting.repeats):
        tokens = torch.randint(0, vocab, (ROWS, LENGTH + 1), generator=generator)
        ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for name, step in steps.items():
            dist.barrier()
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            loss = step(ids, targets)
            after, ended = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            out = measured[name]
            out.losses.append(loss)
            if index >= WARM_UP:
                out.wall.append(ended - began)
                out.user.append(after.ru_utime - before.ru_utime)
                out.system.append(after.ru_stime - before.ru_stime)
    for out in measured.values():
        out.peak_bytes = meter.peak_bytes()  # means something only where one side runs alone
    meter.close()
    return measured


def combine(ranks: Sequence[Measured]) -> SideResult:
    """One side's ranks together: a step lasts as long as its slowest rank and costs the CPU time of all."""
    tokens = ROWS * LENGTH
    wall = [max(values) for values in zip(*(rank.wall for rank in ranks), strict=True)]
    user = [sum(values) for values in zip(*(rank.user for rank in ranks), strict=True)]
    system = [sum(values) for values in zip(*(rank.system for rank in ranks), strict=True)]
    cpu = [u + s for u, s in zip(user, system, strict=True)]
    return SideResult(
        tokens / statistics.median(wall),
        tokens / statistics.median(cpu),
        sum(system) / sum(cpu),
        ranks[0].losses,
        max(rank.peak_bytes for rank in ranks),
    )


def measure_layout(setting: Setting, memory: bool) -> dict[str, Any]:
    """Both sides of one layout, their ratios, and with ``memory`` each side's peak in a run of its own.

    Raises:
        SystemExit: the sides do not train alike.
    """
    from shardwise.testing import run_distributed

    count = setting.layout.num_ranks
    ranks = run_distributed(measure_rank, count, setting, timeout=900.0)
    results = {name: combine([rank[name] for rank in ranks]) for name in setting.sides}
    if len(results) == 2:
        check_losses(setting.layout.name, results[OURS].losses, results[BASELINE].losses)
    peaks = {}
    if memory:
        for name in setting.sides:
            alone = Setting(**(vars(setting) | {"sides": (name,), "repeats": 1}))
            peaks[name] = max(r[name].peak_bytes for r in run_distributed(measure_rank, count, alone, timeout=600.0))
    report: dict[str, Any] = {"layout": setting.layout.name, "ranks": count, "bar": setting.layout.bar}
    for name, result in results.items():
        report[name] = asdict(result) | {"peak_bytes": peaks.get(name)}
    if len(results) == 2:
        for key in ("tokens_per_second", "tokens_per_cpu_second"):
            report[f"ratio_{key}"] = getattr(results[OURS], key) / getattr(results[BASELINE], key)
    return report


def check_losses(layout: str, got: Sequence[float], want: Sequence[float]) -> None:
    """Refuse to compare the speed of two trainings that are not the same.

    Raises:
        SystemExit: a loss differs by more than ``LOSS_TOLERANCE``, relatively.
    """
    worst = max(abs(g - w) / abs(w) for g, w in zip(got, want, strict=True))
    if worst > LOSS_TOLERANCE:
        sys.exit(
            f"{layout}: losses differ by {worst:.1e} (limit {LOSS_TOLERANCE:.0e}):\n  ours     {got}\n  baseline {want}"
        )


def show(reports: Sequence[dict[str, Any]]) -> None:
    """The reports as a table."""
    head = ("layout", "side", "tok/s", "tok/CPU-s", "system", "peak MiB", "ratio tok/s", "ratio tok/CPU-s", "bar")
    print("{:8} {:9} {:>7} {:>10} {:>7} {:>9} {:>12} {:>16} {:>5}".format(*head))
    for report in reports:
        for name in (n for n in SIDES if n in report):
            side = report[name]
            ratios = [f"{report.get(f'ratio_{k}', 0):.3f}" for k in ("tokens_per_second", "tokens_per_cpu_second")]
            tail = [*ratios, report["bar"] or "-"] if name == OURS and BASELINE in report else ["", "", ""]
            peak = f"{side['peak_bytes'] / 2**20:.0f}" if side["peak_bytes"] else "-"
            print(
                f"{report['layout']:8} {name:9} {side['tokens_per_second']:7.1f} {side['tokens_per_cpu_second']:10.1f} "
                f"{side['system_share']:7.1%} {peak:>9} {tail[0]:>12} {tail[1]:>16} {tail[2]:>5}"
            )


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="Hugging Face folder")
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of each side")
    parser.add_argument("--micro-batch", type=int, default=2, help="rows of a micro-batch under a pipeline")
    parser.add_argument("--optimizer", choices=("fused", "foreach"), default="fused", help="AdamW of the baseline")
    parser.add_argument(
        "--head", choices=("split", "gathered"), default="split", help="logits of the baseline under TP"
    )
    parser.add_argument("--sides", default=f"{OURS},{BASELINE}", help="which sides to run")
    parser.add_argument("--no-memory", action="store_true", help="leave out the runs that measure memory")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON too")
    return parser.parse_args(argv)


def main() -> None:
    """Run the benchmark."""
    options = arguments()
    reports = []
    for name in options.layouts.split(","):
        layout = LAYOUTS[name]
        for variable, value in quiet_environment(num_cores()).items():
            os.environ.setdefault(variable, value)
        setting = Setting(
            layout,
            str(Path(options.model).resolve()),
            options.repeats,
            options.micro_batch,
            options.optimizer,
            options.head,
            tuple(options.sides.split(",")),
        )
        reports.append(measure_layout(setting, not options.no_memory))
        show(reports[-1:])
        sys.stdout.flush()
    if options.json:
        print(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main()
