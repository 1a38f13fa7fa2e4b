"""Every legal plan of small models on a few processes of this CPU, measured, beside what the planner says of it.

    python -m benchmarks.measured_plans --rows plans.jsonl

Each measured plan is a line of the file; what is in it already is not measured again, so a run that was stopped goes
on. Plans are those of the planner's own space that use all processes and recompute nothing, each with its best cut.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.layouts import llama, num_cores, quiet_environment
from shardwise.front.measuring import measured_cluster
from shardwise.front.planning import folder_costs, work_of
from shardwise.planner.host import on_cluster
from shardwise.planner.job import Candidate, Job, Planned
from shardwise.planner.refine import refine
from shardwise.planner.search import search
from shardwise.planner.space import enumerate_space, sequence_choices, shard_degrees, with_schedules
from shardwise.planner.sweep import not_runnable
from shardwise.spec.run import TrainConfig
from shardwise.spec.strategy import Strategy

ROWS, LENGTH, WARM_UP = 8, 64, 1
MOST_VIRTUAL = 2  # stages of a rank; more only repeat themselves here
COLUMNS = (  # fields of a strategy, in the order of a line of the table
    *("pp", "dp_replicate", "dp_shard", "tp", "sequence_parallel", "reshard"),
    *("schedule", "virtual_stages", "micro_batch_size"),
)
TIME_LIMIT, MEMORY_OVER, MEMORY_UNDER = 0.10, 0.10, 0.05
# Different in shape, 21 to 24 million weights each.
MODELS: dict[str, dict[str, Any]] = {
    "deep": llama(256, 704, 24, (4, 4), 4096),
    "wide": llama(384, 1024, 3, (6, 6), 24000),
    "grouped": llama(512, 1408, 6, (8, 2), 8192, tie_word_embeddings=True),
}


@dataclass(frozen=True)
class Setting:
    """What every rank is told: a model's folder, the plan, and how many steps are timed."""

    folder: str
    fields: dict[str, Any]
    repeats: int


@dataclass(frozen=True)
class RankResult:
    """Seconds of each timed step, and the peak of a rank's memory (``train/memory``)."""

    seconds: list[float]
    peak_bytes: int
    loss: float


