"""Why a plan was chosen, what would change the choice, where it lies on the machines: from the terms of estimates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from shardwise.errors import PlanError
from shardwise.planner.job import Candidate, Found, Job, Planned, without
from shardwise.planner.search import search
from shardwise.planner.space import context_degrees, divisors
from shardwise.planner.tables import UnderTable, name_of, under_other_tables
from shardwise.spec.strategy import legal_tensor_degrees
from shardwise.units import format_bytes

MEMORY_OF = "this runtime: what the model's own modules keep, operator by operator"
_SMALL = 0.002  # of a step: differences below are not told


def answer(job: Job, found: Found) -> dict[str, Any]:
    """What `shardwise plan --json` gives."""
    others = under_other_tables(job, found.plans[0])
    return {
        "schema": 1,
        "model": job.costs.name,
        "cluster": job.cluster.name,
        "devices": job.devices,
        "global_batch_size": job.rows,
        "sequence_length": job.work.sequence,
        "sequence_length_from": job.sequence_from,
        "precision": job.work.precision,
        "memory_limit_bytes": job.limit_bytes,
        "memory_of": MEMORY_OF,
        "considered": found.considered,
        "refined": found.refined,
        "bound_seconds": found.bound_seconds,
        "plans": [_plan(job, plan, rank) for rank, plan in enumerate(found.plans, 1)],
        "rejected": [
            {"strategy": dict(one.example), "rule": one.rule, "detail": one.detail, "number": one.number}
            for one in found.rejected
        ],
        "why": why(job, found, others),
        "tables": _tables(found.plans[0], others),
        "batch": batch_equation(job, found.plans[0].candidate),
        "placement": placement(job, found.plans[0].candidate),
        "legal_degrees": legal_degrees(job),
    }


def _plan(job: Job, plan: Planned, rank: int) -> dict[str, Any]:
    made = plan.estimate
    return {
        "rank": rank,
        "strategy": plan.candidate.fields(),
        "devices": plan.candidate.devices,
        "num_micro_batches": plan.candidate.num_micro_batches(job.rows),
        "stages": list(plan.candidate.stages),
        "step_seconds": plan.step_seconds,
        "tokens_per_second_per_device": plan.tokens_per_second_per_device(job),
        "mfu": plan.mfu(job),
        "time_terms": made.time_terms,
        "memory_by_stage": [{"total_bytes": sum(terms.values()), "terms": terms} for terms in made.memory_terms],
        "bubble": made.bubble,
        "exposed_comm_seconds": plan.exposed_seconds,
        "runnable": not plan.not_runnable,
        "not_runnable": plan.not_runnable,
    }


def _tables(first: Planned, others: Sequence[UnderTable]) -> list[dict[str, Any]]:
    """The first plan under each choice of tables that its model offers at its degree, the chosen one first."""
    if not others:
        return []
    sequence = first.candidate.sequence_parallel
    chosen = UnderTable(first.candidate.tp_whole, first, first.estimate.memory_bytes, sequence)
    return [
        {
            "tp_whole": one.tp_whole,
            "chosen": one is chosen,
            "sequence_parallel": one.sequence_parallel,
            "fits": one.plan is not None,
            "step_seconds": one.plan.step_seconds if one.plan else None,
            "memory_bytes": one.plan.estimate.memory_bytes if one.plan else one.need_bytes,
            "time_terms": one.plan.estimate.time_terms if one.plan else None,
        }
        for one in (chosen, *others)
    ]


def table_lines(first: Planned, others: Sequence[UnderTable]) -> list[str]:
    """Which tables the tensor axis of a plan takes, and what the others that its model offers would cost."""
    lines = []
    for other in others:
        words = f"under {name_of(other.tp_whole)}"
        given_up = first.candidate.sequence_parallel and not other.sequence_parallel
        words += ", without sequence parallel," if given_up else ""
        if other.plan is None:
            lines.append(f"{words} it does not fit: {format_bytes(other.need_bytes)} of a device")
        else:
            more = other.plan.estimate.memory_bytes - first.estimate.memory_bytes
            size = f"{format_bytes(abs(more))} {'more' if more > 0 else 'less'} of a device"
            lines.append(f"{words} it {loss(first, other.plan)}; {size}")
    return lines and [f"tp by {name_of(first.candidate.tp_whole)}; " + lines[0], *lines[1:]]


def why(job: Job, found: Found, others: Sequence[UnderTable] | None = None) -> list[str]:
    """Sentences: what the first plan spends its time on, and by what each other one loses.

    Args:
        others: the first plan under the other tables, where they have been judged.
    """
    first = found.plans[0]
    others = under_other_tables(job, first) if others is None else others
    terms = sorted(first.estimate.time_terms.items(), key=lambda term: -term[1])
    parts = ", ".join(f"{name} {value / first.step_seconds:.0%}" for name, value in terms[:4] if value)
    sentences = [f"{first.candidate}: of {first.step_seconds:.3g} s a step, {parts}"]
    sentences += [f"{_apart(first.candidate, other.candidate)} {loss(first, other)}" for other in found.plans[1:2]]
    sentences += table_lines(first, others)
    if first.candidate.devices < job.devices:
        left = job.devices - first.candidate.devices
        some = f"{left} of {job.devices} devices stay{'s' if left == 1 else ''} idle"
        sentences.append(f"{some}: no split that uses {'it' if left == 1 else 'them'} is faster")
    if first.not_runnable:
        other = next((plan for plan in found.plans if not plan.not_runnable), None)
        words = f"not runnable yet: {first.not_runnable}"
        if other is not None:
            slower = other.step_seconds / first.step_seconds - 1
            words += f"; the best plan that is, {_apart(first.candidate, other.candidate)}, takes {slower:.1%} longer"
        sentences.append(words)
    gap = 1 - found.bound_seconds / first.step_seconds
    if gap > _SMALL:
        sentences.append(
            f"no other legal split can take less than {found.bound_seconds:.3g} s, {gap:.0%} below the first"
        )
    return sentences


def _apart(first: Candidate, other: Candidate) -> str:
    """The other by its degrees, and by all else where these are the same."""
    return str(other) if str(other) != str(first) else describe(other)


def loss(first: Planned, other: Planned) -> str:
    """By what a plan is slower than the first, term by term."""
    names = sorted({*first.estimate.time_terms, *other.estimate.time_terms})
    moved = {
        name: other.estimate.time_terms.get(name, 0.0) - first.estimate.time_terms.get(name, 0.0) for name in names
    }
    told = sorted(
        (item for item in moved.items() if abs(item[1]) > _SMALL * first.step_seconds), key=lambda item: -abs(item[1])
    )
    slower = other.step_seconds - first.step_seconds
    parts = ", ".join(f"{name} {value:+.2g} s" for name, value in told[:4])
    return f"loses by {slower / first.step_seconds:.1%}" + (f": {parts}" if parts else "")


def what_would_change(job: Job, found: Found) -> list[str]:
    """Another memory, other links and another batch: whether another plan would win, and by how much it is faster."""
    links = tuple(replace(link, bandwidth=2 * link.bandwidth) for link in job.cluster.links)
    outer = (*job.cluster.links[:-1], links[-1])
    memory = job.memory_bytes or job.cluster.chip.memory_bytes
    changes: tuple[tuple[str, Callable[[], Job]], ...] = (
        ("a quarter less memory", lambda: replace(job, memory_bytes=0.75 * memory)),
        ("half as much memory again", lambda: replace(job, memory_bytes=1.5 * memory)),
        ("twice the bandwidth between nodes", lambda: replace(job, cluster=replace(job.cluster, links=outer))),
        ("twice the batch", lambda: replace(job, rows=2 * job.rows)),
    )
    return [f"with {words}: {_changed(make(), job, found.plans[0])}" for words, make in changes]


def _changed(other: Job, job: Job, first: Planned) -> str:
    try:
        best = search(other, top=1).plans[0]
    except PlanError as error:
        return f"nothing fits ({error.rule})"
    speed = other.tokens / best.step_seconds / (job.tokens / first.step_seconds) - 1
    same = best.candidate.fields() == first.candidate.fields()
    words = "the same plan" if same else f"{describe(best.candidate)}"
    return f"{words}, {speed:+.1%} tokens a second"


def describe(candidate: Candidate) -> str:
    """The degrees and what else tells two plans apart, in a line."""
    parts = [str(candidate), f"micro-batch {candidate.micro_batch_size}"]
    if candidate.pp > 1:
        chunks = f" x{candidate.virtual_stages}" if candidate.virtual_stages > 1 else ""
        parts.append(candidate.schedule + chunks)
    if candidate.tp_whole is not None:
        parts.append(f"tp_whole {candidate.tp_whole:g}")
    if candidate.sequence_parallel:
        parts.append("sequence parallel")
    if candidate.reshard:
        parts.append("reshard")
    if candidate.level != "none":
        several = candidate.recomputed
        number = "" if several < 0 else " of the first block" if several == 1 else f" of the first {several} blocks"
        parts.append(f"recompute {candidate.level}{number}")
    return ", ".join(parts)


def batch_equation(job: Job, candidate: Candidate) -> str:
    """``global batch 64 rows = 8 data ranks x 2 rows x 4 micro-batches``."""
    number = candidate.num_micro_batches(job.rows)
    factors = [
        (candidate.dp, "data rank", "s"),
        (candidate.micro_batch_size, "row", "s"),
        (number, "micro-batch", "es"),
    ]
    shown = " x ".join(f"{count} {noun}{'' if count == 1 else plural}" for count, noun, plural in factors)
    return f"global batch {job.rows} row{'' if job.rows == 1 else 's'} = {shown}"


def placement(job: Job, candidate: Candidate) -> list[str]:
    """For each axis above 1 the devices that form a group, and the links between them."""
    lines = []
    stride = 1
    for axis, size in (
        ("tp", candidate.tp),
        ("cp", candidate.cp),
        ("dp_shard", candidate.dp_shard),
        ("dp_replicate", candidate.dp_replicate),
        ("pp", candidate.pp),
    ):
        if size > 1:
            span = stride * size
            link = next(link for link in job.cluster.links if not link.devices or span <= link.devices)
            which = f"{size} neighbours" if stride == 1 else f"{size} devices, {stride} apart"
            lines.append(f"{axis} {size}: groups of {which}, over {link.name}")
        stride *= size
    nodes = -(-candidate.devices // job.cluster.devices_per_node)
    devices = f"{candidate.devices} device{'' if candidate.devices == 1 else 's'}"
    lines.append(f"{devices} on {nodes} node{'' if nodes == 1 else 's'}")
    return lines


def legal_degrees(job: Job) -> dict[str, list[int]]:
    """Degrees of each axis that the model and the batch allow, up to the number of devices."""
    tensor = sorted(set(legal_tensor_degrees(job.model)) & set(job.costs.legal_degrees()))
    experts = divisors(job.costs.num_experts) if job.costs.num_experts else [1]
    return {
        "tp": [degree for degree in tensor if degree <= job.devices],
        "pp": [degree for degree in range(1, job.costs.num_blocks + 1) if degree <= job.devices],
        "dp": [degree for degree in divisors(job.rows) if degree <= job.devices],
        "cp": [degree for degree in context_degrees(without(job, "cp")) if degree <= job.devices],
        "ep": [degree for degree in experts if degree <= job.devices],
    }


def memory_line(plan: Planned) -> str:
    """Bytes of each pipeline rank's fullest device, at most four of them."""
    sizes = [format_bytes(sum(terms.values())) for terms in plan.estimate.memory_terms]
    return ", ".join(sizes) if len(sizes) <= 4 else f"{sizes[0]}, {sizes[1]}, ..., {sizes[-1]}"
