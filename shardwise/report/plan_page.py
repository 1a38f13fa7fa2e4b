"""A plan as one page that needs nothing else: the search as a plot, memory by stage, the pipeline's timeline."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from shardwise.drawing import COLOURS, HEIGHT, MARGIN, WIDTH, legend, line, page, svg, text
from shardwise.planner.explain import batch_equation, describe, placement, why
from shardwise.planner.job import Found, Job
from shardwise.planner.timeline import timeline
from shardwise.units import format_bytes

_MOST_LABELS = 32
_PASS_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "gradients of weights",
}
_PASS_COLOURS = {
    "forward": COLOURS[0],
    "backward": COLOURS[1],
    "backward_input": COLOURS[1],
    "backward_weight": COLOURS[2],
}


def plan_page(job: Job, found: Found) -> str:
    """The page as HTML text."""
    name = f"{job.costs.name} on {job.devices} {job.cluster.name}"
    first = found.plans[0].candidate
    lines = [batch_equation(job, first), *why(job, found), *placement(job, first)]
    listed = "".join(f"<li>{escape(each)}</li>" for each in lines)
    sections = (
        ("Plans", _table(job, found)),
        ("Search: step time over memory of a device", _search_plot(job, found)),
        ("Memory of each pipeline rank of plan 1", _memory_plot(job, found)),
        ("Pipeline of plan 1: passes of the first micro-batches", _timeline_plot(job, found)),
    )
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections)
    return page(name, f"<ul>{listed}</ul>{body}")


def _table(job: Job, found: Found) -> str:
    rows = []
    for rank, plan in enumerate(found.plans, 1):
        mark = f" (not runnable yet: {plan.not_runnable})" if plan.not_runnable else ""
        cells = (
            str(rank),
            describe(plan.candidate) + mark,
            f"{plan.step_seconds:.4g} s",
            f"{plan.tokens_per_second_per_device(job):.4g}",
            f"{plan.mfu(job):.1%}",
            format_bytes(plan.estimate.memory_bytes),
            f"{plan.estimate.bubble:.1%}",
            f"{plan.exposed_seconds:.3g} s",
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    names = ("", "plan", "step", "tokens/s/device", "MFU", "memory of a device", "bubble", "traffic waited for")
    head = "".join(f"<th>{name}</th>" for name in names)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _byte_axis(limit: float, left: float, place: Callable[[float], float]) -> list[str]:
    """The vertical axis of memory, with quarters of what can be filled."""
    parts = [line(left, place(0.0), left, place(limit))]
    for quarter in range(5):
        y = place(limit * quarter / 4)
        parts += [line(left, y, WIDTH - MARGIN, y, "#ddd"), text(left - 6, y + 4, _gib(limit * quarter / 4), "end")]
    return parts


def _gib(num_bytes: float) -> str:
    return "0" if not num_bytes else format_bytes(num_bytes)


def _search_plot(job: Job, found: Found) -> str:
    """Candidates that fit as dots, the plans as numbered circles; seconds on a logarithmic scale."""
    plans = [(plan.estimate.memory_bytes, plan.step_seconds) for plan in found.plans]
    every = [*found.points, *plans]
    low, high = (math.log(edge(seconds for _, seconds in every)) for edge in (min, max))
    span = max(high - low, 1e-9)
    left, right, top, bottom = MARGIN + 10, WIDTH - MARGIN, 20, HEIGHT - 40

    def place(memory: float, logarithm: float) -> tuple[float, float]:
        return left + memory / job.limit_bytes * (right - left), top + (high - logarithm) / span * (bottom - top)

    axes = [line(left, bottom, right, bottom), line(left, top, left, bottom)]
    for quarter in range(5):
        logarithm, memory = low + span * quarter / 4, job.limit_bytes * quarter / 4
        x, y = place(memory, logarithm)
        axes += [line(left, y, right, y, "#ddd"), text(left - 6, y + 4, f"{math.exp(logarithm):.3g} s", "end")]
        axes += [line(x, bottom, x, bottom + 4), text(x, bottom + 16, _gib(memory), "middle")]
    axes.append(text((left + right) / 2, bottom + 32, "memory of the fullest device, up to the limit", "middle"))
    points = [place(memory, math.log(seconds)) for memory, seconds in found.points]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#9ab"/>' for x, y in points]
    for rank, (memory, seconds) in enumerate(plans, 1):
        x, y = place(memory, math.log(seconds))
        dots += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{COLOURS[1]}"/>', text(x + 7, y + 4, str(rank))]
    return svg([*axes, *dots])


def _memory_plot(job: Job, found: Found) -> str:
    """A bar a stage, its terms one on the other."""
    stages = found.plans[0].estimate.memory_terms
    names = [name for name in dict.fromkeys(n for terms in stages for n in terms) if any(t.get(name) for t in stages)]
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    left, bottom = MARGIN + 10, HEIGHT - 40
    step = (WIDTH - MARGIN - left) / len(stages)

    def place(size: float) -> float:
        return bottom - size / job.limit_bytes * (bottom - 20)

    parts = _byte_axis(job.limit_bytes, left, place)
    every = -(-len(stages) // _MOST_LABELS)
    for index, terms in enumerate(stages):
        filled = 0.0
        for name, size in terms.items():
            if size <= 0:
                continue
            filled += size
            height = place(0.0) - place(size)
            shape = f'x="{left + (index + 0.1) * step:.1f}" y="{place(filled):.1f}"'
            shape += f' width="{0.8 * step:.1f}" height="{height:.1f}"'
            title = f"<title>rank {index}: {escape(name)} {format_bytes(size)}</title>"
            parts.append(f'<rect {shape} fill="{colours[name]}">{title}</rect>')
        if index % every == 0:
            parts.append(text(left + (index + 0.5) * step, bottom + 16, str(index), "middle"))
    parts.append(text((left + WIDTH - MARGIN) / 2, bottom + 32, "pipeline rank", "middle"))
    entries, end = legend(list(colours.items()), bottom + 44)
    return svg([*parts, *entries], end)


def _timeline_plot(job: Job, found: Found) -> str:
    """A row a pipeline rank; forward and backward passes, and second halves of these, in a colour each."""
    passes = timeline(job, found.plans[0].candidate)
    end, row = max(one.end for one in passes), 18
    scale = (WIDTH - MARGIN - 30) / end
    parts = []
    for one in passes:
        shape = f'x="{MARGIN + one.start * scale:.2f}" y="{one.rank * row + 2}" height="{row - 3}"'
        shape += f' width="{max((one.end - one.start) * scale - 0.4, 0.3):.2f}"'
        title = f"<title>{one.kind} of micro-batch {one.micro_batch}, stage {one.stage}</title>"
        parts.append(f'<rect {shape} fill="{_PASS_COLOURS[one.kind]}">{title}</rect>')
    ranks = max(one.rank for one in passes) + 1
    parts += [text(MARGIN - 6, rank * row + 14, f"rank {rank}", "end") for rank in range(ranks)]
    bottom = ranks * row + 4
    parts.append(line(MARGIN, bottom, MARGIN + end * scale, bottom))
    for quarter in range(5):
        x = MARGIN + end * scale * quarter / 4
        label = "0 s" if not quarter else f"{end * quarter / 4:.3g} s"
        parts += [line(x, bottom, x, bottom + 4), text(x, bottom + 16, label, "middle")]
    shown = {_PASS_NAMES[one.kind]: _PASS_COLOURS[one.kind] for one in passes}
    entries, below = legend(list(shown.items()), bottom + 26)
    return svg([*parts, *entries], below)
