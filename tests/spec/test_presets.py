"""Models described beforehand: complete, of the published sizes, shown without any import, and made by the script."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from shardwise import cli
from shardwise.errors import ConfigError
from shardwise.models.describe import describe_folder
from shardwise.spec.presets import CONFIGURATIONS, find_preset, preset_model, preset_names

# Numbers of parameters as their makers state them, in billions.
PUBLISHED = {
    "llama2-7b": 6.738,
    "llama2-70b": 68.977,
    "llama3-405b": 405.85,
    "qwen2.5-72b": 72.71,
    "qwen3-235b-a22b": 235.09,
    "mixtral-8x7b": 46.70,
    "deepseek-v3": 671.03,
    "gpt3-175b": 174.6,
    "megatron-145.6b": 145.6,
    "megatron-1008b": 1008.0,
}


def test_each_configuration_has_its_preset() -> None:
    text = files("shardwise").joinpath(f"presets/{CONFIGURATIONS}").read_text(encoding="utf-8")
    assert sorted(json.loads(text)) == preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_whole(name: str) -> None:
    sizes, costs = preset_model(name)
    assert costs.name == name
    assert costs.num_parameters == pytest.approx(sizes.num_parameters, abs=sizes.num_blocks)  # a block's is rounded
    assert costs.num_blocks == sizes.num_blocks == len(costs.order)
    assert {1, 2} <= set(costs.legal_degrees())
    for part in (*costs.kinds, costs.embedding, costs.head):
        assert set(part.saved) == {"none", "selective", "full"}
        assert len(part.degrees) >= 5
    if name in PUBLISHED:
        assert costs.num_parameters / 1e9 == pytest.approx(PUBLISHED[name], rel=2e-3)


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "llama3-8b"])
def test_sizes_are_those_that_a_description_gives_today(tmp_path: Path, name: str) -> None:
    preset = find_preset(name)
    assert preset is not None
    (tmp_path / "config.json").write_text(json.dumps(preset["config"]), encoding="utf-8")
    assert describe_folder(tmp_path).to_json() == preset["sizes"]


def test_model_show_needs_no_import_and_no_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from shardwise import cli; sys.argv = ['shardwise', 'model', 'show', 'llama2-70b', '--json']\n"
        "try: cli.main()\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    answer = json.loads(done.stdout)
    assert done.stderr.strip().endswith("False")
    assert answer["num_parameters"] == 68976648192
    assert [found["degree"] for found in answer["tensor"]] == [1, 2, 4, 8, 16]


def test_a_degree_that_was_not_described_is_refused() -> None:
    result = CliRunner().invoke(cli.app, ["model", "show", "llama2-70b", "--tp", "3"])
    assert isinstance(result.exception, ConfigError)
    assert "1, 2, 4, 8, 16" in str(result.exception)
    with pytest.raises(ConfigError, match="llama2-70b"):
        preset_model("llama2-70")
