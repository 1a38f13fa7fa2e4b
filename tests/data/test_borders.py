"""How many tokens end before a place, told by the bytes of tokens, is what the tokenizer's own offsets say."""

from __future__ import annotations

from bisect import bisect_right
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers, processors

from shardwise.data.borders import TextTokenizer
from tests.data.helpers import make_tokenizer
from tests.data.test_templates import qwen
from tests.llama2 import make_llama2

TEXTS = st.lists(
    st.sampled_from(
        [
            *("Hello", " there", "  ", "\n", "\n\n", "好", "今天", "é", "e\u0301", "😀", "<|im_start|>", "<|im_end|>"),
            *("a", "<|im_end|", " <|im_start|> ", "\t", "12", ".", "\u200d", "\ufeff", "\x00"),
        ]
    ),
    max_size=12,
).map("".join)


def _normalised() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _prefixed() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def _trimmed() -> Any:
    """Its offsets leave the spaces before a word out, as Llama 3's do."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return tokenizer


def _greedy() -> Any:
    """A mark that takes the spaces around it along."""
    tokenizer = make_tokenizer(marks=False)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True, lstrip=True, rstrip=True)])
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from transformers import AutoTokenizer

    llama = AutoTokenizer.from_pretrained(make_llama2(tmp_path_factory.mktemp("llama2")))
    made = {"qwen": qwen(), "llama-2": llama, "byte-level": make_tokenizer()}
    return made | {"nfc": _normalised(), "prefix": _prefixed(), "trim": _trimmed(), "greedy": _greedy()}


@pytest.mark.parametrize("name", ["qwen", "llama-2", "byte-level", "nfc", "prefix", "trim", "greedy"])
@given(texts=st.lists(TEXTS, max_size=4))
@settings(max_examples=40)
def test_borders_by_bytes_are_those_of_the_offsets(tokenizers: dict[str, Any], name: str, texts: list[str]) -> None:
    tokenizer = tokenizers[name]
    places = [list(range(len(text) + 1)) for text in texts]
    found = TextTokenizer(tokenizer).cut(texts, places)
    told = tokenizers["byte-level"] if name == "trim" else tokenizer  # whose offsets leave nothing out
    for text, (ids, borders) in zip(texts, found, strict=True):
        plain = told(text, add_special_tokens=False, return_offsets_mapping=True)
        assert ids.tolist() == plain["input_ids"]
        ends = [end for _, end in plain["offset_mapping"]]
        assert borders == [bisect_right(ends, place) for place in range(len(text))] + [len(ids)]
    alone = TextTokenizer(tokenizer).ids(texts)
    assert [ids.tolist() for ids in alone] == [ids.tolist() for ids, _ in found]


@pytest.mark.parametrize(
    ("name", "by_bytes"), [("byte-level", True), ("qwen", True), ("trim", True), ("nfc", True), ("llama-2", False)]
)
def test_byte_level_vocabularies_need_no_offsets(
    tokenizers: dict[str, Any], name: str, by_bytes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = TextTokenizer(tokenizers[name])
    asked: list[list[str]] = []
    by_offsets = texts._by_offsets
    monkeypatch.setattr(texts, "_by_offsets", lambda *given: asked.append(given[0]) or by_offsets(*given))
    said = ["Hello there, 好", "e\u0301"]
    texts.cut(said, [[3], [1]])
    left = said[1:] if name == "nfc" else []  # it writes this one otherwise than it stands
    assert [text for texts_ in asked for text in texts_] == (left if by_bytes else said)


def test_what_a_script_has_set_on_its_tokenizer_changes_no_ids() -> None:
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    texts = TextTokenizer(tokenizer)
    plain = [ids.tolist() for ids in texts.ids(["Hello there", "a"])]
    tokenizer(["Hello there", "a"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.padding is not None
    assert [ids.tolist() for ids in texts.ids(["Hello there", "a"])] == plain
    tokenizer(["Hello there", "a"], padding=True, truncation=True, max_length=2)
    assert [ids.tolist() for ids, _ in texts.cut(["Hello there", "a"], [[], []])] == plain


def test_a_tokenizer_that_does_more_than_hand_a_text_on_is_called_itself(tmp_path: Path) -> None:
    plain = make_tokenizer()

    class Lower(type(plain)):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *more: Any, **settings: Any) -> Any:
            lowered = [one.lower() for one in text] if isinstance(text, list) else text.lower()
            return super()._encode_plus(lowered, *more, **settings)

    own = Lower(tokenizer_object=plain.backend_tokenizer, bos_token="<s>", eos_token="</s>")
    ids, borders = TextTokenizer(own).cut(["HELLO there"], [[5]])[0]
    assert plain.decode(ids) == "hello there"
    assert plain.decode(ids[: borders[0]]) == "hello"
    assert TextTokenizer(own).ids(["HELLO"])[0].tolist() == TextTokenizer(plain).ids(["hello"])[0].tolist()
