"""``check``: a run's plan on a small copy of its model, on a few processes of this machine, beside one process."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.check.layouts import Coverage, coverage, layouts
from shardwise.check.names import LAYOUT, PLAN, REPORT, RUN, TARGET
from shardwise.errors import DifferenceError
from shardwise.front.resolve import prepare
from shardwise.launch.agent import launch
from shardwise.launch.forkserver import PRELOAD_MORE
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, dump_run
from shardwise.tensor.cache import table_folder

SCHEMA = 1
_FAILED = 3


@dataclass(frozen=True)
class CheckResult:
    """How a check ended.

    Args:
        exit_code: 0 equal, 4 different (``report`` is there in both), else that of the job that ran it.
        report: what the contract says of ``check --json``, and more.
    """

    exit_code: int
    report: dict[str, Any] | None


def run_check(tree: dict[str, Any]) -> CheckResult:
    """Check the plan of a run. To be called on the main thread.

    Raises:
        ConfigError, PlanError: what cannot run, as for training.
    """
    run, plan = prepare(tree, command="check")
    chosen = layouts(plan.strategy)
    reports = []
    for layout in chosen:
        code, report = _run_layout(run, plan, layout)
        if report is None:
            return CheckResult(code, None)
        reports.append(report)
        if not report["ok"]:
            break
    told = coverage(plan, chosen, run.train.precision or "fp32", run.train.compile)
    merged = merge(reports, told)
    return CheckResult(0 if merged["ok"] else DifferenceError.exit_code, merged)


def _run_layout(run: RunConfig, plan: Plan, layout: dict[str, int]) -> tuple[int, dict[str, Any] | None]:
    """Exit code of the job and what it wrote; a job that failed leaves its folder, which its message names."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-check-"))
    code = None
    try:
        (folder / RUN).write_text(dump_run(run), encoding="utf-8")
        replace(plan, device_type="cpu").save(folder / PLAN)
        tables = table_folder(os.environ)
        request = {"degrees": layout, "tables": None if tables is None else str(tables)}
        (folder / LAYOUT).write_text(json.dumps(request), encoding="utf-8")
        env = {PRELOAD_MORE: "peft"} if run.lora else None
        code = launch(folder, math.prod(layout.values()), target=TARGET, env=env)
        path = folder / REPORT
        return code, json.loads(path.read_text(encoding="utf-8")) if code == 0 else None
    finally:
        if code != _FAILED:
            shutil.rmtree(folder, ignore_errors=True)


def merge(reports: list[dict[str, Any]], told: Coverage) -> dict[str, Any]:
    """One answer from those of all layouts: the worst of each kind; the steps are those of the last."""
    last = reports[-1]
    worst = max((report["worst_gradient"] for report in reports), key=lambda found: found["error"])
    errors = {key: max(report["errors"][key] for report in reports) for key in last["errors"]}
    modules = {name: max(report["gradients"].get(name, 0.0) for report in reports) for name in last["gradients"]}
    compared = f"{len(last['steps'])} steps: loss and gradient norm of each, {len(modules)} modules' gradients of one"
    covered = {"copy": last["copy"], **told.covered, "compared": compared, "precision": last["precision"]}
    return {
        "schema": SCHEMA,
        "ok": last["ok"],
        "covered": covered,
        "not_covered": [*told.not_covered, *last["notes"]],
        "steps": last["steps"],
        "errors": errors,
        "limits": last["limits"],
        "worst_gradient": worst,
        "gradients": modules,
        "first_difference": last["first_difference"],
    }
