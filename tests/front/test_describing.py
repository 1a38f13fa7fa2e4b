"""A model whose file does not name its sizes is built once, in a child; then it is known, and it trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ConfigError, LaunchError
from shardwise.front import describing
from shardwise.front.describe import main
from shardwise.front.describing import model_of, run_child
from shardwise.front.planning import make_job
from shardwise.models.describe import describe_folder
from shardwise.planner.shape import Shape, model_costs
from shardwise.spec.described import DescriptionCache, Manner
from tests.fixtures import make_rows
from tests.spec.model_folder import make_folder
from tests.train.runs import run

UNUSUAL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "hidden_size": 32, "num_hidden_layers": 4, "state_size": 8},
    "gpt_neo": {"hidden_size": 32, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]]},
    "xlnet": {"d_model": 32, "n_layer": 4, "n_head": 4, "d_inner": 48, "dropout": 0.0},
}
UNUSUAL["mamba2"] |= {"n_groups": 2, "chunk_size": 8}


def _make(folder: Path, family: str) -> Path:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **UNUSUAL[family], vocab_size=132, bos_token_id=1, eos_token_id=2)
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_the_child_answers_once_and_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, environ = _make(tmp_path / "m", "gpt_neo"), os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    spec = model_of(folder, environ)
    assert spec == describe_folder(folder)
    assert spec.measured
    monkeypatch.setattr(describing, "run_child", lambda *_: pytest.fail("asked again"))
    assert model_of(folder, environ) == spec
    (folder / "model.safetensors").touch()  # weights came since
    assert model_of(folder, environ).has_weights
    for path in (tmp_path / "cache/shardwise/models").iterdir():
        path.write_text('{"model_type": 3}')
    with pytest.raises(pytest.fail.Exception):  # a damaged file counts as none
        model_of(folder, environ)
    monkeypatch.undo()
    assert model_of(folder, environ) == replace(spec, has_weights=True)  # the child does not read it either


def test_a_file_that_names_its_sizes_starts_no_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "run_child", lambda *_: pytest.fail("a child was started"))
    folder, environ = make_folder(tmp_path / "m"), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert not model_of(folder, environ).measured
    cache = DescriptionCache(tmp_path / "cache/shardwise/models")
    assert main([str(folder)], cache) == 0  # as the child, or the first run, keeps it
    assert model_of(folder, environ) == describe_folder(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "nosuch"}, ["transformers", "nosuch"]),
        ({"model_type": "gemma", "head_dim": 7}, ["head_dim", "even"]),
    ],
)
def test_what_the_child_refuses_is_refused(
    tmp_path: Path, changes: dict[str, Any], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "m", **changes, architectures=None, num_key_value_heads=4)
    assert main([str(folder)], DescriptionCache(None)) == 2
    refused = json.loads(capsys.readouterr().out)["refused"]
    assert refused["kind"] == "ConfigError"
    for word in words:
        assert word in f"{refused['value']} {refused['rule']}"


def test_eager_attention_has_costs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, environ = make_folder(tmp_path / "m"), {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    answer, asked = model_costs(Shape("tiny", 4, 32, 4, 2, 8, 48, 132), (1,)).to_json(), []

    def child(arguments: list[str], _environ: Any) -> Any:
        asked.append(arguments[1:])
        return answer

    monkeypatch.setattr(describing, "run_child", child)
    for manner in (Manner(), Manner(eager=True), Manner(whole=0.5), Manner(True, 0.5)):
        describing.costs_of(folder, environ, manner)
    assert asked == [
        ["--costs", *more] for more in ([], ["--eager"], ["--whole", "0.5"], ["--eager", "--whole", "0.5"])
    ]
    assert len({manner.kind for manner in (Manner(), Manner(eager=True), Manner(whole=0.5), Manner(True, 0.5))}) == 4
    tree = {"model": "llama2-7b", "cluster": "a100-80gb", "devices": 2, "attn_implementation": "eager"}
    with pytest.raises(ConfigError, match="the costs of the well-known llama2-7b are those of sdpa"):
        make_job(tree, environ)


def test_a_refusal_and_a_death_of_the_child_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(code: int, out: str) -> None:
        done = subprocess.CompletedProcess([], code, stdout=out.encode(), stderr=b"Killed\n")
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)

    answers(2, json.dumps({"refused": {"kind": "ConfigError", "value": "v = 1", "rule": "r", "remedy": ""}}))
    with pytest.raises(ConfigError, match="v = 1: r"):
        run_child(["DIR"], {})
    answers(-9, "")
    with pytest.raises(LaunchError, match=r"status -9 \(Killed\)"):
        run_child(["DIR"], {})


def test_the_launcher_loads_no_torch(tmp_path: Path) -> None:
    program = "import sys, shardwise.front.describing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("family", UNUSUAL)
def test_random_models_with_other_sizes_train(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command's own way from words to ranks; without a split and over two ranks the losses agree."""
    monkeypatch.setattr(describing, "described_in_child", lambda folder, _: describe_folder(folder))
    _make(tmp_path / "model", family)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    split = {"mamba2": "pp=2", "gpt_neo": "tp=2", "xlnet": "tp=2"}[family]
    overrides = ["model_init=random", "train.max_steps=2", "train.global_batch_size=4"]
    losses = []
    for name, more in (("one", []), ("two", [split])):
        result = run(tmp_path, tmp_path / name, [*overrides, *more])
        assert result.errors == [""] * len(result.errors)
        losses.append([line["loss"] for line in result.metrics()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
