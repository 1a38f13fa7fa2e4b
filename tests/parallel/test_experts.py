"""The auxiliary loss of experts: the stated formula, under every plan (fault case 70)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.models.routers import Routers
from shardwise.parallel.balance import Balance, balance_loss
from shardwise.spec import tolerance
from shardwise.testing import run_distributed
from tests.fixtures import make_rows
from tests.parallel.exact import Exact
from tests.parallel.families import make_family
from tests.parallel.harness import Case, Outcome, assemble, compare, run_cases, strategy

pytestmark = pytest.mark.slow
ROWS = tuple(make_rows((4, 6, 8, 10, 12, 14, 16, 16)))
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"micro_batch_size": 2},
    "one-m4": {"micro_batch_size": 4},
    "dp_shard2": {"dp_shard": 2, "micro_batch_size": 2},
    "dp_replicate2": {"dp_replicate": 2, "micro_batch_size": 2},
    "pp2": {"pp": 2, "micro_batch_size": 2},
    "pp2-zero-bubble": {"pp": 2, "micro_batch_size": 2, "schedule": "zero_bubble"},
    "pp2-interleaved": {"pp": 2, "micro_batch_size": 2, "schedule": "interleaved", "virtual_stages": 2},
    "pp2-gpipe": {"pp": 2, "micro_batch_size": 2, "schedule": "gpipe"},
    "pp2-recompute": {"pp": 2, "micro_batch_size": 2, "recompute": -1},
    "one-recompute": {"micro_batch_size": 2, "recompute": -1},
    "dp_shard2-recompute": {"dp_shard": 2, "micro_batch_size": 2, "recompute": -1},
    "pp2-dp2": {"pp": 2, "dp_shard": 2, "micro_batch_size": 1},
    "pp4": {"pp": 4, "micro_batch_size": 1},
    "tp2": {"tp": 2, "micro_batch_size": 2},
    "tp2-sequence": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2},
    "tp2-sequence-recompute": {"tp": 2, "sequence_parallel": True, "micro_batch_size": 2, "recompute": -1},
    "tp4-sequence": {"tp": 4, "sequence_parallel": True, "micro_batch_size": 2},  # which does not divide 10 positions
}


def _padded(rows: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids, targets = torch.zeros(len(rows), length, dtype=torch.int64), torch.full((len(rows), length), -100)
    mask = torch.zeros_like(ids)
    for place, row in enumerate(rows):
        size = len(row["input_ids"])
        ids[place, :size], mask[place, :size] = torch.tensor(row["input_ids"]), 1
        targets[place, : size - 1] = torch.tensor(row["labels"][1:])
    return ids, targets, mask


@cache
def _one_process(folder: Path, micro_batch_size: int) -> Outcome:
    """Plain transformers: token loss of the global batch, and transformers' own balance loss, block by block."""
    case = _case(folder, "one")
    with Exact():
        model = AutoModelForCausalLM.from_pretrained(case.folder, dtype=case.dtype, experts_implementation="eager")
        config = model.train().config
        out = Outcome([], [], {}, {})
        size = case.global_batch_size
        for start in range(0, len(case.rows), size):
            loss = _loss(model, config, case.rows[start : start + size], micro_batch_size)
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
            out.gradients = out.gradients or gradients
            out.losses.append(loss.item())
            out.norms.append(float(torch.stack([g.norm() for g in gradients.values()]).norm()))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= case.train.learning_rate * parameter.grad
            model.zero_grad()
        out.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        return out


def _loss(model: Any, config: Any, rows: Any, micro_batch_size: int) -> torch.Tensor:
    all_tokens = sum(len(row["input_ids"]) for row in rows)
    supervised = sum(sum(label != -100 for label in row["labels"][1:]) for row in rows)
    loss = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(rows), micro_batch_size):
        ids, targets, mask = _padded(rows[start : start + micro_batch_size])
        out = model(input_ids=ids, attention_mask=mask, use_cache=False, output_router_logits=True)
        loss = (
            loss
            + torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum")
            / supervised
        )
        per_block = [_balance(logits, mask.flatten(), config.num_experts_per_tok) for logits in out.router_logits]
        share = float(mask.sum()) / all_tokens
        loss = loss + config.router_aux_loss_coef * share * sum(per_block) / len(per_block)
    return loss


def _balance(logits: torch.Tensor, mask: torch.Tensor, top_k: int) -> torch.Tensor:
    """The formula token by token. transformers' own rounds its fractions to fp32, also in a float64 model."""
    tokens = [logits[place].softmax(-1) for place in range(len(mask)) if mask[place]]
    used = torch.zeros(logits.shape[-1], dtype=torch.float64)
    for probabilities in tokens:
        used[probabilities.topk(top_k).indices] += 1 / len(tokens)
    return logits.shape[-1] * (used * sum(tokens) / len(tokens)).sum()


