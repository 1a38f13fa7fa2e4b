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

from tests.long import EVERYTHING

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
    change = f"from shardwise.front import checking; checking.TARGET = 'tests.check.faults:{fault}'; " if fault else ""
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


def assert_nothing_is_left(tmp: Path) -> None:
    """No folder of ours, and no process that was started with this folder for its temporary files."""
    assert list(tmp.glob("shardwise*")) == []
    marked = f"TMPDIR={tmp}".encode()
    deadline = time.monotonic() + 30
    while left := [pid for pid in _processes() if marked in _environment(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def _processes() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _environment(pid: str) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama 70b tp8 pp4": ("llama", LLAMA_70B, ("tp=8", "pp=4", "recompute=full")),
    # Attention whole: a third of a block.
    "gpt2 tp2 pp2 sgd tp_whole": (
        "gpt2",
        {},
        ("tp=2", "pp=2", "train.optimizer=sgd", "tp_whole=0.35", "data.packing=true"),
    ),
    "qwen3_moe tp2 pp2 dp2": ("qwen3_moe", {"num_hidden_layers": 4}, ("tp=2", "pp=2", "dp=2")),
    "lora tp2 dp2": ("qwen3", {"num_hidden_layers": 4}, ("tp=2", "dp_replicate=2", "dp_shard=1", "lora.r=4")),
}


@pytest.mark.parametrize("name", CASES if EVERYTHING else ["gpt2 tp2 pp2 sgd tp_whole", "qwen3_moe tp2 pp2 dp2"])
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
    for page in ("docs/en/check.md", "docs/zh/check.md"):
        assert all(f"`{key}`" in (ROOT / page).read_text(encoding="utf-8") for key in report)
    assert report["covered"]["precision"] == "float64"
    assert len(report["steps"]) == 3
    assert report["limits"]["gradient"] == 1e-9
    assert report["worst_gradient"]["error"] <= 1e-12
    assert len({step["ref_loss"] for step in report["steps"]}) == 3
    assert_nothing_is_left(tmp_path / "tmp")
    assert seconds < SECONDS
    assert "blocks" in report["covered"]["copy"]
    assert ("tensor table" in report["covered"]) == ("tp" in name)
    assert ("within tp_whole = 0.35" in report["covered"].get("tensor table", "")) == ("tp_whole" in name)
    if "lora" in name:
        assert all(".lora_" in module for module in report["gradients"])


FAULTS = {
    "row_bias_on_each_rank": ("gpt2", "transformer.h.0.attn.c_proj", "output"),
    "partial_gradients_not_summed": ("qwen3", "model.layers.1.self_attn.k_norm", "gradient"),
    "input_gradients_not_summed": ("llama", "model.norm", "gradient"),
}


@pytest.mark.parametrize("fault", FAULTS if EVERYTHING else ["partial_gradients_not_summed"])
def test_a_wrong_executor_is_found_and_its_module_named(fault: str, tmp_path: Path) -> None:
    family, module, what = FAULTS[fault]
    folder = make_config(tmp_path / "m", family, num_hidden_layers=4)
    code, out, err = run(folder, tmp_path / "tmp", "tp=2", "--json", fault=fault)
    assert code == 4, err + out
    report = json.loads(out)
    assert not report["ok"]
    assert (report["first_difference"]["module"], report["first_difference"]["what"]) == (module, what)
    assert report["first_difference"]["error"] > 1e-3
    assert_nothing_is_left(tmp_path / "tmp")


def test_the_report_for_people_names_what_differs(tmp_path: Path) -> None:
    folder = make_config(tmp_path / "m", "llama", num_hidden_layers=4, attention_dropout=0.1)
    code, out, err = run(folder, tmp_path / "tmp", "tp=2", "dp=2", fault="input_gradients_not_summed")
    assert code == 4, err + out
    for words in ("dp_shard 2 x tp 2", "DIFFERENT    model.norm", "limit 1e-09", "dropout (attention_dropout)"):
        assert words in out


def test_a_rank_that_fails_is_no_difference(tmp_path: Path) -> None:
    folder = make_config(tmp_path / "m", "llama", num_hidden_layers=4)
    code, out, err = run(folder, tmp_path / "tmp", "tp=2", fault="a_rank_that_raises")
    assert (code, out) == (3, "")
    assert "out of luck" in err
    (kept,) = (tmp_path / "tmp").glob("shardwise*")
    assert str(kept) in err  # the log that the message names is there


@pytest.mark.parametrize(
    ("family", "words", "message"),
    [
        ("starcoder2", ("tp=2",), "masks would differ"),
        *([("llama", ("lora.target_modules=[q_prj]",), "q_proj?")] if EVERYTHING else []),
    ],
)
def test_what_only_the_model_tells_is_refused_as_in_training(
    family: str, words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    changes = {"llama": {"num_hidden_layers": 2}, "starcoder2": {"residual_dropout": 0.1}}[family]
    code, out, err = run(make_config(tmp_path / "m", family, **changes), tmp_path / "tmp", *words)
    assert (code, out) == (2, ""), err
    assert message in err
    assert "Traceback" not in err
    assert_nothing_is_left(tmp_path / "tmp")


def test_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    folder = make_config(tmp_path / "m", "llama", num_hidden_layers=4)
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.cli", "check", f"model={folder}", "model_init=random", "device=cpu", "tp=2"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + SECONDS
    while not list(tmp.glob("shardwise*/logs/rank-1.log")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, err.strip()) == (130, "stopped by SIGINT")
    assert_nothing_is_left(tmp)


SCRIPT = """
import shardwise
from shardwise.front import checking
if {fault!r}:
    checking.TARGET = "tests.check.faults:{fault}"
trainer = shardwise.Trainer(
    shardwise.AutoModel.from_config({model!r}),
    shardwise.TrainingArguments(output_dir={out!r}, max_steps=1, use_cpu=True, save_strategy="no"),
    train_dataset=[dict(input_ids=[5, 6, 7, 8])] * 4,
    strategy=dict(tp=2),
    check=True,
)
print("trained", trainer.train().global_step)
"""


@pytest.mark.parametrize("fault", ["", "input_gradients_not_summed"] if EVERYTHING else ["input_gradients_not_summed"])
def test_a_trainer_checks_before_its_job_starts(fault: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    folder = make_config(tmp_path / "m", "llama", num_hidden_layers=2, intermediate_size=96, **sizes)
    script, tmp = tmp_path / "script.py", tmp_path / "tmp"
    tmp.mkdir()
    script.write_text(SCRIPT.format(fault=fault, model=str(folder), out=str(tmp_path / "out")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=2 * SECONDS,
        check=False,
    )
    # The check keeps the tables of the model and of its copy; the job finds the first of them.
    assert len(list((tmp_path / "cache/shardwise/tables").glob("*.json"))) == 2
    if fault:
        assert done.returncode == 4, done.stderr
        assert "first in model.norm" in done.stderr
        assert not (tmp_path / "out").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("the plan's loss and gradients are those of one process") == 1
        assert done.stdout.endswith("trained 1\n")
    assert_nothing_is_left(tmp)
