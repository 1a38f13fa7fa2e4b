"""What ``check`` prints: what was compared, the worst errors beside their limits, what was not covered."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_MODULES = 5


def show_check(report: dict[str, Any], console: Console) -> None:
    """Print a check's report."""
    for subject, text in report["covered"].items():
        _line(console, subject, text)
    console.print(_steps(report["steps"]))
    errors, limits = report["errors"], report["limits"]
    worst = report["worst_gradient"]
    names = {"loss": "loss", "grad_norm": "gradient norm", "gradient": f"gradient of {worst['name']}"}
    for key, name in names.items():
        _line(console, "worst error", f"{errors[key]:.1e} {name} (limit {limits[key]:.0e})")
    console.print(_modules(report["gradients"]))
    _line(console, "not covered", "; ".join(report["not_covered"]))
    difference = report["first_difference"]
    if difference is None:
        _line(console, "equal", "the plan's loss and gradients are those of one process")
        return
    error = "" if difference["error"] is None else f" (error {difference['error']:.1e})"
    what = {
        "output": "the first module whose output differs, in the order of the forward pass",
        "gradient": "all outputs agree; this module's gradient differs, and it is the one nearest to the loss",
        "step": "outputs and first gradients agree",
    }[difference["what"]]
    _line(console, "DIFFERENT", f"{difference['module']}{error}: {what}")


def _line(console: Console, label: str, text: str) -> None:
    """Text as it is: names of modules may look like markup."""
    console.print(Text.assemble((f"{label:12}", "bold"), " ", text))


def _steps(steps: list[dict[str, float | None]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("step", "loss", "one process", "gradient norm", "one process"):
        table.add_column(column, justify="right")
    for number, step in enumerate(steps, 1):
        values = (step["loss"], step["ref_loss"], step["grad_norm"], step["ref_grad_norm"])
        table.add_row(str(number), *("-" if value is None else f"{value:.9f}" for value in values))
    return table


def _modules(gradients: dict[str, float]) -> Table:
    """The modules with the largest errors of their gradients."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("gradient's error", justify="right")
    table.add_column("module", overflow="fold")
    for name in sorted(gradients, key=lambda module: -gradients[module])[:MAX_MODULES]:
        table.add_row(f"{gradients[name]:.1e}", Text(name))
    return table
