"""Random starts, buffers and ties of other architectures: equal under each layout, and as transformers has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shardwise.models.build import build_on_meta
from shardwise.models.init import distributions, fill_random
from shardwise.models.shard import take
from shardwise.parallel.apply import parallelize
from shardwise.parallel.mesh import build_mesh
from shardwise.spec import tolerance
from shardwise.spec.strategy import Strategy
from shardwise.testing import run_distributed
from tests.fixtures import make_rows
from tests.parallel.families import make_family
from tests.parallel.harness import Case, build, parity, strategy

pytestmark = pytest.mark.slow


def _initial(rank: int, folders: list[Path], split: Strategy) -> Any:
    mesh = build_mesh(split, torch.device("cpu"))
    drawn = []
    for folder in folders:
        model = build_on_meta(folder, None)
        dists = distributions(model)
        parallel, _ = parallelize(model, mesh)
        fill_random(parallel.shards, dists, seed=7)
        drawn.append([(shard.layout, shard.data.clone()) for shard in parallel.shards])
    dist.barrier()
    return drawn


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    names = ("gpt2", "gemma2", "mixtral", "gpt_neox")
    return {name: make_family(tmp_path_factory.mktemp(name), name) for name in names}


def test_random_values_are_bit_equal_under_every_layout(folders: dict[str, Path]) -> None:
    held = list(folders.values())
    whole = [
        {layout.name: values for layout, values in drawn} for drawn in run_distributed(_initial, 1, held, strategy())[0]
    ]
    for degrees in ({"pp": 2}, {"dp_shard": 3}, {"pp": 2, "dp_shard": 2}):
        split = strategy(**degrees)
        for part in run_distributed(_initial, split.world_size, held, split):
            for place, drawn in enumerate(part):
                for layout, values in drawn:
                    assert torch.equal(values, take(whole[place][layout.source], layout)), layout.name
    experts = whole[2]["model.layers.0.mlp.experts.gate_up_proj"]
    assert len({tuple(expert.flatten()[:8].tolist()) for expert in experts}) == 4  # no two experts alike


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "gpt_neox"])
def test_distributions_are_those_of_transformers(folders: dict[str, Path], name: str) -> None:
    model = build_on_meta(folders[name], None)
    dists = distributions(model)
    torch.manual_seed(0)
    real = AutoModelForCausalLM.from_config(model.config)
    for parameter_name, parameter in real.named_parameters():
        drawn = dists[parameter_name]
        if drawn.std == 0.0:
            assert torch.all(parameter == drawn.mean), parameter_name
        else:
            assert float(parameter.std()) == pytest.approx(drawn.std, rel=0.15), parameter_name
    if name == "gpt2":  # residual projections are scaled with depth
        assert dists["transformer.h.0.mlp.c_proj.weight"].std == pytest.approx(0.02 / 8**0.5)
        assert dists["transformer.h.0.mlp.c_fc.weight"].std == 0.02


def _buffers(rank: int, folder: Path, split: Strategy) -> dict[str, torch.Tensor]:
    model, _ = build(Case(folder, split, ()))
    dist.barrier()  # a rank that leaves closes the connections that others still make
    return {name: buffer.clone() for stage in model.stages for name, buffer in stage.named_buffers()}


@pytest.mark.parametrize("name", ["gemma3_text", "gptj"])
def test_31_buffers_that_no_file_holds_are_filled_on_every_rank(tmp_path: Path, name: str) -> None:
    """transformers 45902: two sets of rotary frequencies, a scale beside the embedding, a table of sines."""
    folder = make_family(tmp_path, name)
    want = {f"model.{n}": b for n, b in AutoModelForCausalLM.from_pretrained(folder).named_buffers()}
    assert want
    for got in run_distributed(_buffers, 4, folder, strategy(pp=2, dp_shard=2)):
        assert got
        assert all(torch.equal(buffer, want[buffer_name]) for buffer_name, buffer in got.items())


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_34_tied_head_on_stages_that_lack_the_embedding(tmp_path: Path, name: str) -> None:
    """Megatron-Bridge PR 957: three stages, no head in the file, positions and scales on the first stage alone."""
    blocks = {"n_layer": 5} if name == "gpt2" else {"num_hidden_layers": 5}
    folder = make_family(tmp_path, name, **blocks)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    errors = parity(Case(folder, strategy(5, pp=3), tuple(make_rows()), 4, 3))
    assert errors.loss <= tolerance.FP32_LOSS
    assert errors.norm <= tolerance.FP32_NORM
    assert errors.gradient <= tolerance.FP32_GRADIENT, errors.worst_gradient
    assert errors.weight <= tolerance.SGD_WEIGHTS


@pytest.mark.parametrize("tp", [2, 4])
def test_10_odd_vocabulary_under_a_cap_on_the_logits(tmp_path: Path, tp: int) -> None:
    """ColossalAI 6167: 131 ids; the cap and the scale of the embedding act on each rank's part alone."""
    folder = make_family(tmp_path, "gemma2", num_key_value_heads=4, final_logit_softcapping=2.0)
    errors = parity(Case(folder, strategy(tp=tp), tuple(make_rows()), 4, 2, dtype=torch.float64))
    assert max(errors.loss, errors.norm, errors.gradient, errors.weight) <= tolerance.FLOAT64_GRADIENT
