"""A plan as one page that needs nothing else: the search as a plot, memory by stage, the pipeline's timeline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from shardwise.planner.explain import batch_equation, describe, placement, why
from shardwise.planner.job import Found, Job
from shardwise.planner.timeline import timeline
from shardwise.units import format_bytes

_WIDTH, _HEIGHT, _MARGIN = 860, 300, 60
_COLOURS = (
    "#3b6ea5",
    "#d98032",
    "#4f9a5b",
    "#a24a4a",
    "#7c64a6",
    "#8a6d4f",
    "#c77ab0",
    "#777777",
    "#b5b045",
    "#4aa6ab",
)
_PASS_COLOURS = {
    "forward": _COLOURS[0],
    "backward": _COLOURS[1],
    "backward_input": _COLOURS[1],
    "backward_weight": _COLOURS[2],
}
_STYLE = (
    "body{font:15px sans-serif;max-width:900px;margin:2em auto;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:left;border-bottom:1px solid #ddd}"
    "svg text{font:11px sans-serif}"
)


def plan_page(job: Job, found: Found) -> str:
    """The page as HTML text."""
    name = f"{job.costs.name} on {job.devices} {job.cluster.name}"
    first = found.plans[0].candidate
    lines = [batch_equation(job, first), *why(job, found), *placement(job, first)]
    listed = "".join(f"<li>{escape(line)}</li>" for line in lines)
    sections = (
        ("Plans", _table(job, found)),
        ("Search: step time over memory of a device", _search_plot(job, found)),
        ("Memory of each pipeline stage", _memory_plot(job, found)),
        ("Pipeline: forward and backward passes of the first micro-batches", _timeline_plot(job, found)),
    )
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections)
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return (
        f"<!doctype html><html><head>{head}</head><body><h1>{escape(name)}</h1><ul>{listed}</ul>{body}</body></html>\n"
    )


def _table(job: Job, found: Found) -> str:
    rows = []
    for rank, plan in enumerate(found.plans, 1):
        mark = f" (not runnable yet: {plan.not_runnable})" if plan.not_runnable else ""
        memory = format_bytes(plan.estimate.memory_bytes)
        cells = (
            str(rank),
            describe(plan.candidate) + mark,
            f"{plan.step_seconds:.4g} s",
            f"{plan.mfu(job):.1%}",
            memory,
        )
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("", "plan", "step", "MFU", "memory"))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _svg(parts: Sequence[str], height: float = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _search_plot(job: Job, found: Found) -> str:
    """Candidates that fit as dots, the plans as numbered circles; seconds on a logarithmic scale."""
    plans = [(plan.estimate.memory_bytes, plan.step_seconds) for plan in found.plans]
    every = [*found.points, *plans]
    low, high = (math.log(edge(seconds for _, seconds in every)) for edge in (min, max))
    span = max(high - low, 1e-9)

    def place(memory: float, seconds: float) -> tuple[float, float]:
        x = _MARGIN + memory / job.limit_bytes * (_WIDTH - 2 * _MARGIN)
        return x, 20 + (high - math.log(seconds)) / span * (_HEIGHT - 60)

    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#9ab"/>' for x, y in (place(*one) for one in found.points)]
    for rank, point in enumerate(plans, 1):
        x, y = place(*point)
        dots += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOURS[1]}"/>', _text(x + 7, y + 4, str(rank))]
    axes = [_text(_MARGIN - 6, 24, f"{math.exp(high):.3g} s", "end")]
    axes += [_text(_MARGIN - 6, _HEIGHT - 36, f"{math.exp(low):.3g} s", "end"), _text(_MARGIN, _HEIGHT - 8, "0 B")]
    axes.append(_text(_WIDTH - _MARGIN, _HEIGHT - 8, format_bytes(job.limit_bytes), "end"))
    return _svg([*dots, *axes])


def _memory_plot(job: Job, found: Found) -> str:
    """A bar a stage, its terms one on the other."""
    stages = found.plans[0].estimate.memory_terms
    names = list(dict.fromkeys(name for terms in stages for name in terms))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    step = (_WIDTH - 2 * _MARGIN) / len(stages)
    parts = []
    for index, terms in enumerate(stages):
        top = float(_HEIGHT - 60)
        for name, size in terms.items():
            height = size / job.limit_bytes * (_HEIGHT - 80)
            top -= height
            shape = f'x="{_MARGIN + index * step:.1f}" y="{top:.1f}" width="{0.8 * step:.1f}" height="{height:.1f}"'
            title = f"<title>stage {index}: {escape(name)} {format_bytes(size)}</title>"
            parts.append(f'<rect {shape} fill="{colours[name]}">{title}</rect>')
    for index, name in enumerate(names):
        x = _MARGIN + index * (_WIDTH - _MARGIN) / len(names)
        parts.append(f'<rect x="{x:.1f}" y="{_HEIGHT - 30}" width="9" height="9" fill="{colours[name]}"/>')
        parts.append(_text(x + 12, _HEIGHT - 21, name))
    parts.append(_text(_MARGIN - 6, 24, format_bytes(job.limit_bytes), "end"))
    return _svg(parts)


def _timeline_plot(job: Job, found: Found) -> str:
    """A row a pipeline rank; forward and backward passes, and second halves of these, in a colour each."""
    passes = timeline(job, found.plans[0].candidate)
    end, row = max(one.end for one in passes), 18
    scale = (_WIDTH - _MARGIN - 10) / end
    parts = []
    for one in passes:
        shape = f'x="{_MARGIN + one.start * scale:.2f}" y="{one.rank * row + 2}" height="{row - 3}"'
        shape += f' width="{max((one.end - one.start) * scale - 0.4, 0.3):.2f}"'
        title = f"<title>{one.kind} of micro-batch {one.micro_batch}, stage {one.stage}</title>"
        parts.append(f'<rect {shape} fill="{_PASS_COLOURS[one.kind]}">{title}</rect>')
    ranks = max(one.rank for one in passes) + 1
    parts += [_text(_MARGIN - 6, rank * row + 14, f"rank {rank}", "end") for rank in range(ranks)]
    parts.append(_text(_WIDTH - 10, ranks * row + 14, f"{end:.3g} s", "end"))
    return _svg(parts, ranks * row + 20)
