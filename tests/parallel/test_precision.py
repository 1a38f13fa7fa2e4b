"""bf16 with fp32 masters: what is kept in which dtype, and that no layout changes the numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shardwise.checkpoint.hf import load_slices
from shardwise.checkpoint.naming import naming_of_folder
from shardwise.models.build import build_on_meta
from shardwise.models.shard import Master, Shard, follow_masters, local
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import build_mesh
from shardwise.parallel.model import ParallelModel
from shardwise.spec import tolerance
from shardwise.spec.layout import ParamLayout
from shardwise.spec.run import LoraConfig, TrainConfig
from shardwise.testing import run_distributed
from shardwise.train.optim import Optimizer
from shardwise.train.step import train_step
from tests.fixtures import make_model, make_rows
from tests.long import EVERYTHING
from tests.parallel import lora_harness
from tests.parallel.families import make_family
from tests.parallel.harness import (
    ADAMW,
    SGD,
    Case,
    Outcome,
    RankPart,
    assemble,
    build,
    compare,
    loader_of,
    reference,
    run_case,
    run_cases,
    strategy,
)
from tests.parallel.layouts import LAYOUTS as COMMON
from tests.parallel.tables import Table

LAYOUTS: dict[str, dict[str, Any]] = COMMON | {"tp2-sequence": {"tp": 2, "sequence_parallel": True}}
if EVERYTHING:
    LAYOUTS["tp2-pp2-sequence"] = {"tp": 2, "pp": 2, "sequence_parallel": True}
MODELS = ("llama", "qwen3-tied")
TABLE = [(model, layout) for model in MODELS for layout in LAYOUTS]
# Each axis alone and all together; the second model and AdamW repeat some, unless everything is asked for.
FEW: dict[str, list[tuple[str, str]]] = {
    "sgd": [
        *(
            ("llama", name)
            for name in ("one", "tp2", "pp2", "dp_replicate2", "dp_shard2", "tp2-pp2-dp2", "tp2-sequence")
        ),
        *(("qwen3-tied", name) for name in ("tp2", "pp2")),
    ],
    "adamw": [("llama", "tp2"), ("llama", "dp_shard2")],
    "adapters": [("llama", "pp2"), ("llama", "dp_shard2"), ("qwen3-tied", "tp2")],
}
CASES = [(row, optimizer) for optimizer in ("sgd", "adamw") for row in (TABLE if EVERYTHING else FEW[optimizer])]
STEPS = 20


def _case(folder: Path, layout: str, train: TrainConfig) -> Case:
    rows = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16, 9)))
    return Case(folder, strategy(**LAYOUTS[layout]), rows, 4, STEPS, train, torch.bfloat16, eval_batch_size=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), name) for name in MODELS}


@cache
def _reference(folder: Path, optimizer: str, dtype: torch.dtype) -> Outcome:
    return reference(replace(_case(folder, "one", {"sgd": SGD, "adamw": ADAMW}[optimizer]), dtype=dtype))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Table:
    trains = {"sgd": SGD, "adamw": ADAMW}
    return Table({(*row, kind): _case(folders[row[0]], row[1], trains[kind]) for row, kind in CASES})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "optimizer"), CASES, ids=lambda part: part if isinstance(part, str) else "/".join(part)
)
def test_equals_one_process_in_bf16(
    row: tuple[str, str], optimizer: str, folders: dict[str, Path], outcomes: Table, note_error: Any
) -> None:
    """Loss by loss; a row above the limit counts only as far as one process is from itself in fp32 (a third).

    Twenty steps of these models magnify rounding, so the gradient of step 1 is the sharp test: it may not
    be further from fp32 than one process in bf16 is, or a sum is kept in bf16 that should not be.
    """
    folder = folders[row[0]]
    got = outcomes[*row, optimizer]
    want = _reference(folder, optimizer, torch.bfloat16)
    exact = _reference(folder, optimizer, torch.float32)
    errors, rounding = compare(got, want), compare(want, exact)
    note_error(f"bf16 {optimizer} loss", errors.loss)
    limit = max(tolerance.BF16_LOSS, 3 * rounding.loss)
    assert errors.loss <= limit
    ours, own = _distance(got.gradients, exact.gradients), _distance(want.gradients, exact.gradients)
    note_error("bf16 gradient, times one process's", ours / own)
    assert ours <= 1.1 * own
    assert got.eval_loss is not None
    assert want.eval_loss is not None
    assert abs(got.eval_loss - want.eval_loss) <= limit * want.eval_loss


def _distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.sqrt(sum(((a[name].double() - b[name].double()) ** 2).sum() for name in b)))


def test_67_masters_move_where_bf16_would_stand_still() -> None:
    """areal-project/AReaL 1292, accelerate 3979: 100 steps of 1e-3 from 1.0 end at 0.90."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    shard = Shard(ParamLayout("w", (3,)), parameter, Master(parameter))
    shard.data.fill_(1.0)
    optimizer = Optimizer([shard], TrainConfig(optimizer="sgd", learning_rate=1e-3))
    for _ in range(100):
        follow_masters([shard])
        parameter.sum().backward()
        assert shard.grad is not None
        assert shard.grad.dtype is torch.float32
        assert parameter.grad is None
        optimizer.step(1e-3)
        shard.set_grad(None)
    follow_masters([shard])
    assert shard.data.tolist() == pytest.approx([0.9] * 3, abs=1e-5)
    assert parameter.dtype is torch.bfloat16
    assert torch.equal(parameter, shard.data.bfloat16())
    plain = torch.ones(3, dtype=torch.bfloat16)
    for _ in range(100):
        plain -= 1e-3
    assert plain.tolist() == [1.0] * 3, "a bf16 weight moves by itself: this test shows nothing"


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    """256 and 1 have no sum in bf16."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    shard = Shard(ParamLayout("w", (1,)), parameter, Master(parameter))
    for factor in (256.0, 1.0, 1.0):
        (parameter * factor).sum().backward()
    assert shard.grad is not None
    assert shard.grad.tolist() == [258.0]


# Nothing and each axis alone, of two ranks, so that ranks are started twice.
AXES: dict[int, list[dict[str, int]]] = {1: [{}], 2: [{"dp_shard": 2}, {"tp": 2}, {"pp": 2}, {"dp_replicate": 2}]}


def _all_dtypes(rank: int, cases: list[Case]) -> list[dict[str, set[str]]]:
    return [_dtypes(case) for case in cases]


def _dtypes(case: Case) -> dict[str, set[str]]:
    """The dtypes that a step meets, by what they are of."""
    model, mesh = build(case)
    optimizer = Optimizer(model.shards, case.train)
    seen: dict[str, set[str]] = {"activations": set(), "border": set()}

    def note(_: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        seen["activations"] |= {str(output.dtype), str(inputs[0].dtype)}

    (stage,) = model.stages
    for block in stage.blocks:
        block.register_forward_hook(note)
    stage.register_forward_hook(lambda _, inputs, output: seen["border"].add(str(output.dtype)))
    batch = next(loader_of(case, mesh).batches())
    model.forward_backward(batch.input_ids, batch.targets, batch.position_ids, batch.num_tokens)
    seen["gradients"] = {str(shard.ensure_grad().dtype) for shard in model.shards}
    model.zero_grad()
    train_step(model, optimizer, batch, 1e-3, 1.0, [])
    seen["values"] = {str(shard.data.dtype) for shard in model.shards}
    seen["states"] = {str(value.dtype) for slot in optimizer.slots for _, value in optimizer.state(slot)}
    seen["buffers"] = {str(buffer.dtype) for buffer in stage.buffers()}
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("size", AXES)
def test_67_what_is_kept_in_fp32_and_what_is_not(size: int, folders: dict[str, Path]) -> None:
    case = _case(folders["llama"], "one", ADAMW)
    cases = [replace(case, strategy=strategy(**degrees)) for degrees in AXES[size]]
    low, full = {"torch.bfloat16"}, {"torch.float32"}
    for rank in run_distributed(_all_dtypes, size, cases):
        for degrees, seen in zip(AXES[size], rank, strict=True):
            assert (seen["activations"], seen["border"]) == (low, low), degrees
            assert (seen["values"], seen["states"], seen["gradients"], seen["buffers"]) == (full,) * 4, degrees


LORA = LoraConfig(r=4, alpha=8.0)


@pytest.mark.slow
def test_adapters_beside_a_bf16_model_equal_one_process(
    folders: dict[str, Path], tmp_path: Path, note_error: Any
) -> None:
    """The one process computes adapters in bf16 from fp32 masters, as ours do; plain peft would in fp32."""
    adapters = {name: lora_harness.make_adapter(folders[name], tmp_path / name, LORA) for name in MODELS}
    cases = {
        row: lora_harness.LoraCase(
            **{**vars(_case(folders[row[0]], row[1], ADAMW)), "lora": LORA, "adapter": adapters[row[0]]}
        )
        for row in (TABLE if EVERYTHING else FEW["adapters"])
    }
    for size in sorted({case.strategy.world_size for case in cases.values()}):
        here = {row: case for row, case in cases.items() if case.strategy.world_size == size}
        by_rank = run_distributed(lora_harness.run_cases, size, list(here.values()))
        for index, (row, case) in enumerate(here.items()):
            parts = [rank[index] for rank in by_rank]
            errors = compare(assemble(parts), lora_harness.reference(case))
            note_error("bf16 lora loss", errors.loss)
            assert errors.loss <= tolerance.BF16_LOSS, row
            assert all(part.frozen_kept for part in parts), row
            assert {values.dtype for part in parts for _, values in part.weights + part.gradients} == {torch.float32}


def _all_frozen(rank: int, cases: list[Case]) -> list[Any]:
    return [_frozen(case) for case in cases]


def _frozen(case: Case) -> tuple[list[float | None], list[tuple[str, bool, str, str, bool, bool]]]:
    """Three steps with all but the query projections frozen."""
    mesh = build_mesh(case.strategy, torch.device("cpu"))
    hf_model = build_on_meta(case.folder, "sdpa", case.dtype)
    naming = naming_of_folder(case.folder, hf_model)
    for name, parameter in hf_model.named_parameters():
        parameter.requires_grad_("q_proj" in name)
    model, _ = parallelize(hf_model, mesh)
    load_slices(case.folder, model.shards, naming)
    before = [shard.data.clone() for shard in model.shards]
    optimizer = Optimizer(model.shards, case.train)
    batches = loader_of(case, mesh).batches()
    losses = [train_step(model, optimizer, next(batches), 1e-2, 1.0, []).loss for _ in range(3)]
    return losses, [
        (
            shard.layout.name,
            shard.parameter.requires_grad,
            str(local(shard.parameter).dtype),
            str(shard.data.dtype),
            shard.grad is None,
            torch.equal(was, shard.data),
        )
        for was, shard in zip(before, model.shards, strict=True)
    ]


@pytest.mark.slow
def test_frozen_parameters_keep_bf16_alone(folders: dict[str, Path]) -> None:
    """No master, no gradient, not a bit changed; what trains beside them has its master."""
    case = _case(folders["llama"], "one", SGD)
    (alone,) = run_distributed(_all_frozen, 1, [case])
    cases = [replace(case, strategy=strategy(**degrees)) for degrees in AXES[2]]
    results = [({}, alone[0])]
    results += [pair for rank in run_distributed(_all_frozen, 2, cases) for pair in zip(AXES[2], rank, strict=True)]
    for degrees, (losses, shards) in results:
        assert losses == pytest.approx(alone[0][0], rel=tolerance.BF16_LOSS)
        for name, trains, stored, values, no_gradient, unchanged in shards:
            assert trains is ("q_proj" in name)
            assert no_gradient
            assert unchanged is not trains
            assert values == ("torch.float32" if trains else "torch.bfloat16")
            sharded = "dp_shard" in degrees
            assert stored == ("torch.float32" if trains and sharded else "torch.bfloat16")


def _gates(rank: int, case: Case) -> tuple[RankPart, set[str], list[torch.Tensor]]:
    """A run, the dtypes in which routers compute, and the corrections of their scores after it."""
    seen: set[str] = set()
    corrections: list[torch.Tensor] = []

    def look(model: ParallelModel) -> None:
        for stage in model.stages:
            for name, module in stage.named_modules():
                if name.endswith("mlp.gate"):
                    seen.update(str(p.dtype) for p in module.parameters())
                    corrections.append(local(module.e_score_correction_bias.detach()).clone())

    return run_case(case, look), seen, corrections


@pytest.mark.slow
def test_what_the_model_keeps_in_fp32_is_not_rounded(tmp_path: Path) -> None:
    """DeepSeek-V3's routers: with a rounded weight the gradient is five times as far from one process's as here.

    Every expert is chosen, so that rounding elsewhere cannot change a choice.
    """
    folder = make_family(tmp_path, "deepseek_v3", num_experts_per_tok=4, topk_group=2)
    base = replace(_case(folder, "one", SGD), steps=2)
    want, exact = reference(base), reference(replace(base, dtype=torch.float32))
    own = compare(want, exact).gradient
    stored = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    held = {id(value): value for name, value in stored.items() if name.endswith("e_score_correction_bias")}.values()
    assert all(bool((value != value.bfloat16()).any()) for value in held)
    for degrees in ({"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"pp": 2}):
        case = replace(base, strategy=strategy(**degrees))
        ranks = run_distributed(_gates, case.strategy.world_size, case)
        assert {dtype for _, seen, _ in ranks for dtype in seen} == {"torch.float32"}
        assert all(biases for _, _, biases in ranks)
        assert all(any(torch.equal(bias, value) for value in held) for _, _, biases in ranks for bias in biases)
        assert compare(assemble([part for part, _, _ in ranks]), want).gradient <= own / 10, degrees


@pytest.mark.slow
def test_what_enters_a_block_is_not_rounded(tmp_path: Path) -> None:
    """Mamba 2 keeps its residual stream in fp32: shards compute to the bit what replicas do."""
    case = replace(_case(make_family(tmp_path, "mamba2"), "one", SGD), steps=1)
    found = [
        assemble([part for (part,) in run_distributed(run_cases, 2, [replace(case, strategy=strategy(**degrees))])])
        for degrees in ({"dp_replicate": 2}, {"dp_shard": 2})
    ]
    assert found[0].losses == found[1].losses
    assert compare(found[1], found[0]).gradient == 0
