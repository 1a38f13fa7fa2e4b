"""``shardwise check``: right plans agree with one process, wrong executors are found and named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.check import faults
from tests.parallel.families import family_config
from tests.spec.model_folder import make_folder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 120  # what a check may take at most
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def make_config(folder: Path, family: str, **changes: Any) -> Path:
    """A folder with the configuration of a family alone: no weights."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **changes)
    config.architectures = None
    config.save_pretrained(folder)
    return folder


def run(folder: Path, tmp: Path, *words: str, fault: str | None = None) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``check``; temporary files of it lie in ``tmp``."""
    change = f"from shardwise.launch import checking; checking.TARGET = 'tests.check.faults:{fault}'; " if fault else ""
    code = f"{change}from shardwise import cli; cli.main()"
    words = ("check", f"model={folder}", "model_init=random", "device=cpu", *words)
    tmp.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama 70b tp8 pp4": ("llama", LLAMA_70B, ("tp=8", "pp=4", "recompute=full")),
    "gpt2 tp2 pp2 sgd": ("gpt2", {}, ("tp=2", "pp=2", "train.optimizer=sgd")),
    "qwen3_moe tp2 pp2 dp2": ("qwen3_moe", {"num_hidden_layers": 4}, ("tp=2", "pp=2", "dp=2")),
    "lora tp2 dp2": ("qwen3", {"num_hidden_layers": 4}, ("tp=2", "dp_replicate=2", "dp_shard=1", "lora.r=4")),
    "one process": ("llama", {"num_hidden_layers": 4}, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_right_plans_agree_in_float64(name: str, tmp_path: Path) -> None:
    family, changes, words = CASES[name]
    start = time.monotonic()
    code, out, err = run(make_config(tmp_path / "m", family, **changes), tmp_path / "tmp", *words, "--json")
    seconds = time.monotonic() - start
    assert code == 0, err + out
    report = json.loads(out)
    assert report["schema"] == 1
    assert report["ok"]
    assert report["first_difference"] is None
    assert report["covered"]["precision"] == "float64"
    assert len(report["steps"]) == 3
    assert report["limits"]["gradient"] == 1e-9
    assert report["worst_gradient"]["error"] <= 1e-12
    assert len({step["ref_loss"] for step in report["steps"]}) == 3
    assert list((tmp_path / "tmp").iterdir()) == []
    assert seconds < SECONDS
    if "lora" in name:
        assert all(".lora_" in module for module in report["gradients"])


FAULTS = {
    "row_bias_on_each_rank": ("gpt2", "transformer.h.0.attn.c_proj", "output"),
    "partial_gradients_not_summed": ("qwen3", "model.layers.1.self_attn.k_norm", "gradient"),
    "input_gradients_not_summed": ("llama", "model.norm", "gradient"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_executor_is_found_and_its_module_named(fault: str, tmp_path: Path) -> None:
    family, module, what = FAULTS[fault]
    folder = make_config(tmp_path / "m", family, num_hidden_layers=4)
    code, out, err = run(folder, tmp_path / "tmp", "tp=2", "--json", fault=fault)
    assert code == 4, err + out
    report = json.loads(out)
    assert not report["ok"]
    assert (report["first_difference"]["module"], report["first_difference"]["what"]) == (module, what)
    assert report["first_difference"]["error"] > 1e-3
    assert list((tmp_path / "tmp").iterdir()) == []
