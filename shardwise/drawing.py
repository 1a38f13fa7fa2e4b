"""Pages that need nothing else, no script and no network, and the parts of the plots on them."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 860, 300, 60
COLOURS = (
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
_LEGEND_WIDTH = 150
_STYLE = (
    "body{font:15px sans-serif;max-width:920px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.2em .6em;text-align:left;border-bottom:1px solid #ddd}"
    "svg text{font:11px sans-serif}"
)


def page(title: str, body: str) -> str:
    """A whole page as HTML text; ``title`` is text, ``body`` is HTML."""
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{escape(title)}</h1>{body}</body></html>\n'


def svg(parts: Sequence[str], height: float = HEIGHT) -> str:
    """A plot of ``WIDTH`` by ``height`` pixels."""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Words whose ``anchor`` (start, middle or end) lies at a point."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#222") -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def legend(entries: Sequence[tuple[str, str]], top: float) -> tuple[list[str], float]:
    """Names with their colours in rows of equal places, and where they end."""
    columns = max(1, int((WIDTH - 2 * MARGIN) // _LEGEND_WIDTH))
    parts = []
    for index, (name, colour) in enumerate(entries):
        x = MARGIN + index % columns * _LEGEND_WIDTH
        y = top + index // columns * 16
        parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="9" height="9" fill="{colour}"/>')
        parts.append(text(x + 13, y + 9, name))
    return parts, top + -(-len(entries) // columns) * 16
