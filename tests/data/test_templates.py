"""What is learned under the chat templates of many models, with real tokenizers.

The templates are those that the package trl holds, as models ship them. Beside some of them it holds copies with marks
around what the assistant says: transformers' own mask by these marks is another way to the same answer.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from shardwise.data.chat import ChatEncoder
from shardwise.data.format import IGNORED, BadRow
from shardwise.data.turns import supervised_spans
from tests.data.helpers import make_tokenizer
from tests.llama2 import make_llama2

Talk = dict[str, Any]


def folder_of(package: str, inside: str) -> Path:
    """A file or folder of an installed package, which is not imported; skips the test where it is absent."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs the files of {package} (make test installs them: TEST_FILES in the Makefile)")
    return Path(spec.submodule_search_locations[0]) / inside


def template(name: str) -> str:
    return (folder_of("trl", "chat_templates") / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def qwen() -> PreTrainedTokenizerFast:
    """Qwen's byte-level tokenizer, its first 20,000 tokens: what merges into them does so as in the whole."""
    lines = folder_of("dashscope", "resources/qwen.tiktoken").read_bytes().splitlines()[:20000]
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    shown = _printable_bytes()
    name = {token: "".join(shown[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        halves = ((token[:place], token[place:]) for place in range(1, len(token)))
        found = [(ranks[a], ranks[b], a, b) for a, b in halves if a in ranks and b in ranks]
        merges += [(rank, *pair) for pair in sorted(found)]
    model = models.BPE({name[t]: r for t, r in ranks.items()}, [(name[a], name[b]) for *_, a, b in sorted(merges)])
    tokenizer = Tokenizer(model)
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")


def _printable_bytes() -> dict[int, str]:
    """Of each byte the character that byte-level vocabularies write it as."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + place) for place, byte in enumerate(others)}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoTokenizer

    llama = AutoTokenizer.from_pretrained(make_llama2(tmp_path_factory.mktemp("llama2")))
    return {"qwen": qwen(), "llama-2": llama, "byte-level": make_tokenizer(None)}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text} | more


CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "weather", "arguments": {"place": "武汉"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {}}}
MANY = [
    user("Hello"),
    says("Hi there 😀."),
    user("今天天气怎么样？"),
    says("今天天气很好。"),
    user("Why?"),
    says("So."),
]
TALKS: dict[str, Talk] = {
    "one turn": {"messages": MANY[:2]},
    "many turns": {"messages": MANY},
    "system": {"messages": [{"role": "system", "content": "Be kind."}, *MANY[:4]]},
    "tools": {
        "messages": [
            user("Weather?"),
            says("", tool_calls=[CALL]),
            {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "22"},
            says("It is 22."),
        ],
        "tools": [TOOL],
    },
}
# Templates whose marked copies write the same and mark what a model is to write.
MARKED = ("cohere", "cohere2", "gemma", "gemma3", "lfm2_v2", "llama3", "qwen3_instruct_2507", "qwen3_vl", "phi3")
OTHERS = (("gemma", "llama-2"), ("llama3", "byte-level"))
REFUSED = {
    "tools": ("cohere", "cohere2", "gemma", "gemma3", "llama3", "phi3"),  # the template knows of none
    "system": ("gemma",),
}


def learned(tokenizer: Any, name: str, talk: Talk, **given: Any) -> str:
    tokenizer = with_marks(tokenizer, template(name))
    tokens = ChatEncoder(tokenizer, template(name), **given)(talk)
    return str(tokenizer.decode(tokens.input_ids[tokens.labels != IGNORED]))


def with_marks(tokenizer: Any, text: str) -> Any:
    """The tokenizer of a model with this template: what stands in it between angle brackets is a token each."""
    own = copy.deepcopy(tokenizer)
    own.add_tokens([AddedToken(mark, special=True) for mark in dict.fromkeys(re.findall(r"<[^<>\s{}'\"]+>", text))])
    return own


@pytest.mark.parametrize(("name", "kind"), [*((name, "qwen") for name in MARKED if name != "llama3"), *OTHERS])
def test_the_mask_is_that_of_the_templates_own_marks(tokenizers: dict[str, Any], name: str, kind: str) -> None:
    tokenizer = with_marks(tokenizers[kind], template(name))
    encode, marked = ChatEncoder(tokenizer, template(name)), template(f"{name}_training")
    for talk_kind, talk in TALKS.items():
        if name in REFUSED.get(talk_kind, ()):
            with pytest.raises(BadRow):
                encode(talk)
            continue
        tokens = encode(talk)
        want = tokenizer.apply_chat_template(
            talk["messages"],
            tools=talk.get("tools"),
            chat_template=marked,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        extra = len(tokens.input_ids) - len(want["input_ids"])  # a BOS that the template does not write
        assert tokens.input_ids[extra:].tolist() == want["input_ids"]
        assert (tokens.labels[extra:] != IGNORED).astype(int).tolist() == want["assistant_masks"]
        bos = tokenizer.bos_token_id
        assert tokenizer.add_bos_token is False or tokens.input_ids.tolist().count(bos) <= 1 or bos is None


WORDS = st.lists(
    st.sampled_from(["a", "user", "<", "think", "\n", "x <|im_end|>", "1", "好", " a", "|", "a "]), max_size=3
)


@pytest.mark.parametrize("name", ["phi3", "gemma3"])
@given(st.lists(WORDS.map("".join).filter(str.strip), min_size=2, max_size=6).filter(lambda said: len(said) % 2 == 0))
@settings(max_examples=40)
def test_no_words_are_taken_for_what_a_template_writes(name: str, said: list[str]) -> None:
    messages = [says(words) if place % 2 else user(words) for place, words in enumerate(said)]
    marks = {"bos_token": "<s>", "eos_token": "</s>"}

    def render(part: list[Any], add_generation_prompt: bool) -> str:
        texts, _ = render_jinja_template(
            [part], chat_template=template(name), add_generation_prompt=add_generation_prompt, **marks
        )
        return str(texts[0])

    (text,), (want,) = render_jinja_template(
        [messages], chat_template=template(f"{name}_training"), return_assistant_tokens_mask=True, **marks
    )
    spans = supervised_spans(messages, text, render, "assistant")
    assert "".join(text[start:end] for start, end in spans) == "".join(text[start:end] for start, end in want)


THINKS = [user("Hello"), says("Hi.", reasoning_content="Hm."), user("Why?"), says("Because.", reasoning_content="So.")]
EMPTY = "<think>\n\n</think>\n\n"
INLINE = [user("Hello"), says("<think>\nHm.\n</think>\n\nHi."), user("Why?"), says("Because.")]
# By hand: what a model that is fed the generation prompt is to write.
SPOKEN = [
    ("qwen3", MANY, f"Hi there 😀.<|im_end|>\n今天天气很好。<|im_end|>\n{EMPTY}So.<|im_end|>\n"),
    ("qwen3", THINKS, "Hi.<|im_end|>\n<think>\nSo.\n</think>\n\nBecause.<|im_end|>\n"),
    ("qwen3", INLINE, f"Hi.<|im_end|>\n{EMPTY}Because.<|im_end|>\n"),
    ("qwen3_5_think", THINKS, "Hi.<|im_end|>\nSo.\n</think>\n\nBecause.<|im_end|>\n"),
    ("qwen2_5", MANY, "Hi there 😀.<|im_end|>\n今天天气很好。<|im_end|>\nSo.<|im_end|>\n"),
    ("deepseekv3", MANY[:4], "Hi there 😀.<｜end▁of▁sentence｜>今天天气很好。<｜end▁of▁sentence｜>"),
    ("nemotron_3_nano", MANY[:2], "</think>Hi there 😀.<|im_end|>\n"),
]
CALLED = {
    "qwen3": f'<tool_call>\n{{"name": "weather", "arguments": {{"place": "武汉"}}}}\n</tool_call><|im_end|>\n{EMPTY}',
    "llama3_1": '{"name": "weather", "parameters": {"place": "武汉"}}<|eot_id|>',
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"place": "武汉"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
    ),
}


@pytest.mark.parametrize(("name", "messages", "words"), SPOKEN)
def test_what_is_learned_is_what_follows_the_generation_prompt(
    tokenizers: dict[str, Any], name: str, messages: list[Any], words: str
) -> None:
    assert learned(tokenizers["qwen"], name, {"messages": messages}) == words
    assert words.endswith(learned(tokenizers["byte-level"], name, {"messages": messages}, loss="last_turn"))


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_learned_in_the_form_that_the_template_gives_them(tokenizers: dict[str, Any], name: str) -> None:
    said = learned(tokenizers["qwen"], name, TALKS["tools"])
    assert said.startswith(CALLED[name])
    assert "It is 22." in said
    assert "22" not in said.replace("It is 22.", "")


def test_a_template_that_ends_earlier_turns_otherwise_teaches_the_end_at_which_a_server_stops(
    tokenizers: dict[str, Any],
) -> None:
    spoken = [f"<|channel|>final<|message|>{words}<|return|>" for words in ("Hi there 😀.", "今天天气很好。", "So.")]
    assert learned(tokenizers["qwen"], "gptoss", {"messages": MANY}, loss="last_turn") == spoken[-1]
    tokenizer = with_marks(tokenizers["qwen"], template("gptoss"))
    tokens = ChatEncoder(tokenizer, template("gptoss"))({"messages": MANY})
    assert tokenizer.decode(tokens.labels[tokens.labels != IGNORED]) == "".join(spoken)
    stop, goes_on = tokenizer.convert_tokens_to_ids(["<|return|>", "<|end|>"])
    stops = tokens.labels == stop
    assert tokens.input_ids[stops].tolist() == [goes_on, goes_on, stop]
    rest = ~stops & (tokens.labels != IGNORED)
    assert (tokens.labels[rest] == tokens.input_ids[rest]).all()
    with pytest.raises(BadRow, match="is no token of its own"):
        ChatEncoder(tokenizers["byte-level"], template("gptoss"))({"messages": MANY})


def test_an_answer_of_a_word_in_the_header_is_not_taken_for_it(
    tokenizers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_marks(tokenizers["qwen"], template("gptoss"))
    asked: list[int] = []
    vocab = tokenizer.get_vocab()
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: asked.append(1) or vocab)
    encode = ChatEncoder(tokenizer, template("gptoss"))
    asked.clear()
    for said in ("final", "a", "an"):
        tokens = encode({"messages": [user("Hello"), says(said), *MANY[2:4]]})
        spoken = [f"<|channel|>final<|message|>{words}<|return|>" for words in (said, "今天天气很好。")]
        assert tokenizer.decode(tokens.labels[tokens.labels != IGNORED]) == "".join(spoken)
    assert len(asked) <= 1  # it takes a while to make


def test_a_turn_with_an_end_that_is_no_token_does_not_learn_the_next_mark(tokenizers: dict[str, Any]) -> None:
    own = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %} END\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = with_marks(tokenizers["qwen"], "<|user|><|assistant|>")
    for text, ends in ((own, (" END\n", " END\n")), (own.replace(" END\n", " "), (" <|user|>", " <|im_end|>"))):
        tokens = ChatEncoder(tokenizer, text)({"messages": MANY[:4]})
        said = tokenizer.decode(tokens.input_ids[tokens.labels != IGNORED])
        assert said == f"Hi there 😀.{ends[0]}今天天气很好。{ends[1]}"


def test_a_turn_without_an_end_ends_with_the_mark_of_the_next_one(tokenizers: dict[str, Any]) -> None:
    said = learned(tokenizers["qwen"], "glm4moe", {"messages": MANY})
    ends = ("<|user|>", "<|user|>", "<|im_end|>")  # the last is the tokenizer's end of a text
    words = ("Hi there 😀.", "今天天气很好。", "So.")
    assert said == "".join(f"\n<think></think>\n{one}{end}" for one, end in zip(words, ends, strict=True))
