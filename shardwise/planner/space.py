"""The candidates of a job: every legal combination of degrees, as columns of numbers, and the rules that reject some.

Rules are those of the runtime: degrees of :func:`shardwise.spec.strategy.legal_tensor_degrees` and of the model's
own tables, the batch rule G = dp x micro-batch size x micro-batches, at least as many micro-batches as stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, isqrt, prod
from typing import Any

import numpy as np

from shardwise.errors import PlanError
from shardwise.planner.halves import waiting_products
from shardwise.planner.job import Job, Rejection
from shardwise.spec.block import RECOMPUTE_LEVELS
from shardwise.spec.strategy import default_stages, legal_tensor_degrees

MOST_ROWS = 64  # of a micro-batch
MOST_VIRTUAL = 8  # stages of a pipeline rank
MOST_CONTEXT = 64
LEAST_CONTEXT_TOKENS = 512  # of a row on a rank, below which cutting it further is not looked at
Columns = dict[str, np.ndarray]
# Columns by their names in run.yaml.
_SPELLED = {"pp": "pp", "dp": "dp", "cp": "cp", "tp": "tp", "ep": "ep", "m": "micro_batch_size", "v": "virtual_stages"}


@dataclass
class Space:
    """Columns of candidates, and counts of what rules left out."""

    columns: Columns
    rejected: dict[tuple[str, str], Rejection] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def cross(self, name: str, values: Sequence[int]) -> None:
        """Every row with each of ``values``."""
        rows = len(self)
        self.columns = {key: np.repeat(column, len(values)) for key, column in self.columns.items()}
        self.columns[name] = np.tile(np.asarray(values, dtype=np.int64), rows)

    def keep(self, mask: np.ndarray, rule: str, detail: str = "") -> None:
        """Leave out the rows where ``mask`` is false, by a rule."""
        out = ~mask
        number = int(out.sum())
        if number:
            first = int(np.argmax(out))
            row = {name: int(self.columns[name][first]) for name in _SPELLED if name in self.columns}
            self.reject(rule, detail, number, {_SPELLED[name]: value for name, value in row.items()})
            self.columns = {name: column[mask] for name, column in self.columns.items()}

    def reject(self, rule: str, detail: str, number: int, example: dict[str, Any]) -> None:
        """Count candidates that a rule left out."""
        known = self.rejected.get((rule, detail))
        total = number + (known.number if known else 0)
        self.rejected[rule, detail] = Rejection(rule, detail, total, known.example if known else example)


def enumerate_space(job: Job, least_devices: int, most_devices: int) -> Space:
    """Columns ``tp cp pp dp m ep`` of all candidates on more than ``least_devices``, at most ``most_devices`` devices.

    Raises:
        PlanError: a given field that no candidate can have.
    """
    _check_given(job)
    tensor, refused = _tensor_degrees(job)
    space = Space({"tp": np.asarray(tensor, dtype=np.int64)})
    first = most_devices == job.devices  # rules that hold for any number of devices are counted once
    for degree, rule in refused.items() if first else ():
        space.reject("tensor degree", rule, 1, {"tp": degree})
    num_blocks = job.costs.num_blocks
    space.cross("cp", context_degrees(job))
    space.cross("pp", _given(job, "pp", range(1, min(num_blocks, most_devices) + 1)))
    space.keep(space.columns["pp"] <= num_blocks, "pipeline stages", f"the model has {num_blocks} blocks")
    c = space.columns
    _silently(space, c["tp"] * c["cp"] * c["pp"] <= most_devices)
    space.cross("dp", _data_degrees(job))
    c = space.columns
    devices = c["tp"] * c["cp"] * c["pp"] * c["dp"]
    if first:
        space.keep(devices <= job.devices, "devices", f"more than {job.devices}")
    c = space.columns
    devices = c["tp"] * c["cp"] * c["pp"] * c["dp"]
    _silently(space, (devices > least_devices) & (devices <= most_devices))
    space.cross("m", _given(job, "micro_batch_size", [m for m in divisors(job.rows) if m <= MOST_ROWS]))
    c = space.columns
    unit = c["dp"] * c["m"]
    space.keep(job.rows % unit == 0, "batch", f"dp x micro_batch_size does not divide the {job.rows} rows of a step")
    c = space.columns
    enough = (job.rows // (c["dp"] * c["m"]) >= c["pp"]) | (c["pp"] == 1)
    space.keep(enough, "batch", "fewer micro-batches than pipeline stages")
    space.cross("ep", _expert_degrees(job))
    c = space.columns
    space.keep(c["dp"] * c["cp"] % c["ep"] == 0, "expert degree", "does not divide dp x cp")
    return space


def with_schedules(job: Job, columns: Columns) -> Space:
    """The rows with every schedule: ``v`` stages of a pipeline rank; ``halves`` 1: backward passes in two halves."""
    space = Space(columns)
    num_blocks = job.costs.num_blocks
    space.cross("v", _virtual_stages(job))
    c = space.columns
    _silently(space, (c["v"] == 1) | (c["pp"] > 1))
    space.cross("halves", _halves(job))
    c = space.columns
    _silently(space, (c["halves"] == 0) | ((c["pp"] > 1) & (c["v"] == 1)))
    c = space.columns
    space.keep(c["pp"] * c["v"] <= num_blocks, "pipeline stages", f"the model has {num_blocks} blocks")
    if job.fixed.get("stages"):
        c = space.columns
        space.keep(c["pp"] * c["v"] == len(job.fixed["stages"]), "pipeline stages", "not as many as strategy.stages")
    return space


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def sequence_choices(job: Job) -> list[bool]:
    """Without and with sequence parallelism, or as given."""
    return [bool(job.fixed["sequence_parallel"])] if "sequence_parallel" in job.fixed else [False, True]


def levels(job: Job) -> list[str]:
    """Recompute levels; a number of blocks counts as full."""
    given = job.fixed.get("recompute")
    if given is None:
        return list(RECOMPUTE_LEVELS)
    if isinstance(given, int):
        return ["none"] if given == 0 else ["full"]
    return [given]


def shard_degrees(job: Job, dp: int, ranks_inside: int) -> list[tuple[int, bool]]:
    """(dp_shard, reshard) of a data degree: nothing shared out, all of it, or as much as a node holds.

    Where there are few data ranks every divisor is looked at.
    """
    sizes = [size for size in divisors(dp) if size > 1]
    if dp > MOST_ROWS:
        inside = [size for size in sizes if size * ranks_inside <= job.cluster.devices_per_node]
        sizes = sorted({*inside[-1:], sizes[-1]})
    given, replicate = job.fixed.get("dp_shard"), job.fixed.get("dp_replicate")
    if given is not None:
        sizes = [given] if given > 1 else []
    if replicate is not None:
        sizes = [dp // replicate] if dp % replicate == 0 and dp > replicate else []
    whole = given in (None, 1) and replicate in (None, dp)
    reshards = [job.fixed["reshard"]] if job.fixed.get("reshard") is not None else [False, True]
    choices = [(size, reshard) for size in sizes for reshard in reshards if dp % size == 0]
    return [(1, False)] * whole + choices


def _silently(space: Space, mask: np.ndarray) -> None:
    """Leave out what another pass looks at, or what is another spelling of the same."""
    space.columns = {name: column[mask] for name, column in space.columns.items()}


def _given(job: Job, name: str, otherwise: Iterable[int]) -> list[int]:
    value = job.fixed.get(name)
    return list(otherwise) if value is None else [int(value)]


def _check_given(job: Job) -> None:
    """Refuse given fields that contradict the model or each other.

    Raises:
        PlanError: with the rule, and what would do.
    """
    stages, num_blocks = job.fixed.get("stages"), job.costs.num_blocks
    if stages and sum(stages) != num_blocks:
        shown = list(default_stages(num_blocks, min(len(stages), num_blocks)))
        rule = f"sums to {sum(stages)}, and the model has {num_blocks} blocks"
        raise PlanError(f"strategy.stages = {list(stages)}", rule, f"For example {shown}")
    if job.fixed.get("sequence_parallel") and job.fixed.get("tp") == 1:
        rule = "cuts the sequence over the tensor ranks, and strategy.tp is 1"
        raise PlanError("strategy.sequence_parallel = true", rule, "Leave one of them out")
    if job.fixed.get("schedule") == "zero_bubble" and job.fixed.get("pp") == 1:
        rule = "puts off gradients of weights to where a pipeline would wait, and strategy.pp is 1"
        raise PlanError("strategy.schedule = zero_bubble", rule, "Leave one of them out")
    if job.fixed.get("pp") is not None and job.fixed["pp"] > num_blocks:
        rule = f"the model has {num_blocks} blocks, and each stage needs one"
        raise PlanError(f"strategy.pp = {job.fixed['pp']}", rule, f"legal degrees: 1 to {num_blocks}")
    again = job.fixed.get("recompute")
    if isinstance(again, int):
        number = (job.fixed.get("pp") or 1) * (job.fixed.get("virtual_stages") or 1)
        most = max(stages or default_stages(num_blocks, min(number, num_blocks)))
        if again > most:
            rule = f"the largest stage has {most} blocks" if number > 1 or stages else f"the model has {most} blocks"
            raise PlanError(f"strategy.recompute = {again}", rule, f"Use full, or at most {most}")
    _check_devices(job)


def _check_devices(job: Job) -> None:
    """Refuse given degrees whose product is above the devices."""
    data = ("dp",) if job.fixed.get("dp") else ("dp_replicate", "dp_shard")
    given = {axis: job.fixed[axis] for axis in ("pp", *data, "cp", "tp") if job.fixed.get(axis)}
    product = prod(given.values())
    if product > job.devices:
        value = ", ".join(f"strategy.{axis} = {degree}" for axis, degree in given.items() if degree > 1)
        rule = f"takes {product} devices, and {job.devices} are given"
        raise PlanError(value, rule, f"Use devices={product}, or smaller degrees")


def _tensor_degrees(job: Job) -> tuple[list[int], dict[int, str]]:
    """Legal degrees up to the number of devices, and the rules of those that are not."""
    looked_at = {split.degree for split in job.costs.embedding.degrees}
    legal = sorted(set(legal_tensor_degrees(job.model)) & set(job.costs.legal_degrees()))
    given = job.fixed.get("tp")
    if given is not None and given not in legal:
        raise PlanError(f"tp = {given}", tensor_rule(job, given), f"legal degrees: {', '.join(map(str, legal))}")
    refused = {
        degree: tensor_rule(job, degree)
        for degree in sorted(looked_at | set(divisors(job.devices)))
        if degree not in legal and degree <= job.devices
    }
    return [degree for degree in legal if degree <= job.devices] if given is None else [given], refused


def tensor_rule(job: Job, degree: int) -> str:
    """Why a tensor degree is not legal for the job's model."""
    for part in (*job.costs.kinds, job.costs.embedding, job.costs.head):
        for split in part.degrees:
            if split.degree == degree and split.rule:
                return split.rule
    heads, kv_heads = job.model.num_heads, job.model.num_kv_heads
    if heads % degree:
        return f"does not divide the {heads} attention heads"
    if kv_heads % degree and degree % kv_heads:
        return f"neither divides the {kv_heads} KV heads nor is a multiple of them"
    return f"leaves a rank without a part of the vocabulary {job.model.vocab_size}, or is not described"


