"""Sequence parallel with adapters and with dropout, and what it is for: fewer bytes kept for the backward pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from tests.fixtures import make_model, make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import Case, Outcome, assemble, build, compare, loader_of, run_cases, strategy
from tests.parallel.lora_harness import LoraCase, make_adapter, reference
from tests.parallel.lora_harness import run_cases as run_lora_cases

pytestmark = pytest.mark.slow

ROWS = tuple(make_rows((4, 6, 8, 11, 12, 14, 16, 16, 9)))  # steps of 11, 16 and 9 positions
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2-recompute": {"tp": 2, "recompute": -1},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "tp2-dp_shard2": {"tp": 2, "dp_shard": 2},
}
ALL = LoraConfig(r=4, alpha=8.0)
ADAPTERS = {
    "llama": ALL,
    "qwen2": ALL,  # biases on q, k and v
    "gpt2": ALL,  # weights stored the other way round, biases on row layers
    "qwen2_moe": ALL,  # an adapter on a gate that each rank computes for its positions
    "opt": ALL,
}
TABLE = [("llama", layout) for layout in LAYOUTS] + [(name, "tp2") for name in ADAPTERS if name != "llama"]


def _strategy(folder_name: str, **degrees: Any) -> Any:
    return strategy(2 if folder_name == "qwen2_moe" else 4, sequence_parallel=True, **degrees)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sequence")
    made = {name: make_model(root / name, name) for name in ("llama", "qwen2")}
    made |= {name: make_family(root / name, name) for name in ("gpt2", "opt")}
    made["qwen2_moe"] = make_family(root / "qwen2_moe", "qwen2_moe", num_hidden_layers=2)
    made["dropped"] = make_family(root / "dropped", "gpt2", resid_pdrop=0.1, embd_pdrop=0.1)
    return made | {
        f"{name}+adapter": make_adapter(made[name], root / f"{name}+adapter", lora) for name, lora in ADAPTERS.items()
    }


def _lora_case(folders: dict[str, Path], name: str, split: Any, lora: LoraConfig = ALL) -> LoraCase:
    adapter = folders[f"{name}+adapter"]
    return LoraCase(folders[name], split, ROWS, 4, steps=3, dtype=torch.float64, lora=lora, adapter=adapter)


def _outcomes(cases: dict[Any, Any], run: Any) -> dict[Any, Outcome]:
    """Every case, on ranks that are started once for a world size."""
    found = {}
    for size in sorted({case.strategy.world_size for case in cases.values()}):
        keys = [key for key, case in cases.items() if case.strategy.world_size == size]
        by_rank = run_distributed(run, size, [cases[key] for key in keys], timeout=280)
        found |= {key: assemble([rank[i] for rank in by_rank]) for i, key in enumerate(keys)}
    return found


@pytest.fixture(scope="module")
def adapted(folders: dict[str, Path]) -> dict[Any, Outcome]:
    cases = {(name, layout): _lora_case(folders, name, _strategy(name, **LAYOUTS[layout])) for name, layout in TABLE}
    return _outcomes(cases, run_lora_cases)


@pytest.mark.parametrize(("name", "layout"), TABLE)
def test_adapters_equal_plain_peft(
    name: str, layout: str, folders: dict[str, Path], adapted: dict[Any, Outcome], note_error: Any
) -> None:
    errors = compare(adapted[name, layout], reference(_lora_case(folders, name, strategy())))
    note_error("sequence lora float64 gradient", errors.gradient)
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.norm <= tolerance.FLOAT64_GRADIENT
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.FLOAT64_GRADIENT


DROPPED: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2, "sequence_parallel": True},
    "tp4": {"tp": 4, "sequence_parallel": True},
    "tp2-recompute": {"tp": 2, "sequence_parallel": True, "recompute": -1},
    "tp2-pp2": {"tp": 2, "pp": 2, "sequence_parallel": True},
}


def test_dropout_of_the_residual_stream_is_that_of_whole_rows(folders: dict[str, Path]) -> None:
    """Masks differ from position to position, on whatever rank it is, and are those of one process (case 29)."""
    cases = {
        name: Case(
            folders["dropped"],
            replace(strategy(**degrees), micro_batch_size=1),
            ROWS,
            steps=3,
            dtype=torch.float64,
        )
        for name, degrees in DROPPED.items()
    }
    cases["without"] = replace(cases["one"], folder=folders["gpt2"])
    found = _outcomes(cases, run_cases)
    assert abs(found["one"].losses[0] - found["without"].losses[0]) > 1e-4
    for name in DROPPED:
        errors = compare(found[name], found["one"])
        assert errors.loss <= tolerance.FLOAT64_LOSS, name
        assert errors.gradient <= tolerance.FLOAT64_GRADIENT, (name, errors.worst_gradient)


def test_dropout_of_adapters_is_that_of_one_process(folders: dict[str, Path]) -> None:
    lora = LoraConfig(r=4, alpha=8.0, dropout=0.1)
    cases = {
        (name, layout): _lora_case(folders, name, replace(split, micro_batch_size=1), lora)
        for name in ("llama", "opt")
        for layout, split in {
            "one": strategy(),
            "tp2": _strategy(name, tp=2),
            "recompute": _strategy(name, tp=2, recompute=-1),
        }.items()
    }
    found = _outcomes(cases, run_lora_cases)
    for name, layout in cases:
        errors = compare(found[name, layout], found[name, "one"])
        assert errors.loss <= tolerance.FLOAT64_LOSS, (name, layout)
        assert errors.gradient <= tolerance.FLOAT64_GRADIENT, (name, layout, errors.worst_gradient)


def _kept_bytes(rank: int, cases: list[Case]) -> list[int]:
    """Bytes that autograd keeps of a forward pass over one micro-batch, parameters left out, each storage once."""
    return [_kept(case) for case in cases]


def _kept(case: Case) -> int:
    model, mesh = build(case)
    batch = next(loader_of(case, mesh).batches())
    weights = {p.untyped_storage().data_ptr() for p in model.stages[0].parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.stages[0](batch.input_ids[0], position_ids=batch.position_ids[0])
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


@pytest.mark.parametrize("degree", [2, 4])
def test_fewer_bytes_are_kept_for_the_backward_pass(folders: dict[str, Path], degree: int) -> None:
    """Of each of 4 blocks at least the inputs of both norms: 1/degree of what every rank keeps otherwise."""
    rows = tuple(make_rows((16, 16, 16, 16)))
    split = strategy(tp=degree)
    cases = [Case(folders["llama"], replace(split, sequence_parallel=on), rows, dtype=torch.float32) for on in (0, 1)]
    for plain, sliced in run_distributed(_kept_bytes, degree, cases):
        hidden = 2 * 16 * 32 * 4  # rows, positions, features, bytes
        assert plain - sliced >= 4 * 2 * hidden * (degree - 1) // degree
