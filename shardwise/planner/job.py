"""What is planned, and one answer: a job, a candidate, a plan with its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.planner.adapters import adapter_parameters
from shardwise.planner.cost import Estimate
from shardwise.planner.layout import Layout, Work
from shardwise.spec.block import ModelCosts, RecomputeLevel
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.flops import step_flops
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy

# Of a device's memory, what plans may count on: the rest is for what no formula sees.
USABLE_MEMORY = 0.95


@dataclass(frozen=True)
class Job:
    """A model on a cluster with the rows of an optimizer step; ``fixed`` are fields of a strategy that are given.

    Args:
        devices: at most so many are used.
        rows: of an optimizer step (G).
        memory_bytes: of a device; 0: what the profile says.
        halves: backward passes can run in two halves (not those of compiled blocks).
        all_devices: no fewer than ``devices`` are used.
        sequence_from: where the number of tokens of a row is from; empty: it was given.
    """

    model: ModelSpec
    costs: ModelCosts
    cluster: ClusterSpec
    devices: int
    rows: int
    work: Work
    fixed: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: float = 0.0
    halves: bool = True
    all_devices: bool = False
    sequence_from: str = ""

    @property
    def limit_bytes(self) -> float:
        """What a device may be filled with."""
        return (self.memory_bytes or self.cluster.chip.memory_bytes) * USABLE_MEMORY

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.rows * self.work.sequence

    @cached_property
    def by_table(self) -> Mapping[float | None, Job]:
        """The job under each choice of sharding tables, by ``tp_whole``; the first tables under the given one, or None.

        Where it is given, costs are those of the tables that it leads to, and there are no others.
        """
        given = self.fixed.get("tp_whole")
        found: dict[float | None, Job] = {given: self._under(None) if self.costs.tables else self}
        for one in self.costs.tables if given is None else ():
            found[one.whole] = self._under(one.whole)
        return found

    def of(self, candidate: Candidate) -> Job:
        """The job under the candidate's tables, as all that judges one candidate needs it."""
        return self.by_table.get(candidate.tp_whole, self)

    def _under(self, whole: float | None) -> Job:
        return replace(self, costs=self.costs.under(whole))


@dataclass(frozen=True)
class Candidate:
    """One split: the fields of a strategy, and those that the runtime has no axis for yet.

    Args:
        level: what is computed again; ``recomputed`` first blocks of each stage (-1: all of them).
        tp_whole: the tables of the tensor axis, as :attr:`Job.by_table` has them.
    """

    tp: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    reshard: bool = False
    sequence_parallel: bool = False
    micro_batch_size: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    level: RecomputeLevel = "none"
    recomputed: int = -1
    stages: tuple[int, ...] = ()
    tp_whole: float | None = None

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def devices(self) -> int:
        return self.pp * self.tp * self.cp * self.dp

    @property
    def zero(self) -> int:
        """What the data ranks share out: without ``reshard`` weights stay whole."""
        if self.dp_shard == 1:
            return 0
        return 3 if self.reshard else 1

    def num_micro_batches(self, rows: int) -> int:
        return rows // (self.dp * self.micro_batch_size)

    def layout(self, rows: int) -> Layout:
        """The same for the formulas."""
        again = () if self.recomputed < 0 else tuple(min(self.recomputed, size) for size in self.stages)
        return Layout(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            cp=self.cp,
            ep=self.ep,
            shard=self.dp_shard * self.cp if self.zero else 1,
            zero=self.zero,
            micro_batch=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches(rows),
            sequence_parallel=self.sequence_parallel,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            stages=self.stages,
            recompute=self.level,
            recomputed=again,
        )

    def strategy(self) -> Strategy:
        """What the runtime takes; for candidates with an axis that it has not, see :meth:`fields`."""
        return Strategy(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=self.dp_shard,
            tp=self.tp,
            reshard=self.reshard,
            schedule=self.schedule,  # type: ignore[arg-type]
            virtual_stages=self.virtual_stages,
            micro_batch_size=self.micro_batch_size,
            recompute=0 if self.level == "none" else self.recomputed,
            stages=self.stages,
            sequence_parallel=self.sequence_parallel,
            tp_whole=self.tp_whole,
        )

    def fields(self) -> dict[str, Any]:
        """As run.yaml spells it under ``strategy``."""
        values = asdict(self)
        level, number = values.pop("level"), values.pop("recomputed")
        values["stages"] = list(self.stages)
        if self.schedule != "interleaved":
            values.pop("virtual_stages")
        if self.tp_whole is None:
            values.pop("tp_whole")
        return values | {"recompute": number if level == "full" and number >= 0 else level}

    def __str__(self) -> str:
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
        degrees = [f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis) > 1]
        return " x ".join(degrees) or "one device"


@dataclass(frozen=True)
class Planned:
    """A candidate that fits, with what it costs; ``not_runnable`` says which part the runtime has not yet."""

    candidate: Candidate
    estimate: Estimate
    not_runnable: str = ""

    @property
    def step_seconds(self) -> float:
        return self.estimate.step_seconds

    def tokens_per_second_per_device(self, job: Job) -> float:
        return job.tokens / self.step_seconds / self.candidate.devices

    def mfu(self, job: Job) -> float:
        """Model FLOPs over what the devices' peak could do in a step (PaLM, arXiv:2204.02311, appendix B)."""
        sequence = job.work.sequence
        flops = step_flops(job.model, [sequence], adapter_parameters(job.costs)) / sequence
        return flops * self.tokens_per_second_per_device(job) / job.cluster.peak(job.work.precision)

    @property
    def exposed_seconds(self) -> float:
        """Seconds of a step in which a rank waits for traffic."""
        return sum(self.estimate.time_terms.get(name, 0.0) for name in ("tensor", "context", "expert", "data"))


@dataclass(frozen=True)
class Rejection:
    """Candidates that one rule rejected: how many, and one of them."""

    rule: str
    detail: str
    number: int
    example: Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """The answer of a search.

    Args:
        considered: candidates that were looked at, ``refined`` of them stage by stage.
        bound_seconds: no legal candidate that was not refined can be faster than this.
        points: bytes and seconds of candidates that fit, by the quick formulas.
    """

    plans: tuple[Planned, ...]
    rejected: tuple[Rejection, ...]
    considered: int
    refined: int
    bound_seconds: float
    points: tuple[tuple[float, float], ...] = ()


def without(job: Job, *names: str) -> Job:
    """The same job with some fields free."""
    return replace(job, fixed={name: value for name, value in job.fixed.items() if name not in names})
