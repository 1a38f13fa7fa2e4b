"""Faults that other training systems had, each as a small input with its right result (groups A to D).

The number in a name is that of the case; the thread that reported it stands in the docstring. What the
parity table holds already (1, 2, 4, 16 to 18, 32, 37) is not repeated here.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.companions import Companions
from shardwise.checkpoint.export import export_model
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.models.build import build_on_meta
from shardwise.models.init import distributions, fill_random
from shardwise.models.shard import take
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import build_mesh
from shardwise.spec import tolerance
from shardwise.spec.layout import ParamLayout
from shardwise.spec.run import TrainConfig
from shardwise.spec.strategy import Strategy
from shardwise.testing import run_distributed
from shardwise.train.optim import Optimizer
from shardwise.train.step import evaluate, train_step
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel.harness import (
    SGD,
    Case,
    assemble,
    build,
    compare,
    loader_of,
    parity,
    reference,
    run_cases,
    strategy,
)

pytestmark = pytest.mark.slow
ROWS = tuple(make_rows())
INTERLEAVED: dict[str, Any] = {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}
FROZEN = TrainConfig(optimizer="sgd", learning_rate=0.0, lr_scheduler="constant")


def _holds(case: Case) -> None:
    errors = parity(case)
    assert errors.loss <= tolerance.FP32_LOSS
    assert errors.norm <= tolerance.FP32_NORM
    assert errors.gradient <= tolerance.FP32_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.SGD_WEIGHTS


def _run(case: Case) -> Any:
    return assemble([rank[0] for rank in run_distributed(run_cases, case.strategy.world_size, [case])])


def test_04_loss_is_multiplied_by_data_ranks_alone(tmp_path: Path) -> None:
    """huggingface/transformers PR 45994: an untrained model reads about ln(vocabulary), under DP x TP too."""
    folder = tmp_path / "untrained"
    AutoModelForCausalLM.from_config(
        AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "t", "llama")).config
    ).save_pretrained(folder)
    got = _run(Case(folder, strategy(tp=2, dp_shard=2), ROWS, 8, 1, FROZEN))
    assert got.losses[0] == pytest.approx(math.log(132), rel=0.02)


def test_05_short_last_batch_weighs_what_it_holds(tmp_path: Path) -> None:
    """huggingface/transformers 38837: ten equal rows, four a step: three equal losses and norms, all rows used."""
    rows = tuple(make_rows((8,))) * 10
    for degrees in ({"dp_shard": 2, "micro_batch_size": 1}, {"pp": 2}):
        folder = make_model(tmp_path / str(degrees), "llama")
        got = _run(Case(folder, strategy(**degrees), rows, 4, 3, FROZEN))
        assert got.losses == pytest.approx([got.losses[0]] * 3, rel=1e-6)
        assert got.norms == pytest.approx([got.norms[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("degrees", [{"dp_replicate": 2}, {"dp_shard": 4}, {"pp": 2, "dp_shard": 2}])
def test_07_and_40_evaluation_counts_every_row_once(tmp_path: Path, degrees: dict[str, int]) -> None:
    """huggingface/transformers 35078, Megatron-Bridge PR 6025: five rows, two at a time, over any ranks."""
    rows = tuple(make_rows((4, 9, 6, 12, 5)))
    case = Case(make_model(tmp_path, "llama"), strategy(**degrees), rows, 4, 1, FROZEN, eval_batch_size=2)
    want = reference(case).eval_loss
    assert _run(case).eval_loss == pytest.approx(want, rel=1e-6)


def _all_masked(rank: int, case: Case) -> tuple[Any, ...]:
    model, mesh = build(case)
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    before = [shard.data.clone() for shard in model.shards]
    masked = train_step(model, optimizer, next(batches), 0.1, 1.0, [])
    unchanged = all(torch.equal(b, s.data) for b, s in zip(before, model.shards, strict=True))
    good = train_step(model, optimizer, next(batches), 0.1, 1.0, [])
    return masked.loss, unchanged, good.loss, good.grad_norm


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}, {"pp": 2}])
def test_08_a_step_without_supervised_tokens_changes_nothing(tmp_path: Path, degrees: dict[str, int]) -> None:
    """huggingface/trl 6668: neither NaN nor a silent zero; the next step is as if it had been the first."""
    masked = tuple({"input_ids": row["input_ids"], "labels": [-100] * len(row["input_ids"])} for row in ROWS[:4])
    case = Case(make_model(tmp_path, "llama"), strategy(**degrees), masked + ROWS[4:], 4, 2, SGD)
    want = reference(replace(case, rows=ROWS[4:], steps=1))
    for loss, unchanged, next_loss, next_norm in run_distributed(_all_masked, case.strategy.world_size, case):
        assert loss is None
        assert unchanged
        assert next_loss == pytest.approx(want.losses[0], rel=tolerance.FP32_LOSS)
        assert next_norm == pytest.approx(want.norms[0], rel=tolerance.FP32_NORM)


def _export(rank: int, case: Case, target: Path) -> float:
    model, mesh = build(case)
    optimizer = Optimizer(model.shards, case.train)
    loader = loader_of(case, mesh)
    batches = loader.batches()
    for _ in range(2):
        train_step(model, optimizer, next(batches), 0.05, 1.0, [])
    naming = naming_of_folder(case.folder, build_on_meta(case.folder, "sdpa"))
    export_model(Companions(case.folder), target, naming, model.shards)
    return evaluate(model, loader.eval_batches(4))[0]


EXPORTED: list[dict[str, Any]] = [{"tp": 4}, {"dp_shard": 3}, INTERLEAVED, {"tp": 2}, {"pp": 2, "dp_shard": 2}]
# An odd vocabulary is cut by the first three; a tie shows where its ends are on two stages.
FEW = [("llama-odd", degrees) for degrees in EXPORTED[:3]] + [("llama-tied", EXPORTED[4])]


@pytest.mark.parametrize(
    ("name", "degrees"), list(product(("llama-odd", "llama-tied"), EXPORTED)) if EVERYTHING else FEW
)
def test_10_and_61_export_has_the_shapes_and_names_of_the_input(
    tmp_path: Path, name: str, degrees: dict[str, Any]
) -> None:
    """ColossalAI 6167, accelerate 2155: nothing padded, dropped or renamed; plain transformers goes on from it."""
    folder, target = make_model(tmp_path / "in", name), tmp_path / "out"
    split = strategy(5 if name == "llama-odd" else 4, **degrees)
    case = Case(folder, split, ROWS, 6 if split.dp == 3 else 4, 2)
    live = run_distributed(_export, split.world_size, case, target)[0]
    before, after = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
    assert {n: t.shape for n, t in before.items()} == {n: t.shape for n, t in after.items()}
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.vocab_size == (131 if name == "llama-odd" else 132)
    plain = reference(Case(target, strategy(), ROWS, 4, 1, FROZEN, eval_batch_size=4))
    assert plain.eval_loss == pytest.approx(live, rel=1e-6)


def test_11_odd_vocabulary_does_not_drift(tmp_path: Path) -> None:
    """Megatron-LM 1754: fifty steps with 131 ids on two ranks.

    Rounding grows over fifty steps, so the float64 run is the judge; the fp32 run may be above its limit
    only as far as one process in fp32 is from itself in float64 (a third of it at least).
    """
    case = Case(make_model(tmp_path, "llama-odd"), strategy(5, tp=2), ROWS, 4, 50)
    exact = replace(case, dtype=torch.float64)
    sharp, errors = parity(exact), parity(case)
    assert max(sharp.loss, sharp.norm, sharp.gradient, sharp.weight) <= tolerance.FLOAT64_GRADIENT
    rounding = compare(reference(case), reference(exact))
    assert errors.loss <= max(tolerance.FP32_LOSS, 3 * rounding.loss)
    assert errors.norm <= max(tolerance.FP32_NORM, 3 * rounding.norm)
    assert errors.weight <= tolerance.SGD_WEIGHTS


def test_14_ffn_width_that_tp_does_not_divide(tmp_path: Path) -> None:
    """pytorch/pytorch 150336."""
    for degrees in ({"tp": 2}, {"tp": 2, "dp_shard": 2}):
        folder = make_model(tmp_path / str(degrees), "llama", intermediate_size=47)
        _holds(Case(folder, strategy(**degrees), ROWS, 4, 2))


@pytest.mark.parametrize("degrees", [{}, {"tp": 2}])
def test_16_heads_whose_ratio_is_not_whole(tmp_path: Path, degrees: dict[str, int]) -> None:
    """EleutherAI/gpt-neox 1314: 80 wide, 10 heads, 2 KV heads."""
    folder = make_model(tmp_path, "llama", hidden_size=80, num_attention_heads=10, num_key_value_heads=2)
    _holds(Case(folder, strategy(**degrees), ROWS, 4, 2))


@pytest.mark.parametrize(("blocks", "pp"), [(7, 2), (7, 3), (10, 3)])
def test_17_no_block_is_lost_in_an_uneven_cut(tmp_path: Path, blocks: int, pp: int) -> None:
    """Megatron-LM 1304: 30 layers over 4 stages trained 28."""
    _holds(Case(make_model(tmp_path, "llama", num_hidden_layers=blocks), strategy(blocks, pp=pp), ROWS, 4, 2))


@pytest.mark.parametrize("tp", [2, 4])
def test_23_row_bias_is_added_once(tmp_path: Path, tp: int) -> None:
    """text-generation-inference 1036: biases everywhere, large enough to show."""
    folder = make_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    _holds(Case(folder, strategy(tp=tp), ROWS, 4, 2))


def _seen(rank: int, case: Case) -> tuple[int, int, int, list[list[int]]]:
    mesh = build_mesh(case.strategy, torch.device("cpu"))
    loader = loader_of(case, mesh)
    batches = loader.batches()
    ids = [next(batches).input_ids.flatten().tolist() for _ in range(loader.steps_per_epoch)]
    return mesh.data_rank, mesh.coordinate("tp"), mesh.coordinate("pp"), ids


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2}, {"tp": 2, "pp": 2}])
def test_25_tensor_and_pipeline_ranks_see_the_same_rows(tmp_path: Path, degrees: dict[str, int]) -> None:
    """DeepSpeed 7199: equal inside a tensor or pipeline group, different over data ranks."""
    case = Case(make_model(tmp_path, "llama"), strategy(**degrees), ROWS, 4, 1)
    by_data_rank: dict[int, list[list[int]]] = {}
    for data_rank, _, _, ids in run_distributed(_seen, 4, case):
        assert by_data_rank.setdefault(data_rank, ids) == ids
    assert len({str(ids) for ids in by_data_rank.values()}) == case.strategy.dp


@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 4}, {"tp": 2, "dp_shard": 2}])
def test_26_and_28_clipping_counts_each_element_once(tmp_path: Path, degrees: dict[str, int]) -> None:
    """NeMo/RL PR 3788, pytorch 180346: norms, and the weights after three clipped steps."""
    train = SGD.model_copy(update={"max_grad_norm": 0.1})
    _holds(Case(make_model(tmp_path, "qwen3"), strategy(**degrees), ROWS, 8, 3, train))


def _frequencies(rank: int, folder: Path, split: Strategy) -> list[torch.Tensor]:
    model, _ = build(Case(folder, split, ROWS))
    return [b.clone() for s in model.stages for n, b in s.named_buffers() if n.endswith("rotary_emb.inv_freq")]


def test_31_rotary_frequencies_are_recomputed_on_every_rank(tmp_path: Path) -> None:
    """huggingface/transformers 45902: built on meta they are garbage."""
    parameters = {"rope_type": "default", "rope_theta": 500000.0}
    folder = make_model(tmp_path, "llama", rope_parameters=parameters)
    want = AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb.inv_freq
    for frequencies in run_distributed(_frequencies, 4, folder, strategy(pp=2, dp_shard=2)):
        assert len(frequencies) == 1
        assert torch.equal(frequencies[0], want)


def test_34_tied_head_on_stages_that_lack_the_embedding(tmp_path: Path) -> None:
    """Megatron-Bridge PR 957: five blocks on three stages, no lm_head in the file."""
    folder = make_model(tmp_path, "llama-tied", num_hidden_layers=5)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    _holds(Case(folder, strategy(5, pp=3), ROWS, 4, 3))


@pytest.mark.parametrize("drop_last", [False, True])
def test_38_last_incomplete_batch_under_a_pipeline(tmp_path: Path, drop_last: bool) -> None:
    """DeepSpeed 326: ten rows, four a step, two epochs."""
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 5, 7)))
    steps = 4 if drop_last else 6
    _holds(Case(make_model(tmp_path, "llama"), strategy(pp=2), rows, 4, steps, drop_last=drop_last))


@pytest.mark.parametrize(
    "degrees",
    [
        {"pp": 4},
        {"pp": 2, "dp_shard": 2},
        {"dp_shard": 3, "micro_batch_size": 1},
        INTERLEAVED,
    ],
)
def test_fewer_rows_than_micro_batches_stages_or_data_ranks(tmp_path: Path, degrees: dict[str, int]) -> None:
    """One row in the whole step: the other micro-batches and data ranks run masked rows."""
    split = strategy(**degrees)
    size = split.dp * split.micro_batch_size * max(1, split.pp)
    _holds(Case(make_model(tmp_path, "llama-tied"), split, ROWS[6:7], size, 2))


def _all_initial(rank: int, folder: Path, splits: list[Strategy]) -> list[Any]:
    return [_initial(folder, split) for split in splits]


def _initial(folder: Path, split: Strategy) -> list[tuple[ParamLayout, torch.Tensor]]:
    mesh = build_mesh(split, torch.device("cpu"))
    hf_model = build_on_meta(folder, "sdpa")
    dists = distributions(hf_model)
    model, _ = parallelize(hf_model, mesh)
    fill_random(model.shards, dists, seed=7)
    return [(shard.layout, shard.data.clone()) for shard in model.shards]


@pytest.mark.parametrize("name", ["llama-odd", "qwen3-tied"])
def test_random_values_are_bit_equal_under_every_layout(tmp_path: Path, name: str) -> None:
    folder = make_model(tmp_path, name, vocab_size=2051)  # more than two chunks of rows
    blocks = 5 if name == "llama-odd" else 4
    whole: dict[str, torch.Tensor] = {}
    for layout, values in run_distributed(_all_initial, 1, folder, [strategy(blocks)])[0][0]:
        whole[layout.name] = values
    assert whole["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert torch.equal(whole["model.norm.weight"], torch.ones(32))
    layouts = ({"tp": 2}, {"pp": 2}, INTERLEAVED, {"dp_shard": 3}, {"tp": 2, "pp": 2, "dp_shard": 2})
    splits = [strategy(blocks, **degrees) for degrees in layouts]
    for size in (2, 3, 8):
        here = [split for split in splits if split.world_size == size]
        assert here
        parts = [part for rank in run_distributed(_all_initial, size, folder, here) for part in rank]
        for layout, values in (pair for part in parts for pair in part):
            assert torch.equal(values, take(whole[layout.source], layout))


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"dp_replicate": 2, "dp_shard": 2}])
def test_two_runs_with_one_seed_are_bit_equal(tmp_path: Path, degrees: dict[str, int]) -> None:
    case = Case(make_model(tmp_path, "llama-tied"), strategy(**degrees), ROWS, 4, 4)
    first, second = _run(case), _run(case)
    assert first.losses == second.losses
    assert all(torch.equal(first.weights[n], w) for n, w in second.weights.items())
    assert compare(first, second).weight == 0.0
