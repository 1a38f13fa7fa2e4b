"""What `shardwise plan` prints: a ranked table, the reasons, and what was rejected by which rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwise.planner.explain import (
    MEMORY_OF,
    batch_equation,
    describe,
    legal_degrees,
    loss,
    memory_line,
    placement,
    why,
)
from shardwise.planner.job import Found, Job
from shardwise.report.console import show_line
from shardwise.units import format_bytes, format_count

_SHOWN_DEGREES = 12


def show_plans(job: Job, found: Found, console: Console) -> None:
    """Print the table of plans and why the first one won."""
    size = format_count(job.costs.num_parameters)
    show_line(console, "model", f"{job.costs.name}, {size} parameters, {job.costs.num_blocks} blocks")
    limit = format_bytes(job.limit_bytes)
    show_line(console, "cluster", f"{job.devices} x {job.cluster.name}, {limit} of each to fill")
    source = f" ({job.sequence_from})" if job.sequence_from else ""
    rows = f"{job.rows} row{'' if job.rows == 1 else 's'} of {job.work.sequence} tokens"
    show_line(console, "work", f"{rows}{source} a step, {job.work.precision}")
    show_line(console, "memory", f"that of {MEMORY_OF}")
    console.print(_table(job, found))
    show_line(console, "batch", batch_equation(job, found.plans[0].candidate))
    for sentence in why(job, found):
        show_line(console, "why", sentence)
    for line in placement(job, found.plans[0].candidate):
        show_line(console, "place", line)
    show_line(console, "search", f"{found.considered} splits judged, {found.refined} of them stage by stage")


def show_reasons(job: Job, found: Found, changes: list[str], console: Console) -> None:
    """Print what ``--explain`` adds: terms, legal degrees, rejections, what would change the choice."""
    first = found.plans[0]
    for name, seconds in _largest_first(first.estimate.time_terms):
        show_line(console, "time", f"{name}: {seconds:.4g} s, {seconds / first.step_seconds:.1%}")
    fullest: dict[str, float] = max(first.estimate.memory_terms, key=lambda terms: sum(terms.values()))
    for name, size in _largest_first(fullest):
        show_line(console, "memory", f"{name}: {format_bytes(size)}")
    for other in found.plans[1:]:
        show_line(console, "loses", f"{describe(other.candidate)}: {loss(first, other)}")
    for axis, degrees in legal_degrees(job).items():
        show_line(console, "legal", f"{axis}: {_some(degrees)}")
    for one in found.rejected:
        show_line(console, "rejected", f"{one.number} by {one.rule}" + (f": {one.detail}" if one.detail else ""))
    for line in changes:
        show_line(console, "change", line)


def _largest_first(terms: Mapping[str, float]) -> list[tuple[str, float]]:
    """Those that are not 0."""
    return sorted((term for term in terms.items() if term[1]), key=lambda term: -term[1])


def _some(degrees: list[int]) -> str:
    shown = ", ".join(map(str, degrees[:_SHOWN_DEGREES]))
    return shown + (f", ... {degrees[-1]}" if len(degrees) > _SHOWN_DEGREES else "")


def _table(job: Job, found: Found) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    headers: list[dict[str, Any]] = [{"header": "", "justify": "right"}, {"header": "plan", "overflow": "fold"}]
    names = ("step", "tokens/s/device", "MFU", "memory by stage", "bubble", "traffic waited for")
    headers += [{"header": name} for name in names]
    for header in headers:
        table.add_column(**header)
    for rank, plan in enumerate(found.plans, 1):
        table.add_row(
            str(rank),
            describe(plan.candidate) + (f" (not runnable yet: {plan.not_runnable})" if plan.not_runnable else ""),
            f"{plan.step_seconds:.4g} s",
            f"{plan.tokens_per_second_per_device(job):.0f}",
            f"{plan.mfu(job):.1%}",
            memory_line(plan),
            f"{plan.estimate.bubble:.1%}",
            f"{plan.exposed_seconds:.3g} s",
        )
    return table
