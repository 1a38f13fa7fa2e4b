"""Many architectures by one mechanism: each layout equals one process, and the export is the input's twin."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import export_model
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.models.build import build_on_meta
from shardwise.spec import tolerance
from shardwise.testing import run_distributed
from tests.fixtures import make_rows
from tests.long import EVERYTHING
from tests.parallel.families import FAMILIES, make_family
from tests.parallel.harness import Case, Outcome, RankPart, assemble, compare, reference, run_case, strategy

pytestmark = pytest.mark.slow
ROWS = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pp": 2},
    "dp_shard2": {"dp_shard": 2},
    "dp_replicate2": {"dp_replicate": 2},
    "pp2-dp2": {"pp": 2, "dp_shard": 2},
    "tp2": {"tp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "pp2-recompute": {"pp": 2, "recompute": -1},
}
if EVERYTHING:
    LAYOUTS["pp4"] = {"pp": 4}
MAIN = (
    *("gpt_neox", "gpt_neox-serial", "gpt2", "gemma", "gemma2", "gemma3_text"),
    *("phi", "phi3", "glm", "glm4", "mixtral", "qwen3_moe"),
)
SHARDED = ("gpt2", "gemma2", "mixtral", "qwen3_moe")  # transposed weights, many norms, experts
# Those that the same mechanism covers without a line of their own.
OTHERS = tuple(name for name in FAMILIES if name not in (*MAIN, "gemma3n_text"))


def _table() -> list[tuple[str, str]]:
    # Every layout for one of them; for the others those that repeat are left out, unless everything is asked for: a
    # stage alone (`tp2-pp2` has stages too), and shards of weights that are like those of others.
    every = MAIN if EVERYTHING else ("gpt_neox",)
    few = {name: ("tp2", "tp2-pp2", *(("dp_shard2",) if name in SHARDED else ())) for name in MAIN}
    rows = [(name, layout) for name in MAIN for layout in (LAYOUTS if name in every else few[name])]
    rows += [("gemma3n_text", layout) for layout in ("pp2", "tp2-pp2")]
    if EVERYTHING:
        rows += [("gemma3n_text", layout) for layout in ("pp4", "pp2-dp2")]
    rows += [("deepseek_v3", "dp_shard2")]  # what is frozen among what trains
    return rows + [(name, layout) for name in OTHERS for layout in ("pp2", "tp2")]


TABLE = _table()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_family(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


def _case(folder: Path, layout: str) -> Case:
    split = strategy(4, **LAYOUTS[layout])
    return Case(folder, split, ROWS, 4, 2, dtype=torch.float64, eval_batch_size=5)


def _run(rank: int, cases: list[Case], targets: list[Path]) -> list[RankPart]:
    parts = []
    for case, target in zip(cases, targets, strict=True):

        def export(model: Any, case: Case = case, target: Path = target) -> None:
            naming = naming_of_folder(case.folder, build_on_meta(case.folder, None))
            export_model(Companions(case.folder), target, naming, model.shards)

        parts.append(run_case(case, export))
    return parts


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs all rows of a world size at the first demand, on ranks that are started once."""
    root = tmp_path_factory.mktemp("exports")

    @cache
    def run(world_size: int) -> dict[tuple[str, str], tuple[Outcome, Path]]:
        rows = [row for row in TABLE if strategy(4, **LAYOUTS[row[1]]).world_size == world_size]
        cases = [_case(folders[name], layout) for name, layout in rows]
        targets = [root / f"{name}-{layout}" for name, layout in rows]
        by_rank = run_distributed(_run, world_size, cases, targets, timeout=280)
        return {row: (assemble([rank[i] for rank in by_rank]), targets[i]) for i, row in enumerate(rows)}

    return run


@cache
def _reference(folder: Path) -> Outcome:
    return reference(_case(folder, "dp_shard2"))


@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_equals_one_process(folders: dict[str, Path], outcomes: Any, note_error: Any, name: str, layout: str) -> None:
    case = _case(folders[name], layout)
    got, _ = outcomes(case.strategy.world_size)[name, layout]
    errors = compare(got, _reference(case.folder))
    for kind in ("loss", "norm", "gradient", "weight"):
        note_error(f"families float64 {kind}", getattr(errors, kind))
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.norm <= tolerance.FLOAT64_GRADIENT
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.FLOAT64_GRADIENT
    assert got.eval_loss == pytest.approx(_reference(case.folder).eval_loss, rel=1e-9)


def _headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            for key in handle.keys():  # noqa: SIM118
                view = handle.get_slice(key)
                found[key] = (tuple(view.get_shape()), view.get_dtype())
    return found


@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_61_and_62_the_export_is_the_twin_of_the_input(
    folders: dict[str, Path], outcomes: Any, name: str, layout: str
) -> None:
    """accelerate 2155, VeOmni 11: names, shapes and dtypes of the input; plain transformers gives the live weights."""
    world_size = strategy(4, **LAYOUTS[layout]).world_size
    got, target = outcomes(world_size)[name, layout]
    assert _headers(target) == _headers(folders[name])
    assert (target / "config.json").read_bytes() == (folders[name] / "config.json").read_bytes()
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    live = AutoModelForCausalLM.from_pretrained(folders[name])
    for parameter_name, parameter in live.named_parameters():
        parameter.data.copy_(got.weights[parameter_name])
    ids = torch.arange(7).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=ids).logits, live.eval()(input_ids=ids).logits)
