"""What ``model show`` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.report.console import show_line
from shardwise.units import format_count


def show_model(answer: dict[str, Any], console: Console) -> None:
    """Print what a model is made of and how it can be split."""
    show_line(console, "model", f"{answer['architecture']}, {format_count(answer['num_parameters'])} parameters")
    for item in answer["unsupported"]:
        show_line(console, "refused", f"{item['part']}: {item['rule']}")
    if "structure" not in answer:
        return
    structure, parts = answer["structure"], answer["parts"]
    show_line(console, "parts", ", ".join(f"{name} {format_count(size)}" for name, size in parts.items()))
    tied = "tied to the embedding" if structure["tied"] else "not tied"
    ends = f"embedding {structure['embedding']}, {structure['num_blocks']} blocks in {structure['blocks']}"
    show_line(console, "structure", f"{ends}, head {structure['head']} ({tied})")
    for kind in answer["kinds"]:
        console.print(_kind(kind))
    pipeline = answer["pipeline"]
    if pipeline["cut"]:
        ends = f"first stage {', '.join(pipeline['before'])}; last stage {', '.join(pipeline['after'])}"
        show_line(console, "pipeline", f"between any two blocks, up to {pipeline['max_stages']} stages; {ends}")
    else:
        show_line(console, "pipeline", f"none: {pipeline['rule']}")
    legal = [str(found["degree"]) for found in answer["tensor"] if found["legal"]]
    show_line(console, "tensor", f"legal degrees: {', '.join(legal) or 'none'}")
    for found in answer["tensor"]:
        if not found["legal"]:
            show_line(console, "", f"{found['degree']}: {found['rule']}")
    for found in answer["tensor"]:
        if "modules" in found:
            _show_table(found, console)


def _kind(kind: dict[str, Any]) -> Table:
    title = f"{kind['class']}: {format_count(kind['parameters'])} parameters, blocks {kind['blocks']}"
    table = _plain_table(title, ("module", "class", "shapes"))
    for module in kind["modules"]:
        shapes = ", ".join(f"{name} {'x'.join(map(str, shape))}" for name, shape in module["shapes"].items())
        table.add_row(Text(module["name"]), module["class"], Text(shapes))
    return table


def _show_table(found: dict[str, Any], console: Console) -> None:
    cost = found["cost"]
    title = f"tensor degree {found['degree']}"
    if cost is not None:
        share = 100 * cost["whole_parameters"] / cost["block_parameters"]
        title += (
            f": a rank sends {cost['forward_elements_per_token']:.0f} elements a token forward and "
            f"{cost['backward_elements_per_token']:.0f} backward in the blocks; {share:.2f} % of them stay whole"
        )
    table = _plain_table(title, ("module", "blocks", "style", "collectives", "forward", "backward"))
    for row in found["modules"]:
        parts = f" ({' | '.join(map(str, row['parts']))})" if row["parts"] else ""
        numbers = (f"{row['forward']:.0f}", f"{row['backward']:.0f}")
        table.add_row(Text(row["module"]), row["blocks"], row["style"] + parts, row["collectives"], *numbers)
    console.print(table)
    for other in found.get("alternatives", []):
        saved = 100 * (1 - other["elements_per_token"] / _moved(cost))
        share = 100 * other["whole_parameters"] / cost["block_parameters"]
        moved = f"{other['elements_per_token']:.0f} elements a token ({saved:.0f} % less)"
        show_line(console, "or", f"tp_whole={other['tp_whole']:g}: {moved}; {share:.1f} % stay whole")
    for name, reason in found["whole"].items():
        show_line(console, "whole", f"{name}: {reason}")


def _moved(cost: dict[str, Any]) -> float:
    """Elements that a rank sends for a token, both ways."""
    return float(cost["forward_elements_per_token"] + cost["backward_elements_per_token"])


def _plain_table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", title=Text(title), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
