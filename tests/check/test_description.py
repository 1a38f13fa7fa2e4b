"""``model show``: sizes, kinds, tables with their cost, legal degrees and the rule of each other, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from shardwise import cli
from shardwise.check.costs import module_costs
from shardwise.check.description import describe, ranges
from shardwise.errors import ConfigError
from shardwise.models.shrink import build_small, shrink
from shardwise.parallel.tensor import proven_table
from shardwise.tensor.cache import TableCache
from shardwise.tensor.simulate import compare, reference
from shardwise.tensor.trace import run
from tests.check.test_check import make_config

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
MIXED = SMALL | {"num_experts": 4, "moe_intermediate_size": 32, "mlp_only_layers": [0], "head_dim": 16}
MIXED |= {"num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tmp = tmp_path_factory.mktemp("llama")
    return describe(make_config(tmp / "m", "llama", **SMALL), [], TableCache(tmp / "tables"))


def test_parts_add_up_to_the_model(llama: dict[str, Any]) -> None:
    assert llama["parts"] == {"embedding": 128 * 64, "blocks": 3 * 30848, "head": 128 * 64, "other": 64}
    assert sum(llama["parts"].values()) == llama["num_parameters"]
    assert llama["structure"]["blocks"] == "model.layers"


def test_each_degree_is_legal_with_a_table_or_has_its_rule(llama: dict[str, Any]) -> None:
    assert [found["degree"] for found in llama["tensor"]] == list(range(1, 17))
    legal = {found["degree"] for found in llama["tensor"] if found["legal"]}
    assert legal == {1, 2, 4}
    for found in llama["tensor"]:
        assert (found["rule"] is None) == found["legal"]
        assert ("modules" in found) == (found["degree"] in (2, 4))
    assert "4 attention heads" in llama["tensor"][2]["rule"]


def test_the_table_names_styles_collectives_and_costs(llama: dict[str, Any]) -> None:
    found = next(found for found in llama["tensor"] if found["degree"] == 2)
    rows = {row["module"]: row for row in found["modules"]}
    assert rows["model.layers.*.self_attn.q_proj"]["style"] == "column"
    assert rows["model.layers.*.self_attn.q_proj"]["blocks"] == "0-2"
    assert rows["model.layers.*.self_attn.o_proj"]["style"] == "row"
    assert rows["model.layers.*.self_attn.o_proj"]["forward"] == 64  # 2 n (p - 1) / p
    assert rows["lm_head"]["style"] == "vocab_head"
    assert found["cost"]["whole_parameters"] == 3 * 2 * 64  # norms
    in_blocks = [row for row in found["modules"] if row["blocks"]]
    assert sum(3 * row["forward"] for row in in_blocks) == found["cost"]["forward_elements_per_token"]
    assert sum(3 * row["backward"] for row in in_blocks) == found["cost"]["backward_elements_per_token"]


@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe", "phi", "olmo2"])
def test_costs_of_modules_are_what_the_simulated_ranks_count(family: str) -> None:
    """The table's proof counts what is sent."""
    config = AutoConfig.for_model(family, **({} if family == "gpt2" else SMALL if family != "qwen3_moe" else MIXED))
    small = build_small(shrink(config))
    table = proven_table(small, 2)
    tokens = run(small).shape[:-1].numel()
    moved = compare(small, table, reference(small)).moved
    costs = list(module_costs(small, table))
    # The gradients of routing weights, which the costs leave out: 2 n (p - 1) / p for each stack of experts.
    routing = sum(cost.style == "experts" for cost in costs) * getattr(small.config, "num_experts_per_tok", 0)
    told = sum(cost.forward + cost.backward for cost in costs) + routing
    assert told * tokens == pytest.approx(sum(moved.values()))


def test_kinds_of_blocks_are_told_apart(tmp_path: Path) -> None:
    answer = describe(make_config(tmp_path / "m", "qwen3_moe", **MIXED), [1], TableCache(None))
    assert [(kind["blocks"], kind["number"]) for kind in answer["kinds"]] == [("0", 1), ("1-2", 2)]
    names = [{module["name"] for module in kind["modules"]} for kind in answer["kinds"]]
    assert "mlp.gate_proj" in names[0]
    assert "mlp.experts" in names[1]
    assert answer["pipeline"]["cut"]


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_says_why(tmp_path: Path) -> None:
    """Blocks of zamba2 use weights of each other."""
    folder = make_config(tmp_path / "m", "zamba2")
    answer = describe(folder, [1], TableCache(None))
    assert not answer["pipeline"]["cut"]
    assert "which is not its own" in answer["pipeline"]["rule"]
    assert answer["unsupported"] == []


def test_what_cannot_start_at_random_says_why(tmp_path: Path) -> None:
    """The constructor of openai-gpt draws a weight that its own initialisation leaves alone."""
    answer = describe(make_config(tmp_path / "m", "openai-gpt"), [1], TableCache(None))
    assert [item["part"].partition(",")[0] for item in answer["unsupported"]] == ["model_init = random"]


def test_a_degree_for_which_nothing_is_found_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **_settings: object) -> Any:
        raise RuntimeError("a forward of its own kind")

    monkeypatch.setattr("shardwise.parallel.tensor.find_table", fails)
    (found,) = describe(make_config(tmp_path / "m", "llama", **SMALL), [2], TableCache(None))["tensor"]
    assert not found["legal"]
    assert "LlamaForCausalLM was found (RuntimeError: a forward of its own kind)" in found["rule"]


def test_a_folder_without_a_causal_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is_encoder_decoder"):
        describe(make_config(tmp_path / "m", "t5"), [1], TableCache(None))


def test_ranges_of_blocks() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges([]) == ""


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = make_config(tmp_path / "m", "llama", **SMALL)
    words = ["model", "show", str(folder), "--tp", "2", "--tp", "3"]
    answer = json.loads(CliRunner().invoke(cli.app, [*words, "--json"], catch_exceptions=False).stdout)
    assert answer["schema"] == 1
    assert [found["degree"] for found in answer["tensor"]] == [2, 3]
    assert len(list((tmp_path / "cache/shardwise/tables").glob("*.json"))) == 1
    shown = CliRunner().invoke(cli.app, words, catch_exceptions=False).stdout
    for word in ("LlamaForCausalLM", "model.layers.*.self_attn.q_proj", "does not divide the 4 attention heads"):
        assert word in shown


# The cache.


def _meta(**changes: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **(SMALL | changes)))


def test_a_table_is_found_again_and_a_broken_file_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, model = TableCache(tmp_path / "a" / "tables"), _meta()
    table = proven_table(model, 2, tables)
    (path,) = (tmp_path / "a" / "tables").iterdir()
    assert tables.find(model.config, 2) == table
    assert tables.find(model.config, 4) is None
    assert tables.find(_meta(num_hidden_layers=2).config, 2) is None
    good = path.read_bytes()
    for broken in (b"", b"{", b"[]", b'{"degree": 2}', good[: len(good) // 2], b"\xff\xfe"):
        path.write_bytes(broken)
        assert tables.find(model.config, 2) is None
    assert proven_table(model, 2, tables) == table
    assert path.read_bytes() == good
    monkeypatch.setattr("shardwise.parallel.tensor.find_table", lambda *_: pytest.fail("searched again"))
    assert proven_table(model, 2, tables) == table


def test_a_cache_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "tables"):
        tables = TableCache(folder)
        tables.keep(_meta().config, proven_table(_meta(), 2))
        assert tables.find(_meta().config, 2) is None
