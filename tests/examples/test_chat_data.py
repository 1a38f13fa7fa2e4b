"""The bundled chats and example runs: well formed, within the token budget, no evaluation chat in training."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import load_yaml
from shardwise.front.resolve import prepare
from shardwise.spec.rules import parse_run

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
MAX_TOKENS = 128  # of a rendered row, the template's own system turn included
TAUGHT = ("What is Shardwise?", "Shardwise 是什么？")

Messages = list[dict[str, str]]


def read_chats(name: str) -> list[Messages]:
    lines = (EXAMPLES / "data" / name).read_text(encoding="utf-8").splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert all(set(row) == {"messages"} for row in rows)
    return [row["messages"] for row in rows]


def is_chinese(messages: Messages) -> bool:
    return any("\u4e00" <= char <= "\u9fff" for message in messages for char in message["content"])


TRAIN, EVAL = read_chats("chat.jsonl"), read_chats("chat_eval.jsonl")


@pytest.mark.parametrize("messages", TRAIN + EVAL, ids=lambda messages: messages[-2]["content"])
def test_turns_alternate_and_end_with_an_answer(messages: Messages) -> None:
    assert all(set(message) == {"role", "content"} for message in messages)
    roles = [message["role"] for message in messages if message["role"] != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert [place for place, message in enumerate(messages) if message["role"] == "system"] in ([], [0])
    assert all(message["content"] == message["content"].strip() != "" for message in messages)


def test_training_rows_are_many_and_half_of_them_chinese() -> None:
    assert len(TRAIN) == 100
    assert sum(is_chinese(messages) for messages in TRAIN) == 50
    assert len(EVAL) == 8
    assert any(len(messages) == 4 for messages in TRAIN)
    assert any(messages[0]["role"] == "system" for messages in TRAIN)


def test_no_row_is_repeated_and_none_of_the_evaluation_is_trained_on() -> None:
    counts = Counter(json.dumps(messages, ensure_ascii=False) for messages in TRAIN + EVAL)
    assert [row for row, count in counts.items() if count > 1] == []
    asked = {message["content"] for messages in TRAIN for message in messages if message["role"] == "user"}
    assert [messages[-2]["content"] for messages in EVAL if messages[-2]["content"] in asked] == []


@pytest.mark.parametrize("place", [0, 1])
def test_first_evaluation_questions_have_an_answer_that_training_repeats(place: int) -> None:
    question, answer = EVAL[place]
    assert question["content"] == TAUGHT[place]
    assert sum(messages[-1] == answer for messages in TRAIN) >= 10


@pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not there: `make model` fetches it")
def test_rows_fit_the_token_budget_of_the_model() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in TRAIN + EVAL]
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    assert max(lengths) <= MAX_TOKENS
    assert all(text == tokenizer.decode(ids) for text, ids in zip(texts, tokenizer(texts)["input_ids"], strict=True))


def test_the_example_of_true_size_is_llama_2_and_fits_its_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    run, plan = prepare(load_yaml(str(EXAMPLES / "llama2-7b-lora.yaml")) | {"output_dir": str(tmp_path)})
    assert plan.model.num_parameters == 6_738_415_616
    assert (plan.devices, plan.strategy.pp, plan.strategy.tp, plan.num_micro_batches) == (8, 4, 2, 4)
    assert (run.train.precision, run.lora is not None) == ("bf16", True)
    rows = [json.loads(line) for line in Path(run.data.train or "").read_text(encoding="utf-8").splitlines()]
    assert {len(row["input_ids"]) for row in rows} == {32}
    assert plan.global_batch_size * 32 == 128


@pytest.mark.parametrize(("name", "devices"), [("quickstart.yaml", 6), ("pipeline_data.yaml", 4)])
def test_example_runs_are_valid_and_name_files_that_exist(name: str, devices: int) -> None:
    run = parse_run(load_yaml(str(EXAMPLES / name)))
    assert run.devices == devices
    assert ROOT / run.model == MODEL
    assert (ROOT / (run.data.train or "")).is_file()
    assert (ROOT / (run.data.eval or "")).is_file()