@pytest.mark.parametrize("experts", [2, 5, 8])
def test_70_one_block_and_micro_batch_agree_with_transformers(experts: int) -> None:
    torch.manual_seed(experts)
    logits, mask = torch.randn(24, experts), torch.rand(24) > 0.3
    want = load_balancing_loss_func((logits,), experts, 2, mask.long())
    assert float(balance_loss(logits, mask, 2)) == pytest.approx(float(want), rel=1e-6)
    even = torch.zeros(24, experts)  # all probabilities equal: the least value is the number of experts a token has
    assert float(balance_loss(even, mask, 2)) == pytest.approx(2.0)


class _Listing(torch.nn.Module):
    """A block whose router, and which itself, answers by a list or by a tuple."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.gate, self.kind = torch.nn.Linear(6, 3), kind
        self.gate.register_forward_hook(lambda *call: kind([call[-1], None]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.kind([x * self.gate(x)[0].sum(), None])


@pytest.mark.parametrize("kind", [list, tuple])
def test_70_answers_may_be_lists(kind: type) -> None:
    torch.manual_seed(0)
    block, x = _Listing(kind), torch.randn(2, 5, 6, requires_grad=True)
    balance = Balance(block, [block], Routers(("gate",), 0, 2, 0.5))
    balance.begin(torch.tensor([[5, 3]]), 8)
    balance.next_micro_batch(5)
    out = block(x)
    assert type(out) is kind
    assert out[1] is None
    out[0].sum().backward()
    mask = torch.tensor([True] * 8 + [False] * 2)
    logits = torch.nn.functional.linear(x.detach(), block.gate.weight, block.gate.bias).flatten(0, 1)
    assert balance.finish() == pytest.approx(0.5 * float(balance_loss(logits, mask, 2)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    def make(name: str, coefficient: float) -> Path:
        changes = {"output_router_logits": True, "router_aux_loss_coef": coefficient}
        return make_family(tmp_path_factory.mktemp("moe"), name, **changes)

    return {"qwen3_moe": make("qwen3_moe", 0.01), "mixtral": make("mixtral", 0.5), "off": make("qwen3_moe", 0.0)}


def _case(folder: Path, layout: str) -> Case:
    train = {"optimizer": "sgd", "learning_rate": 0.05, "max_grad_norm": None, "lr_scheduler": "constant"}
    case = Case(folder, strategy(**LAYOUTS[layout]), ROWS, 4, 2, dtype=torch.float64)
    return replace(case, train=case.train.model_copy(update=train))


@pytest.fixture(scope="module")
def outcomes(folders: dict[str, Path]) -> Any:
    @cache
    def run(world_size: int) -> dict[tuple[str, str], Outcome]:
        keys = [
            (name, layout)
            for name in folders
            for layout in LAYOUTS
            if strategy(**LAYOUTS[layout]).world_size == world_size and (name != "off" or layout == "one")
        ]
        by_rank = run_distributed(run_cases, world_size, [_case(folders[name], layout) for name, layout in keys])
        return {key: assemble([rank[i] for rank in by_rank]) for i, key in enumerate(keys)}

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_70_the_balance_loss_is_that_of_one_process(
    folders: dict[str, Path], outcomes: Any, name: str, layout: str
) -> None:
    """Automodel 1408, Megatron-LM PR 5047: neither thrown away, nor scaled by ranks, nor counted twice."""
    case = _case(folders[name], layout)
    errors = compare(
        outcomes(case.strategy.world_size)[name, layout], _one_process(case.folder, case.strategy.micro_batch_size)
    )
    assert errors.loss <= tolerance.FLOAT64_LOSS
    assert errors.norm <= tolerance.FLOAT64_GRADIENT
    assert errors.gradient <= tolerance.FLOAT64_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.FLOAT64_GRADIENT


def test_70_the_coefficient_reaches_the_router_and_the_logged_loss(outcomes: Any) -> None:
    on, off = outcomes(1)["qwen3_moe", "one"], outcomes(1)["off", "one"]
    router = "model.layers.0.mlp.gate.weight"
    assert (on.gradients[router] - off.gradients[router]).norm() > 1e-4 * off.gradients[router].norm()
    assert on.losses[0] - off.losses[0] > 0.01  # at least the coefficient: the loss of even use is top_k, here 2


def test_70_recomputation_changes_nothing_that_is_logged(outcomes: Any) -> None:
    for plain, again in (("one", "one-recompute"),):
        assert outcomes(1)["qwen3_moe", plain].losses == outcomes(1)["qwen3_moe", again].losses
    assert outcomes(2)["qwen3_moe", "pp2"].losses == outcomes(2)["qwen3_moe", "pp2-recompute"].losses
