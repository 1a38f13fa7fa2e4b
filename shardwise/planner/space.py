"""All ways to split a job, as arrays of candidates, and the rules that leave some out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.planner.layout import Layout, Work
from shardwise.spec.block import ModelCosts, RecomputeLevel
from shardwise.spec.cluster import ClusterSpec

Array = np.ndarray
_SHORTEST_SHARE = 1024  # tokens of a row that a context rank has at least
_ZERO_LEVELS = (0, 2, 3)  # dp_replicate; dp_shard without and with resharding
_LEVELS: tuple[RecomputeLevel, ...] = ("none", "selective", "full")
_MOST_VIRTUAL = 8
_MOST_TOKENS = 2**16  # of a micro-batch on a rank: products are as fast as they get long before


@dataclass(frozen=True)
class Job:
    """What is to run.

    Args:
        global_batch_size: rows of an optimizer step.
        memory_bytes: of a device, that a plan may use.
        fixed: fields that are given, by name: ``tp pp dp cp ep zero micro_batch virtual_stages recompute
            sequence_parallel``.
    """

    costs: ModelCosts
    cluster: ClusterSpec
    devices: int
    global_batch_size: int
    work: Work
    memory_bytes: float
    fixed: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Candidates that share what no formula takes as an array; the arrays are of one length."""

    tp: int
    zero: int
    level: RecomputeLevel
    sequence_parallel: bool
    pp: Array
    virtual: Array
    dp: Array
    cp: Array
    ep: Array
    micro_batch: Array
    num_micro_batches: Array

    def __len__(self) -> int:
        return len(self.pp)

    @cached_property
    def kinds(self) -> tuple[Array, Array]:
        """What a pass through a part depends on is the same for many candidates: one of each kind, and each one's."""
        key = (self.micro_batch * 2**12 + self.cp) * 2**12 + self.ep
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        return first, kind

    def kinds_layout(self) -> Layout:
        """One candidate of each kind, as a layout of arrays."""
        first, _ = self.kinds
        whole = self.layout()
        arrays = {name: getattr(self, name)[first] for name in ("dp", "cp", "ep", "micro_batch", "num_micro_batches")}
        return replace(whole, **arrays, shard=arrays["dp"] * arrays["cp"])

    def layout(self) -> Layout:
        """All candidates as one layout of arrays; what depends on stages is not in it."""
        return Layout(
            tp=self.tp,
            dp=self.dp,
            cp=self.cp,
            ep=self.ep,
            shard=self.dp * self.cp,
            zero=self.zero,
            micro_batch=self.micro_batch,
            num_micro_batches=self.num_micro_batches,
            sequence_parallel=self.sequence_parallel,
            recompute=self.level,
        )


@dataclass(frozen=True)
class Rejected:
    """Candidates that a rule leaves out: how many, and what they have in common."""

    strategy: str
    rule: str
    detail: str
    number: int = 1


def tensor_degrees(job: Job) -> tuple[list[int], list[Rejected]]:
    """Legal tensor degrees, and those that are not, each with its rule."""
    parts = (*job.costs.kinds, job.costs.embedding, job.costs.head)
    looked_at = sorted({split.degree for split in parts[0].degrees if job.devices % split.degree == 0})
    legal, rejected = [], []
    for tp in looked_at:
        if tp != job.fixed.get("tp", tp):
            continue
        rules = [part.degree(tp).rule for part in parts if part.degree(tp).rule]
        if rules:
            rejected.append(Rejected(f"tp {tp}", rules[0], "tensor parallel"))
        else:
            legal.append(tp)
    return legal, rejected


def groups(job: Job, degrees: list[int]) -> Iterator[Group]:
    """Every legal candidate of a job once, in groups."""
    for tp in degrees:
        arrays = _degrees(job, tp)
        if not len(arrays[0]):
            continue
        choices = product(_ZERO_LEVELS, _LEVELS, (False, True) if tp > 1 else (False,))
        for zero, level, sequence_parallel in choices:
            chosen = {"zero": zero, "recompute": level, "sequence_parallel": sequence_parallel}
            if any(job.fixed.get(name, value) != value for name, value in chosen.items()):
                continue
            if sequence_parallel and not _runs_on_sequences(job.costs, tp):
                continue
            kept = arrays if zero == 0 else tuple(array[arrays[2] * arrays[3] > 1] for array in arrays)
            if len(kept[0]):
                yield Group(tp, zero, level, sequence_parallel, *kept)


def _runs_on_sequences(costs: ModelCosts, tp: int) -> bool:
    parts = (*costs.kinds, costs.embedding, costs.head)
    return all(part.degree(tp).sequence is not None for part in parts)


def _degrees(job: Job, tp: int) -> tuple[Array, ...]:
    """pp, virtual stages, dp, cp, ep, rows of a micro-batch, and their number."""
    found = []
    for pp in _divisors(job.devices // tp, min(job.devices // tp, job.costs.num_blocks), job.fixed.get("pp")):
        for cp in _contexts(job, tp * pp):
            dp = job.devices // (tp * pp * cp)
            if job.global_batch_size % dp or dp != job.fixed.get("dp", dp):
                continue
            rows = job.global_batch_size // dp
            most = max(1, min(rows // pp, _MOST_TOKENS * cp // job.work.sequence))
            for m, ep, virtual in product(
                _divisors(rows, most, job.fixed.get("micro_batch")) if rows >= pp else (),
                _experts(job, dp * cp),
                _virtual(job, pp),
            ):
                found.append((pp, virtual, dp, cp, ep, m, rows // m))
    table = np.array(found, dtype=float).reshape(len(found), 7)
    return tuple(table[:, column] for column in range(7))


def _divisors(number: int, most: int, fixed: int | None) -> list[int]:
    every = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    every = sorted({*every, *(number // d for d in every)})
    return [d for d in every if d <= most and d == (fixed or d)]


def _contexts(job: Job, others: int) -> list[int]:
    most = max(1, job.work.sequence // _SHORTEST_SHARE)
    degrees = [2**i for i in range(12) if 2**i <= most]
    return [cp for cp in degrees if job.devices % (others * cp) == 0 and cp == job.fixed.get("cp", cp)]


def _experts(job: Job, ranks: int) -> list[int]:
    if not job.costs.num_experts:
        return [1]
    return [ep for ep in _divisors(job.costs.num_experts, ranks, job.fixed.get("ep")) if ranks % ep == 0]


def _virtual(job: Job, pp: int) -> list[int]:
    most = min(_MOST_VIRTUAL, job.costs.num_blocks // pp) if pp > 1 else 1
    degrees = [v for v in (1, 2, 3, 4, 6, 8) if v <= most]
    return [v for v in degrees if v == job.fixed.get("virtual_stages", v)]
