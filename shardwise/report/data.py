"""What ``data show`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from shardwise.report.console import show_line
from shardwise.units import format_count

_BAR = 40  # letters of the longest bar
_OPEN, _CLOSE = "«", "»"  # around supervised text where there are no colours


def show_data(answer: dict[str, Any], console: Console) -> None:
    """Print the first rows with their supervised tokens marked, then counts, lengths and the arithmetic of steps."""
    for row in answer["rows"]:
        place = f"{row['file']}:{row['line']}, {row['tokens']} tokens, {row['supervised']} of them supervised"
        console.print(Text(place, style="dim"))
        console.print(_marked(row["pieces"], coloured=console.color_system is not None), soft_wrap=True)
    if answer["rows"]:
        how = "in green" if console.color_system is not None else f"between {_OPEN} and {_CLOSE}"
        show_line(console, "marks", f"supervised tokens stand {how}; the loss is taken on them alone")
    for source in answer["sources"]:
        kinds = ", ".join(dict.fromkeys(source["formats"].values()))
        show_line(
            console, "source", f"{source['path']}: {source['rows']} rows in use of {source['rows_read']} ({kinds})"
        )
        for reason, count in source["bad"].items():
            show_line(console, "left out", f"{count} bad rows such as: {reason}")
    for note in answer["notes"]:
        show_line(console, "note", note)
    _show_lengths(answer["lengths"], console)
    _show_epoch(answer["epoch"], console)
    for reason in answer["refused"]:
        show_line(console, "refused", f"training would refuse {reason}")


def _marked(pieces: list[tuple[str, bool]], *, coloured: bool) -> Text:
    shown = Text()
    for text, supervised in pieces:
        if supervised and not coloured:
            text = f"{_OPEN}{text}{_CLOSE}"
        shown.append(text, style="bold green" if supervised else "")
    return shown


def _show_lengths(lengths: dict[str, Any], console: Console) -> None:
    names = {
        "shortest": "shortest",
        "p50": "half below",
        "p95": "95 % below",
        "p99": "99 % below",
        "longest": "longest",
    }
    show_line(console, "lengths", ", ".join(f"{label} {lengths[key]}" for key, label in names.items()))
    most = max(count for *_, count in lengths["histogram"])
    width = max(len(f"{low}-{high}") for low, high, _ in lengths["histogram"])
    for low, high, count in lengths["histogram"]:
        bar = "#" * max(round(_BAR * count / most), count > 0)
        show_line(console, "", f"{f'{low}-{high}':>{width}}  {bar:{_BAR}}  {count}")


def _show_epoch(epoch: dict[str, Any], console: Console) -> None:
    tokens, learned = epoch["tokens"], epoch["supervised_tokens"]
    share = f"{format_count(learned)} of them supervised ({learned / tokens:.1%})"
    apart = f" ({epoch['set_apart']} more are set apart for evaluation)" if epoch["set_apart"] else ""
    show_line(console, "epoch", f"{epoch['rows']} rows{apart}, {format_count(tokens)} tokens, {share}")
    show_line(console, "batch", epoch["batch"])
    show_line(console, "steps", f"{epoch['steps']} an epoch, {epoch['steps_of_run']} in the run")
