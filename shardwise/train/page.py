"""``report.html``: a run as one page that needs nothing else, made from the files that it leaves. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.drawing import COLOURS, HEIGHT, MARGIN, WIDTH, legend, line, page, svg, text
from shardwise.files import replace_text
from shardwise.spec.plan import Plan, batch_equation
from shardwise.spec.run import dump_run
from shardwise.train.callbacks import Callback, RunInfo
from shardwise.train.metrics import read_metrics
from shardwise.units import format_bytes, format_count, format_seconds

FILE_NAME = "report.html"

Line = Mapping[str, Any]  # of metrics.jsonl
Points = Sequence[tuple[float, float]]  # (step, value)

_MOST_POINTS = 800  # of a curve: about one a pixel
_MOST_EVALUATIONS = 50  # of the table
_PLOTS = (
    ("Loss", {"loss of a step": "loss", "evaluation": "eval_loss"}),
    ("Gradient norm, before clipping", {"norm": "grad_norm"}),
    ("Learning rate", {"learning rate": "lr"}),
    ("Input tokens a second", {"tokens a second": "tokens_per_second"}),
)


class RunPage(Callback):
    """Writes ``report.html`` when the run ends, in good order or with an error, and after a later evaluation."""

    main_only = True
    optional = True
    may_stop = False

    def __init__(self) -> None:
        self._end = ""  # how the run ended; empty while it goes on
        self._has_stepped = False

    def on_train_begin(self, info: RunInfo) -> None:
        self._info = info

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._has_stepped = True

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        if self._end:
            self._write()

    def on_train_end(self, reason: str | None) -> None:
        self._end = f"ended early: {reason}" if reason else "done"
        self._write()

    def on_exception(self, error: BaseException) -> None:
        if self._has_stepped:  # else the folder stays as it was
            self._end = f"failed: {error}"
            self._write()

    def _write(self) -> None:
        info = self._info
        plan = Plan.load(info.output_dir / "plan.json")
        html = run_page(info, plan, read_metrics(info.output_dir), self._end)
        replace_text(info.output_dir / FILE_NAME, html)


def run_page(info: RunInfo, plan: Plan, lines: Sequence[Line], end: str) -> str:
    """The page as HTML text; ``lines`` are those of ``metrics.jsonl``, ``end`` says how the run ended."""
    steps = [each for each in lines if each["kind"] == "train"]
    facts = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in _facts(info, plan, steps)
    )
    sections = [("The run", f"<table><tr><th>end</th><td>{escape(end)}</td></tr>{facts}</table>")]
    for title, curves in _PLOTS:
        points = {name: _points(lines, key) for name, key in curves.items()}
        found = {name: curve for name, curve in points.items() if curve}
        if found:
            sections.append((title, _plot(found)))
    sections += [("Evaluations", table) for table in _evaluations(lines)]
    sections += [("Steps that changed nothing", listed) for listed in _skipped(steps)]
    sections.append(("Configuration", f"<pre>{escape(dump_run(info.run))}</pre>"))
    body = "".join(f"<h2>{escape(title)}</h2>{content}" for title, content in sections)
    return page(f"{Path(info.run.model).name}: {info.output_dir.name}", body)


def _facts(info: RunInfo, plan: Plan, steps: Sequence[Line]) -> list[tuple[str, str]]:
    model = plan.model
    facts = [
        ("model", f"{info.run.model}: {model.architecture}, {format_count(model.num_parameters)} parameters"),
        ("strategy", f"{plan.strategy} on {plan.device_type}, {plan.devices} processes"),
        ("batch", batch_equation(plan)),
    ]
    if not steps:
        return facts
    seconds = [float(each["step_seconds"]) for each in steps]
    tokens = sum(int(each["num_input_tokens"]) for each in steps)
    facts += [
        ("steps", f"{steps[-1]['step']} of {info.total_steps}, epoch {steps[-1]['epoch']}"),
        (
            "tokens",
            f"{format_count(tokens)} read, {format_count(sum(int(each['num_tokens']) for each in steps))} learned",
        ),
        ("time", f"{format_seconds(sum(seconds))} in steps; {median(seconds):.3g} s a step (median)"),
        ("memory", f"{format_bytes(max(int(each['peak_memory_bytes']) for each in steps))} in the fullest process"),
    ]
    shares = [float(each["mfu"]) for each in steps if each.get("mfu") is not None]
    return [*facts, ("MFU", f"{median(shares):.1%} (median)")] if shares else facts


def _points(lines: Sequence[Line], key: str) -> Points:
    """The values of a key by step, averaged over neighbours where there are more than a plot can show."""
    found = [(float(each["step"]), float(each[key])) for each in lines if each.get(key) is not None]
    size = -(-len(found) // _MOST_POINTS) or 1
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _plot(curves: Mapping[str, Points]) -> str:
    """A line for each curve, a dot where it has one point."""
    every = [point for curve in curves.values() for point in curve]
    (first, last), (low, high) = ((min(axis), max(axis)) for axis in zip(*every, strict=True))
    width, height = last - first or 1.0, high - low or 1.0
    left, right, top, bottom = MARGIN + 10, WIDTH - MARGIN, 20, HEIGHT - 40

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (step - first) / width * (right - left), bottom - (value - low) / height * (bottom - top)

    parts = [line(left, bottom, right, bottom), line(left, top, left, bottom)]
    for value in (low + height * quarter / 4 for quarter in range(5)) if high > low else (low,):
        _, y = place(first, value)
        parts += [line(left, y, right, y, "#ddd"), text(left - 6, y + 4, f"{value:.4g}", "end")]
    for step in sorted({first, round((first + last) / 2), last}):
        x, _ = place(step, low)
        parts += [line(x, bottom, x, bottom + 4), text(x, bottom + 16, f"step {step:g}", "middle")]
    colours = dict(zip(curves, COLOURS, strict=False))
    for name, curve in curves.items():
        placed = [place(*point) for point in curve]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{shape}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>')
        if len(placed) == 1:
            parts.append(f'<circle cx="{placed[0][0]:.1f}" cy="{placed[0][1]:.1f}" r="3" fill="{colours[name]}"/>')
    entries, end = legend(list(colours.items()), bottom + 24)
    return svg([*parts, *entries], end)


def _evaluations(lines: Sequence[Line]) -> list[str]:
    """A table of the last evaluations with the best one marked; none without evaluations."""
    found = [each for each in lines if each["kind"] == "eval"]
    losses = [float(each["eval_loss"]) for each in found if each["eval_loss"] is not None]
    rows = []
    for each in found[-_MOST_EVALUATIONS:]:
        loss = each["eval_loss"]
        shown = "not finite" if loss is None else f"{loss:.6g}" + (" (best)" if loss == min(losses) else "")
        cells = f"<td>{each['step']}</td><td>{shown}</td><td>{each['eval_tokens']}</td>"
        rows.append(f"<tr>{cells}</tr>")
    head = "<tr><th>step</th><th>loss</th><th>tokens</th></tr>"
    return [f"<table>{head}{''.join(rows)}</table>"] if rows else []


def _skipped(steps: Sequence[Line]) -> list[str]:
    """The skipped steps with their reasons; none where every step counted."""
    skipped = [each for each in steps if each.get("skipped")]
    listed = "".join(f"<li>step {each['step']}: {escape(str(each['skipped']))}</li>" for each in skipped)
    return [f"<ul>{listed}</ul>"] if skipped else []
