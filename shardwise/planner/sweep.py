"""Judges the candidates of a space, those with the lowest bounds first, until the rest cannot be among the best."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, get_args

import numpy as np

from shardwise.errors import ConfigError
from shardwise.planner.job import Candidate, Job, Rejection
from shardwise.planner.screen import AXES, JUDGED, Group, Screened, groups_of, judge
from shardwise.planner.space import Columns, Space
from shardwise.spec.block import RECOMPUTE_LEVELS
from shardwise.spec.rules import parse_run
from shardwise.spec.run import Precision
from shardwise.units import format_bytes

REFINED = 24  # candidates that are looked at stage by stage, at least
_FIRST, _GROWTH, _MOST = 500, 4, 20_000  # rows of a group in the first round, and how the number grows
_POINTS = 1500  # candidates whose memory and time are kept to be drawn
_SELECTIVE = RECOMPUTE_LEVELS.index("selective")


class Sweep:
    """What was judged so far: ``pool`` holds the rows that fit, ``rejected`` counts the others by rule.

    Args:
        only_runnable: leave out what the runtime has not yet.
    """

    def __init__(self, job: Job, only_runnable: bool) -> None:
        self.job, self.only_runnable = job, only_runnable
        self.rejected: dict[tuple[str, str], Rejection] = {}
        self.considered = 0
        self.need = float("inf")
        self.refused_need = float("inf")  # of candidates that seemed to fit, stage by stage
        self.bound = float("inf")  # of the rows that were not judged
        self.points: list[tuple[float, float]] = []
        self._cuts = {False: float("inf"), True: float("inf")}  # a guess that is among the best, of all, of runnable
        self._nearest: tuple[float, dict[str, Any]] = (float("inf"), {})
        self._over = 0
        self.pool = Screened({name: np.zeros(0) for name in _names()})

    def forget(self) -> None:
        """Empty the pool: its rows were looked at. Memory and time of some, the fastest first, stay as ``points``."""
        columns = self.pool.columns
        best = np.argsort(columns["seconds"], kind="stable")[:_POINTS]
        self.points += zip(columns["need"][best].tolist(), columns["seconds"][best].tolist(), strict=True)
        self.pool = Screened({name: np.zeros(0) for name in _names()})

    def run(self, space: Space) -> None:
        """Judge a space: in rounds, each group's next rows, as long as their bound is below the best guesses."""
        groups = groups_of(self.job, space)
        groups.sort(key=lambda group: float(group.columns["bound"].min(initial=np.inf)))
        self._merge(space)
        starts, size = [0] * len(groups), _FIRST
        while any(start < len(group) for start, group in zip(starts, groups, strict=True)):
            for index, group in enumerate(groups):
                start, stop = starts[index], min(starts[index] + size, len(group))
                if start < stop:
                    starts[index] = self._run_rows(group, start, stop)
            size = min(size * _GROWTH, _MOST)
        self._tell_memory()

    def runnable(self, columns: Columns, level: int | None = None) -> np.ndarray:
        """Which rows the runtime can execute."""
        missing = unavailable()
        mask = np.ones(len(columns["cp"]), dtype=bool)
        for name in ("cp", "ep"):
            if name in missing:
                mask &= columns[name] == 1
        if "selective" in missing:
            mask &= (columns["level"] if level is None else np.full(len(mask), level)) != _SELECTIVE
        return mask

    def _run_rows(self, group: Group, start: int, stop: int) -> int:
        """Judge rows of a group; where to go on."""
        columns = group.columns
        if columns["bound"][start] > max(self._cuts.values()):
            self._leave_out(group, slice(start, None), np.ones(len(group) - start, dtype=bool))
            return len(group)
        rows = {name: column[start:stop] for name, column in columns.items()}
        runnable = self.runnable(rows, RECOMPUTE_LEVELS.index(group.layout.recompute))
        wanted = runnable if self.only_runnable else np.ones(stop - start, dtype=bool)
        promising = (rows["bound"] <= self._cuts[False]) | (runnable & (rows["bound"] <= self._cuts[True]))
        self._leave_out(group, slice(start, stop), wanted & ~promising)
        rows = {name: column[wanted & promising] for name, column in rows.items()}
        if len(rows["bound"]):
            self._judge(group, rows)
        return stop

    def _leave_out(self, group: Group, rows: slice, mask: np.ndarray) -> None:
        number = int(mask.sum())
        if number:
            bounds = group.columns["bound"][rows][mask]
            self.bound = min(self.bound, float(bounds.min()))
            space = Space({name: column[rows] for name, column in group.columns.items()})
            space.columns = {name: space.columns[name] for name in ("tp", "cp", "pp", "dp", "m", "ep")}
            space.keep(~mask, "time", "cannot be as fast as the plans that were found")
            self.considered += number
            self._merge(space)

    def _judge(self, group: Group, rows: Columns) -> None:
        screened, space = judge(group, rows)
        self._merge(space)
        self.considered += len(screened)
        if not len(screened):
            return
        need = screened.columns["need"]
        self.need = min(self.need, float(need.min()))
        fits = need <= self.job.limit_bytes
        out = np.flatnonzero(~fits)
        self._over += len(out)
        if len(out):
            nearest = int(out[np.argmin(need[out])])
            if need[nearest] < self._nearest[0]:
                example = candidate_of(self.job, screened.columns, nearest).fields()
                self._nearest = float(need[nearest]), example
        good = screened.where(fits)
        merged = {name: np.concatenate([self.pool.columns[name], good.columns[name]]) for name in _names()}
        self.pool = Screened(merged)
        self._cut()

    def _cut(self) -> None:
        """The guess that a further row must be able to beat: of the first tables, whatever others there are."""
        first = self.pool.columns["table"] == 0
        seconds, runnable = self.pool.columns["seconds"][first], self.runnable(self.pool.columns)[first]
        for only, some in ((False, seconds), (True, seconds[runnable])):
            if len(some) >= REFINED:
                self._cuts[only] = min(self._cuts[only], float(np.partition(some, REFINED - 1)[REFINED - 1]))

    def _merge(self, space: Space) -> None:
        for key, one in space.rejected.items():
            known = self.rejected.get(key)
            self.rejected[key] = replace(one, number=one.number + (known.number if known else 0))

    def _tell_memory(self) -> None:
        need, example = self._nearest
        if self._over:
            limit = format_bytes(self.job.limit_bytes)
            detail = f"above {limit} of a device; the nearest needs {format_bytes(need)}"
            self.rejected = {key: one for key, one in self.rejected.items() if key[0] != "memory"}
            self.rejected["memory", detail] = Rejection("memory", detail, self._over, example)


