"""Models and tokenizers by name: where they are found, which options they take; and what a Trainer refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.api import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from shardwise.errors import ShardwiseError
from tests.spec.model_folder import make_folder


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("SHARDWISE_MODELS_DIR", "SHARDWISE_PRESETS", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHARDWISE_DEVICE", "cpu")
    make_folder(tmp_path / "models" / "tiny")
    make_folder(tmp_path / "others" / "tiny")
    return tmp_path / "models"


def test_a_model_is_named_and_not_loaded(models: Path) -> None:
    handle = AutoModel.from_pretrained(models / "tiny", attn_implementation="eager", low_cpu_mem_usage=True)
    assert handle.tree() == {"model": str(models / "tiny"), "attn_implementation": "eager"}
    assert handle.config.num_attention_heads == 4
    assert AutoModelForCausalLM is AutoModel
    assert AutoModel.from_config(models / "tiny").tree()["model_init"] == "random"


def test_the_command_line_then_the_argument_then_the_variable_say_where_models_are(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = models.parent / "others"
    monkeypatch.setenv("SHARDWISE_MODELS_DIR", str(others))
    assert AutoModel.from_pretrained("somebody/tiny").folder == others / "tiny"
    assert AutoModel.from_pretrained("somebody/tiny", models_dir=str(models)).folder == models / "tiny"
    monkeypatch.setenv("SHARDWISE_PRESETS", f'["models_dir={others}"]')
    assert AutoModel.from_pretrained("somebody/tiny", models_dir=str(models)).folder == others / "tiny"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: AutoModel.from_pretrained(m, load_in_4bit=True), ["load_in_4bit", "quantised"]),
        (lambda m: AutoModel.from_pretrained(m, dtype="bfloat16"), ["dtype", "bf16"]),
        (lambda m: AutoModel.from_pretrained(m, atn_implementation="eager"), ["unknown", "attn_implementation?"]),
        (lambda m: Trainer(object()), ["model of type object", "AutoModel.from_pretrained"]),
        (lambda m: Trainer(m, {"batch_size": 2}), ["args of type dict", "TrainingArguments"]),
        (lambda m: Trainer(m, data_collator=len), ["data_collator", "not supported"]),
        (lambda m: Trainer(m, train_datasets=[]), ["unknown argument", "train_dataset?"]),
        (lambda m: Trainer(m, strategy={"tpp": 2}), ["strategy.tpp = 2", "strategy.tp?"]),
        (lambda m: Trainer(m, TrainingArguments(tp=2), strategy={"tp": 4}), ["two names", "tp"]),
        (lambda m: Trainer(m, strategy={"tp": 3}), ["strategy.tp = 3", "1, 2, 4"]),
        (lambda m: Trainer(m, TrainingArguments(eval_strategy="epoch")), ["eval.strategy", "rows to evaluate"]),
        (lambda m: Trainer(m, train_dataset=[], strategy={"tp": 2}), ["start from", "shardwise run script.py"]),
    ],
)
def test_what_is_refused_in_the_first_process(models: Path, make: Callable[[str], Any], words: list[str]) -> None:
    """The last one is good, and would start this test on two devices."""
    with pytest.raises(ShardwiseError) as error:
        make(str(models / "tiny"))
    for word in words:
        assert word in str(error.value)
