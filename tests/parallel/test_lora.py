"""Adapters under every strategy equal plain peft in one process (fault cases 43, 44, 46, 47)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import ADAMW, SGD, Outcome, assemble, compare, loader_of, strategy
from tests.parallel.layouts import LAYOUTS
from tests.parallel.lora_harness import LoraCase, build, make_adapter, reference, run_cases

pytestmark = pytest.mark.slow

MODELS = ("llama", "llama-tied", "qwen2", "qwen3")
ADAPTERS: dict[str, LoraConfig] = {
    "all": LoraConfig(r=4, alpha=8.0),
    "q": LoraConfig(r=2, alpha=8.0, target_modules=("q_proj",)),
    "first-blocks": LoraConfig(r=4, target_modules=r".*layers\.[01]\..*_proj"),
    "last-block": LoraConfig(r=4, target_modules=r".*layers\.3\..*(q|down)_proj"),
    "head": LoraConfig(r=4, target_modules=("o_proj", "lm_head")),
    "saved": LoraConfig(
        r=4, target_modules=("v_proj", "down_proj"), modules_to_save=("embed_tokens", "lm_head", "norm")
    ),
    "kept-tied": LoraConfig(r=4, target_modules=("q_proj", "up_proj"), modules_to_save=("lm_head",)),
}
_INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
# (model, adapters, layout)
_EXTRA = [
    ("llama", "all", {"tp": 4}),  # more tensor ranks than key/value heads
    ("llama", "all", {"tp": 2, "dp_replicate": 2}),
    ("llama", "all", {"pp": 2, "dp_replicate": 2}),
    ("llama", "all", {"pp": 4, "schedule": "gpipe"}),
    ("llama", "all", _INTERLEAVED),
    ("llama-tied", "q", _INTERLEAVED | {"tp": 2}),
    ("llama", "first-blocks", _INTERLEAVED | {"dp_shard": 2}),  # the last stage of each rank trains nothing
    ("llama", "last-block", _INTERLEAVED),
    ("llama-tied", "kept-tied", _INTERLEAVED | {"dp_replicate": 2}),
    ("llama", "all", {"pp": 2, "schedule": "zero_bubble"}),
    ("llama", "first-blocks", {"pp": 2, "dp_shard": 2, "schedule": "zero_bubble"}),  # the last stage trains nothing
    ("llama", "all", {"dp_shard": 2, "reshard": False}),
    ("llama", "all", {"dp_shard": 8}),  # more shards than rows of A
    ("llama-tied", "q", {"pp": 2}),
    ("llama-tied", "q", {"tp": 2, "pp": 2}),
    *[
        ("llama", a, d)
        for a in ("first-blocks", "last-block")
        for d in ({"pp": 2}, {"pp": 4}, {"pp": 2, "dp_shard": 2})
    ],
    *[("llama", "head", d) for d in ({"tp": 2}, {"tp": 2, "pp": 2, "dp_shard": 2})],
    *[("llama-tied", "head", d) for d in ({"tp": 2}, {"pp": 2}, {"dp_shard": 2})],
    *[("llama", "saved", d) for d in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2, "dp_shard": 2}, {"dp_replicate": 2})],
]
_EXTRA += [("llama-tied", "kept-tied", LAYOUTS[name]) for name in ("tp2", "pp2", "dp_shard2", "tp2-pp2-dp2")]
RECOMPUTED = ("pp2", "dp_shard2", "tp2-pp2", "one") if EVERYTHING else ("tp2-pp2", "one")
# What the other models repeat of Llama's layouts, unless everything is asked for: a tie, biases, norms of heads.
REPEATED: dict[str, tuple[str, ...]] = {
    "llama-tied": ("tp2", "pp2", "tp2-pp2-dp2"),
    "qwen2": ("tp2", "pp2", "dp_shard2"),
    "qwen3": ("tp2", "dp_replicate2", "tp2-pp2"),
}


def _table() -> dict[str, tuple[str, str, dict[str, Any]]]:
    names = {model: tuple(LAYOUTS) if EVERYTHING else REPEATED.get(model, tuple(LAYOUTS)) for model in MODELS}
    rows = {f"{model}/{name}": (model, "all", LAYOUTS[name]) for model in MODELS for name in names[model]}
    rows |= {f"llama/{name}/recompute": ("llama", "all", LAYOUTS[name] | {"recompute": -1}) for name in RECOMPUTED}
    extra = {
        f"{model}/{adapters}/" + "-".join(f"{k}{v}" for k, v in degrees.items()): (model, adapters, degrees)
        for model, adapters, degrees in _EXTRA
    }
    return rows | extra


TABLE = _table()
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"train": SGD},
    "adamw": {"train": ADAMW},
    "float64": {"dtype": torch.float64, "steps": 2},
    "bf16": {"dtype": torch.bfloat16, "steps": 20},
    "bf16-exact": {"steps": 20},  # what bf16 rounds
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("lora")
    made = {name: make_model(root / name, name) for name in MODELS}
    for model, adapters, _ in TABLE.values():
        name = f"{model}+{adapters}"
        if name not in made:
            lora = ADAPTERS[adapters]
            if adapters == "kept-tied":
                lora = lora.model_copy(update={"modules_to_save": ()})
            made[name] = make_adapter(made[model], root / name, lora)
    return made


def _case(folders: dict[str, Path], row: str, kind: str) -> LoraCase:
    model, adapters, degrees = TABLE[row]
    split = strategy(**degrees)
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    size = 8 if split.dp == 8 else 4
    adapter, kept_tied = folders[f"{model}+{adapters}"], adapters == "kept-tied"
    case = LoraCase(
        folders[model], split, rows, size, lora=ADAPTERS[adapters], adapter=adapter, steps=5, kept_tied=kept_tied
    )
    return replace(case, **KINDS[kind])


@cache
def _reference(folder: Path, adapter: Path, size: int, kind: str, kept_tied: bool) -> Outcome:
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    case = LoraCase(folder, strategy(), rows, size, adapter=adapter, steps=5, kept_tied=kept_tied)
    return reference(replace(case, **KINDS[kind]))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Any:
    """Runs all rows of a world size at the first demand, on ranks that are started once (a kind, if all are run)."""
    keys = [*CASES, *((row, "bf16") for row in BF16_ROWS)]
    cases = {key: _case(folders, *key) for key in keys}

    @cache
    def run(world_size: int, only: str) -> dict[tuple[str, str], tuple[Outcome, bool, int]]:
        here = [k for k, case in cases.items() if case.strategy.world_size == world_size and only in ("", k[1])]
        by_rank = run_distributed(run_cases, world_size, [cases[key] for key in here], timeout=280)
        found = {}
        for i, key in enumerate(here):
            parts = [rank[i] for rank in by_rank]
            found[key] = (assemble(parts), all(part.frozen_kept for part in parts), parts[0].num_trainable)
        return found

    return lambda row, kind: run(cases[row, kind].strategy.world_size, kind if EVERYTHING else "")[row, kind]


# All rows in float64, where nothing hides. fp32 repeats some of them, unless everything is asked for.
FP32 = {
    "sgd": ("llama/tp2", "llama/pp2", "llama/tp2-pp2-dp2"),
    "adamw": ("llama-tied/tp2", "llama/dp_shard2", "llama/dp_replicate2"),
}
CASES = [(row, "float64") for row in TABLE]
CASES += [(row, kind) for row in TABLE for kind, rows in FP32.items() if row in rows or EVERYTHING]
_BF16_LAYOUTS = tuple(LAYOUTS) if EVERYTHING else ("one", "tp2", "pp2", "dp_replicate2", "dp_shard2", "tp2-pp2")
BF16_ROWS = [f"llama/{name}" for name in _BF16_LAYOUTS] + ["llama/all/tp4"]


@pytest.mark.parametrize(("row", "kind"), CASES)
def test_equals_plain_peft(row: str, kind: str, folders: dict[str, Path], outcomes: Any, note_error: Any) -> None:
    case = _case(folders, row, kind)
    got, frozen_kept, num_trainable = outcomes(row, kind)
    want = _reference(case.folder, case.adapter, case.global_batch_size, kind, case.kept_tied)
    errors = compare(got, want)
    for name in ("loss", "norm", "gradient", "weight"):
        note_error(f"lora {kind} {name}", getattr(errors, name))
    sharp = kind == "float64"
    assert frozen_kept, "a frozen weight has changed or has a gradient"
    assert num_trainable == sum(weight.numel() for weight in want.weights.values())
    assert errors.loss <= (tolerance.FLOAT64_LOSS if sharp else tolerance.FP32_LOSS)
    assert errors.norm <= (tolerance.FLOAT64_GRADIENT if sharp else tolerance.FP32_NORM)
    assert errors.gradient <= (tolerance.FLOAT64_GRADIENT if sharp else tolerance.FP32_GRADIENT), errors.worst_gradient
    assert errors.weight <= (tolerance.ADAMW_WEIGHTS if kind == "adamw" else tolerance.SGD_WEIGHTS)


@pytest.mark.parametrize("row", BF16_ROWS)
def test_equals_plain_peft_in_bf16(row: str, folders: dict[str, Path], outcomes: Any, note_error: Any) -> None:
    """As for whole models: a row above the limit counts only as far as one process is from fp32 (a third)."""
    case = _case(folders, row, "bf16")
    got, frozen_kept, _ = outcomes(row, "bf16")
    want, exact = (
        _reference(case.folder, case.adapter, case.global_batch_size, kind, False) for kind in ("bf16", "bf16-exact")
    )
    errors, rounding = compare(got, want), compare(want, exact)
    note_error("lora bf16 loss", errors.loss)
    assert frozen_kept
    assert errors.loss <= max(tolerance.BF16_LOSS, 3 * rounding.loss)


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"pp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}])
def test_a_bf16_gradient_is_no_further_from_fp32_than_one_process(
    degrees: dict[str, int], tmp_path: Path, note_error: Any
) -> None:
    """Over several models: a row layer rounds each rank's part before the sum, so one draw says little.

    Four tensor ranks round four parts and are above the limit (1.12 measured over these models; 0.95 over three
    of them with parts that are not rounded), so they have no row here; their losses have one above.
    """
    rows, cases = tuple(make_rows()), []
    for seed in range(4):
        folder = make_model(tmp_path / f"model-{seed}", "llama", seed)
        adapter = make_adapter(folder, tmp_path / f"adapter-{seed}", ADAPTERS["all"], seed)
        split = strategy(**degrees)
        cases.append(LoraCase(folder, split, rows, 4, 1, dtype=torch.bfloat16, lora=ADAPTERS["all"], adapter=adapter))
    by_rank = run_distributed(run_cases, cases[0].strategy.world_size, cases)
    ratios = []
    for i, case in enumerate(cases):
        want, exact = reference(case), reference(replace(case, dtype=torch.float32))
        got = assemble([rank[i] for rank in by_rank])
        ratios.append(_distance(got.gradients, exact.gradients) / _distance(want.gradients, exact.gradients))
    mean = sum(ratios) / len(ratios)
    note_error("lora bf16 gradient, times one process's", mean)
    assert mean <= 1.1, ratios


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.sqrt(sum(((a[name].double() - b[name].double()) ** 2).sum() for name in b)))


def _border_gradients(rank: int, case: LoraCase) -> dict[int, list[bool]]:
    """Stage -> whether a gradient comes back to its output and leaves its input, after a step."""
    model, mesh, _ = build(case)
    batch = next(loader_of(case, mesh).batches())
    model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens)
    assert model._engine is not None
    (runtime,) = model._engine._runtimes.values()
    found = {}
    for stage in runtime._stages:
        received = [info.buffer is not None for info in stage.grad_recv_info[0]]
        found[stage.stage_index] = [*received, stage._get_grad_send_meta(0) is not None]
    return found


@pytest.mark.parametrize("degrees", [{"pp": 4}, _INTERLEAVED])
def test_no_gradient_is_sent_to_where_nothing_trains(folders: dict[str, Path], degrees: dict[str, Any]) -> None:
    lora = LoraConfig(r=4, target_modules=r".*layers\.[23]\..*q_proj")
    adapter = make_adapter(folders["llama"], folders["llama"].parent / f"late-{len(degrees)}", lora)
    case = LoraCase(folders["llama"], strategy(**degrees), tuple(make_rows()), 4, lora=lora, adapter=adapter)
    held = run_distributed(_border_gradients, case.strategy.world_size, case)
    # Block 2 is the first that trains; the first stage receives ids, and the last one has no stage behind it.
    assert {stage: found for rank in held for stage, found in rank.items()} == {
        0: [False, False],
        1: [False, False],
        2: [True, False],
        3: [True],
    }
