"""Dropout under every strategy (fault case 29): where masks agree, where they differ, and that they come again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.parallel.dropout import DropoutStreams, SeededDropout
from shardwise.parallel.model import ParallelModel
from shardwise.spec import tolerance
from shardwise.spec.run import LoraConfig
from shardwise.testing import run_distributed
from shardwise.train.optim import Optimizer
from shardwise.train.step import train_step
from tests.fixtures import make_model, make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import ADAMW, Case, Outcome, assemble, compare, loader_of, strategy
from tests.parallel.harness import run_cases as run_plain
from tests.parallel.lora_harness import LoraCase, build, make_adapter, run_cases

pytestmark = pytest.mark.slow

DROPPED = LoraConfig(r=4, alpha=8.0, dropout=0.1)
ROWS = tuple(make_rows())
EXACT = torch.float64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("dropout")
    made = {
        "plain": make_model(root / "plain", "llama"),
        "attention": make_model(root / "attention", "llama", attention_dropout=0.1),
    }
    return made | {"adapter": make_adapter(made["plain"], root / "adapter", DROPPED)}


def _case(folders: dict[str, Path], model: str, **degrees: Any) -> LoraCase:
    split = replace(strategy(), **{"micro_batch_size": 1, **degrees})
    if split.pp > 1:
        split = replace(split, stages=strategy(pp=split.num_stages).stages, reshard=False)
    return LoraCase(
        folders[model], split, ROWS, 4, steps=3, lora=DROPPED, adapter=folders["adapter"], dtype=torch.float64
    )


# Adapters alone: masks of whole tensors follow from the micro-batch, so tensor and pipeline degree change nothing.

SAME: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
    "recompute": {"recompute": -1},
    "tp2-recompute": {"tp": 2, "recompute": -1},
    "pp2-interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": -1},
    "pp2-recompute": {"pp": 2, "recompute": -1},
    "pp4-gpipe-recompute": {"pp": 4, "recompute": -1, "schedule": "gpipe"},
    "dp_shard2": {"dp_shard": 2},
}


@pytest.fixture(scope="module")
def same(folders: dict[str, Path]) -> dict[str, Outcome]:
    cases = {name: _case(folders, "plain", **degrees) for name, degrees in SAME.items()}
    cases |= {
        "one": _case(folders, "plain"),
        "without": replace(_case(folders, "plain"), lora=LoraConfig(r=4, alpha=8.0)),
    }
    cases["dp_replicate2"] = _case(folders, "plain", dp_replicate=2)
    found = {}
    for size in (1, 2, 4):
        names = [name for name, case in cases.items() if case.strategy.world_size == size]
        by_rank = run_distributed(run_cases, size, [cases[name] for name in names], timeout=280)
        found |= {name: assemble([rank[i] for rank in by_rank]) for i, name in enumerate(names)}
    return found


@pytest.mark.parametrize("name", [name for name in SAME if name != "dp_shard2"])
def test_adapter_dropout_does_not_depend_on_tensor_or_pipeline_degree(name: str, same: dict[str, Outcome]) -> None:
    errors = compare(same[name], same["one"])
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.norm <= tolerance.FLOAT64_GRADIENT


def test_adapter_dropout_drops_something_and_differs_between_data_ranks(same: dict[str, Outcome]) -> None:
    assert abs(same["one"].losses[0] - same["without"].losses[0]) > 1e-4
    assert abs(same["one"].losses[0] - same["dp_shard2"].losses[0]) > 1e-6  # other rows have another mask
    errors = compare(same["dp_replicate2"], same["dp_shard2"])  # the same data ranks, cut in another way
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT


def test_the_stages_of_a_rank_draw_their_own_masks() -> None:
    mesh: Any = SimpleNamespace(data_rank=0, coordinate=lambda axis: 0)
    drawn = []
    for stage in (0, 2, 0):
        streams = DropoutStreams(1, mesh, stage)
        with torch.random.fork_rng(devices=[]):
            streams.next_micro_batch()
            drawn.append(torch.rand(8))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


# Dropout of attention: masks follow from the block, and are those of one process where every tensor rank has all heads
# (three heads on two ranks) or where a module draws them (GPT-Neo, whose residual dropout stands beside it).

ATTENTION: dict[str, dict[str, dict[str, Any]]] = {
    "four-heads": {
        "pp2": {"pp": 2},
        "pp2-interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "recompute": -1},
        "pp2-zero-bubble": {"pp": 2, "schedule": "zero_bubble"},
    },
    "three-heads": {
        "tp2": {"tp": 2},
        "tp2-sequence": {"tp": 2, "sequence_parallel": True, "recompute": -1},
        "tp2-pp2": {"tp": 2, "pp": 2},
    },
    "module": {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "tp2-pp2": {"tp": 2, "pp": 2, "recompute": -1}},
}
ATTENTION_ROWS = [(model, layout) for model, layouts in ATTENTION.items() for layout in layouts]


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Outcome]:
    root = tmp_path_factory.mktemp("attention")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    models = {
        "four-heads": make_model(root / "four", "llama", attention_dropout=0.2),
        "three-heads": make_model(root / "three", "llama", attention_dropout=0.2, **odd),
        "module": make_family(root / "module", "gpt_neo"),
    }
    cases = {
        (model, layout): Case(models[model], strategy(**{"micro_batch_size": 1, **degrees}), ROWS, 4, 2, dtype=EXACT)
        for model, layouts in ATTENTION.items()
        for layout, degrees in ({"one": {}} | layouts).items()
    }
    found = {}
    for size in (1, 2, 4):
        keys = [key for key, case in cases.items() if case.strategy.world_size == size]
        by_rank = run_distributed(run_plain, size, [cases[key] for key in keys], timeout=280)
        found |= {key: assemble([rank[i] for rank in by_rank]) for i, key in enumerate(keys)}
    return found


@pytest.mark.parametrize(("model", "layout"), ATTENTION_ROWS)
def test_attention_dropout_is_that_of_one_process(
    model: str, layout: str, attention: dict[tuple[str, str], Outcome]
) -> None:
    errors = compare(attention[model, layout], attention[model, "one"])
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.norm <= tolerance.FLOAT64_GRADIENT


# Attention and adapters under TP 2 x DP 2: what the ranks drop, and that replicas stay in step.


@contextmanager
def _watched(model: ParallelModel, seen: dict[str, list[Any]]) -> Iterator[None]:
    """Note what each decoder layer returns, the masks of adapters and those of attention."""
    original = F.scaled_dot_product_attention

    def attention(query: torch.Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> torch.Tensor:
        assert dropout_p == 0.1
        state = torch.get_rng_state()
        seen["attention"].append(torch.rand(8))  # what the kernel is about to draw from
        torch.set_rng_state(state)
        return original(query, *args, dropout_p=dropout_p, **kwargs)

    handles = [
        block.register_forward_hook(lambda _, __, out: seen["layers"].append(out.detach().clone()))
        for stage in model.stages
        for block in stage.blocks
    ]
    for name, module in [named for stage in model.stages for named in stage.named_modules()]:
        if isinstance(module, SeededDropout):
            kind = "row" if "o_proj" in name or "down_proj" in name else "column"
            handles.append(
                module.register_forward_hook(lambda _, x, out, kind=kind: seen[kind].append((out == 0) & (x[0] != 0)))
            )
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
        for handle in handles:
            handle.remove()


def _train(rank: int, case: LoraCase, steps: int) -> dict[str, Any]:
    model, mesh, _ = build(case)
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    seen: dict[str, list[Any]] = {"layers": [], "attention": [], "row": [], "column": []}
    losses = []
    for step in range(steps):
        model.begin_step(step)
        batch = next(batches)
        if step == 0:
            with _watched(model, seen):
                losses.append(train_step(model, optimizer, batch, 1e-2, 1.0, []).loss)
        else:
            losses.append(train_step(model, optimizer, batch, 1e-2, 1.0, []).loss)
    whole = [s for s in model.shards if s.layout.tp_dim is None]
    return {
        **seen,
        "losses": losses,
        "place": (mesh.coordinate("dp_shard") + mesh.coordinate("dp_replicate"), mesh.coordinate("tp")),
        "replicated": {s.layout.name: ([p.whole for p in s.layout.pieces], s.data.clone()) for s in whole},
    }


@pytest.fixture(scope="module", params=["dp_shard", "dp_replicate"])
def ranks(request: pytest.FixtureRequest, folders: dict[str, Path]) -> dict[tuple[int, int], dict[str, Any]]:
    case = replace(_case(folders, "attention", tp=2, **{request.param: 2}), dtype=torch.float32, train=ADAMW)
    return {result["place"]: result for result in run_distributed(_train, 4, case, 20)}


def _equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    assert len(a) == len(b) > 0
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("data", [0, 1])
def test_replicated_tensors_are_bit_equal_inside_a_tensor_group(ranks: Any, data: int) -> None:
    first, second = ranks[data, 0], ranks[data, 1]
    assert _equal(first["layers"], second["layers"])
    assert _equal(first["column"], second["column"])
    assert any(mask.any() for mask in first["column"])
    assert not _equal(first["row"], second["row"])
    for mine, other in zip(first["attention"], second["attention"], strict=True):
        assert not torch.equal(mine, other)


def test_masks_differ_between_data_ranks(ranks: Any) -> None:
    for tensor in (0, 1):
        first, second = ranks[0, tensor], ranks[1, tensor]
        for kind in ("column", "row", "attention"):
            # Each rank's first micro-batch: rows are padded to one length within the step.
            assert not torch.equal(first[kind][0], second[kind][0])


def test_parameters_stay_in_step_for_twenty_steps(ranks: Any) -> None:
    for data in (0, 1):
        first, second = ranks[data, 0]["replicated"], ranks[data, 1]["replicated"]
        assert first.keys() == second.keys()
        assert any("lora_A" in name for name in first)
        for name, (place, values) in first.items():
            assert place == second[name][0]
            assert torch.equal(values, second[name][1]), name
    assert len({tuple(result["losses"]) for result in ranks.values()}) == 1


def _all_again(rank: int, cases: list[LoraCase]) -> list[list[Any]]:
    return [_again(case) for case in cases]


def _again(case: LoraCase) -> list[Any]:
    """One step's loss and gradients, at step 3, twice, and at step 4."""
    model, mesh, _ = build(case)
    batch = next(loader_of(case, mesh).batches())
    found = []
    for step in (3, 3, 4):
        model.begin_step(step)
        loss = model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens)
        found.append((loss, [s.grad.clone() for s in model.shards if s.grad is not None]))
        model.zero_grad()
    return found


@pytest.mark.parametrize("layouts", [[{}], [{"pp": 2}, {"tp": 2}]], ids=["one", "two"])
def test_attention_dropout_comes_again_at_its_step_and_under_recompute(
    folders: dict[str, Path], layouts: list[dict[str, Any]]
) -> None:
    cases = [_case(folders, "attention", **degrees, recompute=blocks) for degrees in layouts for blocks in (0, -1)]
    by_rank = run_distributed(_all_again, cases[0].strategy.world_size, cases)
    for plain, again in [pair for rank in by_rank for pair in zip(rank[::2], rank[1::2], strict=True)]:
        (loss, gradients), (same_loss, same_gradients), (_, other_gradients) = plain
        assert loss == same_loss
        assert _equal(gradients, same_gradients)
        assert not _equal(gradients, other_gradients)
        for (a, first), (b, second) in zip(plain, again, strict=True):
            assert a == pytest.approx(b, rel=1e-12)
            assert all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in zip(first, second, strict=True))
