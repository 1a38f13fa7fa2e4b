"""A plan as one page that needs nothing else: the search as a plot, memory by stage, the pipeline's timeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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
    "#2f4858",
    "#e3b7a0",
)
_LEGEND_WIDTH, _MOST_LABELS = 150, 32
_PASS_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "gradients of weights",
}
_PASS_COLOURS = {
    "forward": _COLOURS[0],
    "backward": _COLOURS[1],
    "backward_input": _COLOURS[1],
    "backward_weight": _COLOURS[2],
}
_STYLE = (
    "body{font:15px sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222}"
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
        ("Memory of each pipeline rank of plan 1", _memory_plot(job, found)),
        ("Pipeline of plan 1: passes of the first micro-batches", _timeline_plot(job, found)),
    )
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections)
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f"<body><h1>{escape(name)}</h1><ul>{listed}</ul>{body}</body></html>\n"
    )


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


def _svg(parts: Sequence[str], height: float = _HEIGHT) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" width="{_WIDTH}" role="img">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#222") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Names with their colours in rows of equal places, and where they end."""
    columns = max(1, int((_WIDTH - 2 * _MARGIN) // _LEGEND_WIDTH))
    parts = []
    for index, (name, colour) in enumerate(entries):
        x = _MARGIN + index % columns * _LEGEND_WIDTH
        y = top + index // columns * 16
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="9" height="9" fill="{colour}"/>')
        parts.append(_text(x + 13, y + 9, name))
    return parts, top + -(-len(entries) // columns) * 16


def _byte_axis(limit: float, left: float, place: Callable[[float], float]) -> list[str]:
    """The vertical axis of memory, with quarters of what can be filled."""
    parts = [_line(left, place(0.0), left, place(limit))]
    for quarter in range(5):
        y = place(limit * quarter / 4)
        parts += [_line(left, y, _WIDTH - _MARGIN, y, "#ddd"), _text(left - 6, y + 4, _gib(limit * quarter / 4), "end")]
    return parts


def _gib(num_bytes: float) -> str:
    return "0" if not num_bytes else format_bytes(num_bytes)


def _search_plot(job: Job, found: Found) -> str:
    """Candidates that fit as dots, the plans as numbered circles; seconds on a logarithmic scale."""
    plans = [(plan.estimate.memory_bytes, plan.step_seconds) for plan in found.plans]
    every = [*found.points, *plans]
    low, high = (math.log(edge(seconds for _, seconds in every)) for edge in (min, max))
    span = max(high - low, 1e-9)
    left, right, top, bottom = _MARGIN + 10, _WIDTH - _MARGIN, 20, _HEIGHT - 40

    def place(memory: float, logarithm: float) -> tuple[float, float]:
        return left + memory / job.limit_bytes * (right - left), top + (high - logarithm) / span * (bottom - top)

    axes = [_line(left, bottom, right, bottom), _line(left, top, left, bottom)]
    for quarter in range(5):
        logarithm, memory = low + span * quarter / 4, job.limit_bytes * quarter / 4
        x, y = place(memory, logarithm)
        axes += [_line(left, y, right, y, "#ddd"), _text(left - 6, y + 4, f"{math.exp(logarithm):.3g} s", "end")]
        axes += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 16, _gib(memory), "middle")]
    axes.append(_text((left + right) / 2, bottom + 32, "memory of the fullest device, up to the limit", "middle"))
    points = [place(memory, math.log(seconds)) for memory, seconds in found.points]
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#9ab"/>' for x, y in points]
    for rank, (memory, seconds) in enumerate(plans, 1):
        x, y = place(memory, math.log(seconds))
        dots += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_COLOURS[1]}"/>', _text(x + 7, y + 4, str(rank))]
    return _svg([*axes, *dots])


def _memory_plot(job: Job, found: Found) -> str:
    """A bar a stage, its terms one on the other."""
    stages = found.plans[0].estimate.memory_terms
    names = [name for name in dict.fromkeys(n for terms in stages for n in terms) if any(t.get(name) for t in stages)]
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    left, bottom = _MARGIN + 10, _HEIGHT - 40
    step = (_WIDTH - _MARGIN - left) / len(stages)

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
            parts.append(_text(left + (index + 0.5) * step, bottom + 16, str(index), "middle"))
    parts.append(_text((left + _WIDTH - _MARGIN) / 2, bottom + 32, "pipeline rank", "middle"))
    legend, end = _legend(list(colours.items()), bottom + 44)
    return _svg([*parts, *legend], end)


def _timeline_plot(job: Job, found: Found) -> str:
    """A row a pipeline rank; forward and backward passes, and second halves of these, in a colour each."""
    passes = timeline(job, found.plans[0].candidate)
    end, row = max(one.end for one in passes), 18
    scale = (_WIDTH - _MARGIN - 30) / end
    parts = []
    for one in passes:
        shape = f'x="{_MARGIN + one.start * scale:.2f}" y="{one.rank * row + 2}" height="{row - 3}"'
        shape += f' width="{max((one.end - one.start) * scale - 0.4, 0.3):.2f}"'
        title = f"<title>{one.kind} of micro-batch {one.micro_batch}, stage {one.stage}</title>"
        parts.append(f'<rect {shape} fill="{_PASS_COLOURS[one.kind]}">{title}</rect>')
    ranks = max(one.rank for one in passes) + 1
    parts += [_text(_MARGIN - 6, rank * row + 14, f"rank {rank}", "end") for rank in range(ranks)]
    bottom = ranks * row + 4
    parts.append(_line(_MARGIN, bottom, _MARGIN + end * scale, bottom))
    for quarter in range(5):
        x = _MARGIN + end * scale * quarter / 4
        label = "0 s" if not quarter else f"{end * quarter / 4:.3g} s"
        parts += [_line(x, bottom, x, bottom + 4), _text(x, bottom + 16, label, "middle")]
    shown = {_PASS_NAMES[one.kind]: _PASS_COLOURS[one.kind] for one in passes}
    legend, below = _legend(list(shown.items()), bottom + 26)
    return _svg([*parts, *legend], below)