def context_degrees(job: Job) -> list[int]:
    """Legal degrees that leave a rank enough of a row, or the given one.

    Raises:
        PlanError: the given one does not cut a row evenly.
    """
    sequence = job.work.sequence
    given = job.fixed.get("cp")
    if given is not None:
        if sequence % (2 * given if given > 1 else 1):
            near = max(n for n in divisors(gcd(sequence, 2**20)) if (n <= given and sequence % (2 * n) == 0) or n == 1)
            raise PlanError(f"cp = {given}", f"2 x cp does not divide the {sequence} tokens of a row", f"Use cp={near}")
        return [given]
    powers = [2**k for k in range(1, MOST_CONTEXT.bit_length())]
    return [1] + [n for n in powers if sequence % (2 * n) == 0 and sequence // n >= LEAST_CONTEXT_TOKENS]


def _data_degrees(job: Job) -> list[int]:
    fixed = job.fixed
    if fixed.get("dp") is not None:
        return [fixed["dp"]]
    shard, replicate = fixed.get("dp_shard"), fixed.get("dp_replicate")
    if shard is not None and replicate is not None:
        return [shard * replicate]
    part = shard or replicate or 1
    fitting = [dp for dp in divisors(job.rows) if dp % part == 0]
    if not fitting:
        rule = f"does not divide the {job.rows} rows of a step"
        name = "dp_shard" if shard else "dp_replicate"
        raise PlanError(f"{name} = {part}", rule, f"Use one of {', '.join(map(str, divisors(job.rows)[:12]))}")
    return fitting


def _expert_degrees(job: Job) -> list[int]:
    experts, given = job.costs.num_experts, job.fixed.get("ep")
    if given is None:
        return divisors(experts) if experts else [1]
    if given > 1 and (not experts or experts % given):
        rule = f"does not divide the {experts} experts of a block" if experts else "the model has no experts"
        raise PlanError(
            f"ep = {given}", rule, f"Use one of {', '.join(map(str, divisors(experts)))}" if experts else ""
        )
    return [given]


def _virtual_stages(job: Job) -> list[int]:
    schedule, given = job.fixed.get("schedule"), job.fixed.get("virtual_stages")
    if given is not None:
        return [given]
    if schedule == "interleaved":
        return list(range(2, MOST_VIRTUAL + 1))
    return [1] if schedule is not None else list(range(1, MOST_VIRTUAL + 1))


def _halves(job: Job) -> list[int]:
    schedule = job.fixed.get("schedule")
    if schedule is not None:
        return [int(schedule == "zero_bubble")]
    can = job.halves and any(waiting_products(kind) for kind in job.costs.kinds)
    return [0, 1] if can else [0]