def _names() -> tuple[str, ...]:
    return (*AXES, *JUDGED)


def candidate_of(job: Job, columns: Columns, index: int) -> Candidate:
    """One row as a candidate, its stages still open."""
    row = {name: column[index].item() for name, column in columns.items()}
    shard = int(row["shard"])
    virtual = int(row["v"])
    given = job.fixed.get("schedule")
    tables = list(job.by_table)
    return Candidate(
        tp=int(row["tp"]),
        pp=int(row["pp"]),
        dp_replicate=int(row["dp"]) // shard,
        dp_shard=shard,
        cp=int(row["cp"]),
        ep=int(row["ep"]),
        reshard=bool(row["reshard"]),
        sequence_parallel=bool(row["sp"]),
        micro_batch_size=int(row["m"]),
        schedule="interleaved" if virtual > 1 else "zero_bubble" if row["halves"] else given or "1f1b",
        virtual_stages=virtual,
        level=RECOMPUTE_LEVELS[int(row["level"])],
        tp_whole=tables[int(row["table"])] if row["tp"] > 1 else None,
    )


@cache
def unavailable() -> dict[str, str]:
    """Parts of a plan that the runtime has not yet, by the rules that training itself refuses them by."""
    probes: dict[str, dict[str, Any]] = {"cp": {"cp": 2}, "ep": {"ep": 2}, "selective": {"recompute": "selective"}}
    missing = {}
    for name, strategy in probes.items():
        try:
            parse_run({"model": "any", "strategy": strategy})
        except ConfigError as error:
            missing[name] = f"{error.value}: {error.rule}"
    return missing


def not_runnable(candidate: Candidate, precision: str) -> str:
    """Which part of a candidate the runtime has not yet; empty if it can be trained with."""
    used = {"cp": candidate.cp > 1, "ep": candidate.ep > 1, "selective": candidate.level == "selective"}
    parts = [name for name in unavailable() if used[name]]
    words = {"cp": f"cp {candidate.cp}", "ep": f"ep {candidate.ep}", "selective": "recompute selective"}
    foreign = [] if precision in get_args(Precision) else [f"precision {precision}"]
    return ", ".join([*(words[name] for name in parts), *foreign])