def legal_plans(job: Job) -> list[Planned]:
    """Every candidate of the space that the runtime can execute, with its best cut; the fastest by prediction first."""
    found: dict[Candidate, Planned] = {}
    space = with_schedules(job, enumerate_space(job, job.devices - 1, job.devices).columns)
    names = ("tp", "cp", "pp", "dp", "m", "ep", "v", "halves")
    for values in zip(*(space.columns[name].tolist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        if row["v"] > MOST_VIRTUAL:
            continue
        for shard, reshard in shard_degrees(job, row["dp"], row["tp"]):
            for sequence_parallel in sequence_choices(job):
                candidate = Candidate(
                    tp=row["tp"],
                    pp=row["pp"],
                    dp_replicate=row["dp"] // shard,
                    dp_shard=shard,
                    cp=row["cp"],
                    ep=row["ep"],
                    reshard=reshard,
                    sequence_parallel=sequence_parallel,
                    micro_batch_size=row["m"],
                    schedule="interleaved" if row["v"] > 1 else "zero_bubble" if row["halves"] else "1f1b",
                    virtual_stages=row["v"],
                )
                if (sequence_parallel and row["tp"] == 1) or not_runnable(candidate, job.work.precision):
                    continue
                plan, _ = refine(job, candidate)
                if plan is not None:
                    found[plan.candidate] = plan
    return sorted(found.values(), key=lambda plan: plan.step_seconds)


def measure_rank(rank: int, setting: Setting) -> RankResult:
    """Train a few steps on this rank as the product does."""
    import torch
    import torch.distributed as dist

    from shardwise.data.batch import START, Batch
    from shardwise.launch.heap import keep_freed_pages
    from shardwise.models.build import build_on_meta
    from shardwise.models.init import distributions, fill_random
    from shardwise.parallel.apply import parallelize
    from shardwise.parallel.mesh import build_mesh
    from shardwise.train.memory import MemoryMeter
    from shardwise.train.optim import Optimizer
    from shardwise.train.step import train_step

    torch.set_num_threads(max(1, num_cores() // dist.get_world_size()))
    strategy = Strategy.from_json(setting.fields)
    keep_freed_pages(os.environ, strategy.dp_shard > 1)
    mesh = build_mesh(strategy, torch.device("cpu"))
    meter = MemoryMeter(torch.device("cpu"))
    hf_model = build_on_meta(Path(setting.folder), "sdpa")
    dists = distributions(hf_model)
    vocab = hf_model.config.vocab_size
    model, _ = parallelize(hf_model, mesh)
    fill_random(model.shards, dists, 0)
    optimizer = Optimizer(model.shards, TrainConfig())
    per_rank, micro = ROWS // strategy.dp, strategy.micro_batch_size
    shape = (per_rank // micro, micro, LENGTH)
    own = slice(mesh.data_rank * per_rank, (mesh.data_rank + 1) * per_rank)
    generator = torch.Generator().manual_seed(0)
    positions, lengths = torch.arange(LENGTH).expand(shape), torch.full(shape[:2], LENGTH)
    seconds, loss = [], None
    for step in range(WARM_UP + setting.repeats):
        tokens = torch.randint(0, vocab, (ROWS, LENGTH + 1), generator=generator)
        ids, targets = (part[own].reshape(shape) for part in (tokens[:, :-1], tokens[:, 1:]))
        number = ROWS * LENGTH
        batch = Batch(ids, targets, positions, lengths, number, number, number, ROWS, (), None, 0, 0, START)
        dist.barrier()
        began = time.perf_counter()
        loss = train_step(model, optimizer, batch, 1e-4, 1.0, []).loss
        if step >= WARM_UP:
            seconds.append(time.perf_counter() - began)
    meter.close()
    assert loss is not None
    return RankResult(seconds, meter.peak_bytes(), loss)


def make_job(folder: Path, devices: int) -> Job:
    """The job of a model in a folder on processes of this machine, measured where it has not been."""
    from shardwise.front.describing import model_of

    model = model_of(folder, os.environ)
    cluster = measured_cluster(devices, os.environ)
    work = on_cluster(work_of(LENGTH, "fp32", TrainConfig()), cluster)
    return Job(model, folder_costs(folder, model, os.environ), cluster, devices, ROWS, work, all_devices=True)


def measure_plans(job: Job, folder: Path, name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each plan, the one that the search takes among them: measured now, or found in the file of rows."""
    from shardwise.testing import run_distributed

    path = Path(options.rows)
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(row["model"], json.dumps(row["fields"], sort_keys=True)): row for row in known}
    rows = []
    plans = legal_plans(job)[: options.most]
    chosen = search(job, top=1, only_runnable=True).plans[0]
    if all(plan.candidate != chosen.candidate for plan in plans):  # such as one with more stages of a rank
        plans.append(chosen)
    for number, plan in enumerate(plans, 1):
        strategy = plan.candidate.strategy()
        terms = [sum(stage.values()) for stage in plan.estimate.memory_terms]
        predicted = {"predicted_seconds": plan.step_seconds, "predicted_bytes": terms}
        row = done.get((name, json.dumps(strategy.to_json(), sort_keys=True)))
        if row is None:
            setting = Setting(str(folder), strategy.to_json(), options.repeats)
            ranks = run_distributed(measure_rank, job.devices, setting, timeout=300.0)
            steps = [max(values) for values in zip(*(rank.seconds for rank in ranks), strict=True)]
            measured = {"seconds": steps, "bytes": [rank.peak_bytes for rank in ranks], "loss": ranks[0].loss}
            row = {"model": name, "fields": strategy.to_json(), **measured}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name} {number}/{len(plans)}: {_named(plan)}: {_median(row):.3g} s", file=sys.stderr, flush=True)
        rows.append(row | predicted | {"name": _named(plan), "pp": plan.candidate.pp})
    return rows


def _named(plan: Planned) -> str:
    from shardwise.planner.explain import describe

    one = plan.candidate
    stages = f", stages {'-'.join(map(str, one.stages))}" if one.pp > 1 else ""
    mixed = f", dp_shard {one.dp_shard}" if one.dp_shard > 1 else ""
    return f"{describe(one)}{mixed}{stages}"


def _median(row: dict[str, Any]) -> float:
    return statistics.median(row["seconds"])


def _quartile(row: dict[str, Any], number: int) -> float:
    """The lower (0) or the upper (2) quartile of a plan's steps: one slow step decides nothing."""
    return statistics.quantiles(row["seconds"], n=4)[number] if len(row["seconds"]) > 1 else row["seconds"][0]


def table_line(row: dict[str, Any]) -> list[str]:
    """A measured plan in the columns of ``tests/planner/measured_plans.csv``: medians, and bytes by stage in MiB."""
    fields = row["fields"]
    columns = [str(fields[name]) for name in COLUMNS]
    stages, memory = fields["stages"], stage_bytes(row | {"pp": fields["pp"]})
    sizes = [f"{size / 2**20:.0f}" for size in memory]
    quartiles = [f"{seconds:.3f}" for seconds in (_median(row), _quartile(row, 0), _quartile(row, 2))]
    return [row["model"], *columns, "-".join(map(str, stages)), *quartiles, "-".join(sizes)]


def stage_bytes(row: dict[str, Any]) -> list[int]:
    """The fullest rank of each pipeline rank; pipeline ranks are the outermost axis."""
    ranks, pp = row["bytes"], row["pp"]
    share = len(ranks) // pp
    return [max(ranks[stage * share : (stage + 1) * share]) for stage in range(pp)]


def verdict(rows: Sequence[dict[str, Any]], chosen: dict[str, Any]) -> dict[str, Any]:
    """How much slower the chosen plan is than the best, and how far predicted memory is off on each pipeline rank."""
    best = min(rows, key=_median)
    errors = [
        predicted / measured - 1
        for row in rows
        for predicted, measured in zip(row["predicted_bytes"], stage_bytes(row), strict=True)
    ]
    time_errors = [row["predicted_seconds"] / _median(row) - 1 for row in rows]
    return {
        "plans": len(rows),
        "best": best["name"],
        "best_seconds": _median(best),
        "chosen": chosen["name"],
        "chosen_seconds": _median(chosen),
        "loss": _median(chosen) / _median(best) - 1,
        "overlaps": _quartile(chosen, 0) <= _quartile(best, 2),
        "memory_least": min(errors),
        "memory_most": max(errors),
        "time_median": statistics.median(time_errors),
        "time_mean_absolute": statistics.fmean(map(abs, time_errors)),
    }


def good(found: dict[str, Any]) -> bool:
    """Whether the limits are kept."""
    near = found["loss"] <= TIME_LIMIT or found["overlaps"]
    return bool(near and found["memory_least"] >= -MEMORY_UNDER and found["memory_most"] <= MEMORY_OVER)


def show(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> None:
    """A line a plan, the measured best first, and the verdict."""
    print(f"{'measured':>9} {'predicted':>9}  {'memory MiB: measured/predicted by stage':44} plan")
    for row in sorted(rows, key=_median):
        memory = ", ".join(
            f"{measured / 2**20:.0f}/{predicted / 2**20:.0f}"
            for predicted, measured in zip(row["predicted_bytes"], stage_bytes(row), strict=True)
        )
        print(f"{_median(row):8.3f}s {row['predicted_seconds']:8.3f}s  {memory:44} {row['name']}")
    print(
        f"chosen: {found['chosen']}: {found['chosen_seconds']:.3g} s, {found['loss']:.1%} above the best"
        f"{' (overlaps it)' if found['overlaps'] else ''}; predicted memory {found['memory_least']:+.1%} to "
        f"{found['memory_most']:+.1%}; predicted time median {found['time_median']:+.1%}, mean "
        f"{found['time_mean_absolute']:.1%} off"
    )


def choose(job: Job, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of the plan that the search takes.

    Raises:
        LookupError: it is none of those that were measured.
    """
    first = search(job, top=1, only_runnable=True).plans[0]
    wanted = first.candidate.strategy().to_json()
    found = next((row for row in rows if row["fields"] == wanted), None)
    if found is None:
        raise LookupError(f"the search takes {first.candidate}, which was not measured")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark; exit status 1 where a limit is passed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.measured_plans", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--models", default=",".join(MODELS), help="which of them")
    parser.add_argument("--devices", type=int, default=4, help="processes")
    parser.add_argument("--repeats", type=int, default=5, help="steps that count")
    parser.add_argument("--most", type=int, default=None, help="plans of a model, the best predicted first")
    parser.add_argument("--rows", default="plans.jsonl", help="where measured plans are kept")
    options = parser.parse_args(arguments)
    threads = max(1, num_cores() // options.devices)
    os.environ.update({k: v for k, v in quiet_environment(threads).items() if k not in os.environ})
    verdicts = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="shardwise-plans-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]), encoding="utf-8")
            job = make_job(Path(folder), options.devices)
            rows = measure_plans(job, Path(folder), name, options)
            verdicts.append(verdict(rows, choose(job, rows)))
            print(f"\n{name}: {job.costs.num_parameters / 1e6:.0f} million weights, {ROWS} rows of {LENGTH} tokens")
            show(rows, verdicts[-1])
    sys.exit(not all(map(good, verdicts)))


if __name__ == "__main__":
    main()
