"""Step numbers as ``3-5,9``. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from shardwise.errors import ConfigError


@dataclass(frozen=True, order=True)
class StepRange:
    """Steps from ``first`` to ``last``, both included, counted from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def parse_steps(text: str | int | None, key: str) -> tuple[StepRange, ...]:
    """The ranges in ``3``, ``3,7``, ``3-5`` or ``3-5,9``, in order; none for None.

    Raises:
        ConfigError: another text, steps below 1, a range that runs backward, or a step that is in two of them.
    """
    if text is None:
        return ()
    value = f"{key} = {text!r}"
    matches = [re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part) for part in str(text).split(",")]
    found = [StepRange(int(match[1]), int(match[2] or match[1])) for match in matches if match]
    if len(found) < len(matches):
        raise ConfigError(value, "must be steps and ranges of steps, counted from 1", f"For example {key}=3-5,9")
    for steps in found:
        if steps.first < 1:
            raise ConfigError(value, "steps are counted from 1", f"For example {key}=1-{max(steps.last, 1)}")
        if steps.last < steps.first:
            raise ConfigError(value, f"{steps} runs backward", f"Write {steps.last}-{steps.first}")
    found.sort()
    for before, after in pairwise(found):
        if after.first <= before.last:
            raise ConfigError(value, f"step {after.first} is named twice", f"Write {before.first}-{after.last}")
    return tuple(found)


def check_last_step(ranges: tuple[StepRange, ...], total_steps: int, key: str) -> None:
    """Refuse ranges that go beyond the run.

    Raises:
        ConfigError: the run has fewer steps.
    """
    if ranges and ranges[-1].last > total_steps:
        shown = ",".join(map(str, ranges))
        raise ConfigError(f"{key} = {shown!r}", f"the run has {total_steps} steps", f"Name steps of 1 to {total_steps}")
