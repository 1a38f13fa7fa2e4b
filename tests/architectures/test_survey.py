"""The bars for all architectures of the installed transformers; the list: ``python -m tests.architectures.survey``."""

from __future__ import annotations

import os

import pytest

from tests.architectures.survey import architectures, summary, survey

STEP = 16  # every sixteenth of them; the command goes through all


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_most_architectures_build_and_cut_exactly() -> None:
    names = architectures()[::STEP]
    findings = list(survey(names, workers=min(2, os.cpu_count() or 1)))
    told = "\n".join([summary(findings), *(f"{f.name}: {f.builds}; {f.forward}; {f.pipeline}" for f in findings)])
    runs = [f for f in findings if f.runs]
    assert len(runs) >= 170 / 196 * len(findings), told
    causal = [f for f in runs if f.causal]
    reused = ("do not run once each", "which is not its own")  # a block or a weight of it used twice is not cut
    right = [f for f in causal if f.pipeline == "exact" or any(rule in f.pipeline for rule in reused)]
    assert len(right) >= 0.95 * len(causal) - 1, told  # of a sample: one more may be out
    assert all(f.pipeline == "exact" or f.pipeline.startswith("refused") for f in causal), told
