"""Turns found by the shape of a conversation stand where rendering every prefix finds them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.data.chat import ChatEncoder, _Rendered
from shardwise.data.copying import only_copies
from shardwise.data.format import BadRow, Tokens
from shardwise.data.shapes import Watch
from tests.data.helpers import CHATML, make_tokenizer
from tests.data.test_templates import INLINE, MANY, TALKS, folder_of, says, template, user
from tests.long import EVERYTHING

TOKENIZER = make_tokenizer(None)
OWN = {
    # SmolLM2's: a system text of its own where there is none.
    "default system": "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "chatml": CHATML,
    "stripped": CHATML.replace("m.content", "m.content | trim"),
    # The prompt hangs on what was said, and the text does not show it.
    "a switch in the words": CHATML.replace(
        "<|im_start|>assistant\n{%", "<|im_start|>assistant\n{% if '/x' in messages[-1].content %}<x>{% endif %}{%"
    ),
    # Its prompt goes on behind the header, with what the words of a turn may begin with, too.
    "a thought in the prompt": CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\n<think>\n{%"),
    "a line in the prompt": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "cut": CHATML.replace("m.content", "m.content | truncate(20)"),
}
CHOSEN = ("gemma3", "llama3", "qwen2_5", "qwen3", "glm4moe", "gptoss")
TALKS_OF_WORDS = {name: talk for name, talk in TALKS.items() if name != "tools"} | {"thought": {"messages": INLINE}}


def templates() -> dict[str, str]:
    names = CHOSEN
    if EVERYTHING:
        files = sorted(folder_of("trl", "chat_templates").glob("*.jinja"))
        names = tuple(file.stem for file in files if not file.stem.endswith("_training"))
    return OWN | {name: template(name) for name in names}


def found(encode: ChatEncoder, value: dict[str, Any]) -> Any:
    try:
        rendered = encode._copied(value) or encode._rendered(value, None)
    except BadRow as error:
        return str(error)
    return rendered if isinstance(rendered, _Rendered) else rendered.input_ids.tolist()


def slow(text: str, loss: str = "assistant") -> ChatEncoder:
    encode = ChatEncoder(TOKENIZER, text, loss)
    encode._known_spans = lambda *_: None  # type: ignore[method-assign]
    encode._only_copies = False
    return encode


def test_every_template_is_read_alike_in_both_ways() -> None:
    fast_rows = 0
    for text in templates().values():
        for loss in ("assistant", "last_turn"):
            encode, other = ChatEncoder(TOKENIZER, text, loss), slow(text, loss)
            for talk in TALKS_OF_WORDS.values():
                for learned in (None, (1,)):
                    assert found(encode, talk | {"learned": learned}) == found(other, talk | {"learned": learned})
            fast_rows += sum(shape is not None for shape in encode._shapes.values())
    assert fast_rows >= 10
    assert any(only_copies(text) for text in templates().values() if text not in OWN.values())


WORDS = st.lists(
    st.sampled_from(
        ["a", "user", "/x", "<think>", "<think>\n", "</think>", "\n", "<|im_end|>", "1", "好", " a", "|", "qz0"]
    ),
    min_size=1,
    max_size=4,
).map("".join)


@pytest.mark.parametrize(
    "name", ["a thought in the prompt", "a line in the prompt", "stripped", "a switch in the words", "qwen3", "gemma3"]
)
@given(st.lists(WORDS.filter(str.strip), min_size=2, max_size=6).filter(lambda said: len(said) % 2 == 0))
@settings(max_examples=25)
def test_whatever_is_said_both_ways_agree(name: str, said: list[str]) -> None:
    text = OWN.get(name) or template(name)
    messages = [says(words) if place % 2 else user(words) for place, words in enumerate(said)]
    assert found(_fast(name, text), {"messages": messages}) == found(slow(text), {"messages": messages})


_FAST: dict[str, ChatEncoder] = {}


def _fast(name: str, text: str, loss: str = "assistant") -> ChatEncoder:
    """One encoder for all examples, so that shapes are met again."""
    return _FAST.setdefault(name, ChatEncoder(TOKENIZER, text, loss))


def test_a_conversation_of_a_known_shape_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = ChatEncoder(TOKENIZER, OWN["default system"])
    encode({"messages": MANY})
    rendered: list[int] = []
    render = encode._render
    monkeypatch.setattr(encode, "_render", lambda *given: rendered.append(1) or render(*given))
    encode({"messages": [user("Other"), says("words."), *MANY[2:]]})
    assert len(rendered) == 1
    rendered.clear()
    assert all(isinstance(row, Tokens) for row in encode.many([{"messages": MANY}] * 3))
    assert not rendered  # all of them in one call of the tokenizer


def test_rows_together_are_what_they_are_apart_and_bad_ones_have_their_reason() -> None:
    encode = ChatEncoder(TOKENIZER, CHATML)
    values = [{"messages": MANY}, {"messages": []}, TALKS["tools"], {"messages": MANY[:2]}, {"messages": MANY[:3]}]
    rows = encode.many(values)
    assert [str(row) for row in rows if isinstance(row, BadRow)] == [
        "the conversation is empty",
        "the chat template leaves out the call of weather of turn 2 (it may want a list of parts)",
        "the conversation ends with a turn of role user, nobody answers it",
    ]
    for row, value in ((rows[0], values[0]), (rows[3], values[3])):
        alone = encode(value)
        assert isinstance(row, Tokens)
        assert (row.input_ids.tolist(), row.labels.tolist()) == (alone.input_ids.tolist(), alone.labels.tolist())
    refusing = ChatEncoder(TOKENIZER, "{{ raise_exception('no') if messages | length > 4 }}" + CHATML)
    assert [isinstance(row, BadRow) for row in refusing.many([{"messages": MANY}, {"messages": MANY[:2]}])] == [1, 0]


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("{{ m.role + ': ' + m.content.strip() }}", True),
        ("{{ (m['content'] | trim if m.content else '') ~ '|' }}", True),
        ("{% set n = messages[0] %}{{ n.content }}", True),
        (
            "{% set them = messages[1:] if loop.first else messages %}{% for n in them %}{{ n.role }}{% endfor %}",
            True,
        ),
        ("{{ messages[loop.index0 - 1].role }}{{ messages | length }}{{ (messages | last).role }}", True),
        ("{% set said = m.content | trim %}{% if said is string %}{{ said + '|' }}{% endif %}", True),
        ("{% set said = '>' + m.content %}{% set more = said ~ '<' %}{{ more }}", True),
        ("{% set said = m.content %}{{ said | trim }}", False),
        ("{% set said = m.content %}{{ said | length }}", False),
        ("{% set said = m.content %}{% set messages = said %}{{ messages | length }}", False),
        ("{% for letter in m.content %}x{% endfor %}", False),
        ("{% if m.content is eq('x') %}x{% endif %}", False),
        ("{{ ('x' + m.content) | trim }}", False),
        ("{{ m.content | upper }}", False),
        ("{{ m.content.strip('x') }}", False),
        ("{{ m.content[1:] }}", False),
        ("{% if m.content == 'x' %}{% endif %}", False),
        ("{% if 'x' in m.content %}{% endif %}", False),
        ("{% if m.content | length > 3 %}{% endif %}", False),
        ("{% set said %}{{ m.content }}{% endset %}{{ said | length }}", False),
        ("{% macro f(m) %}{{ m.content }}{% endmacro %}{{ f(m) | length }}", False),
        ("{{ m }}", False),
        ("{{ m | tojson }}", False),
        ("{{ m.get('content') | length }}", False),
        ("{% for key, value in m.items() %}{{ value | length }}{% endfor %}", False),
        ("{% set ns = namespace(m=messages[0]) %}{{ ns.m.content | length }}", False),
        ("{% set ns = namespace() %}{% set ns.m = messages[0] %}{{ ns.m.content | length }}", False),
        ("{% set a, b = messages[0], 1 %}{{ a.content | length }}", False),
        ("{{ messages | map(attribute='content') | join | length }}", False),
        ("{{ messages | selectattr('content', 'equalto', 'x') | list | length }}", False),
        ("{{ loop.previtem.content | length }}", False),
        ("{% if loop.changed(m.content) %}x{% endif %}", False),
        ("{% for key in ['content'] %}{{ m[key] | length }}{% endfor %}", False),
        ("{% filter upper %}{{ m.content }}{% endfilter %}", False),
        ("{{ strftime_now('%d') }}", False),
        ("{% for n in messages if n.content == 'x' %}{% endfor %}", False),
        ("{% unknown %}", False),
    ],
)
def test_which_templates_only_copy_words_is_told_by_their_text(text: str, copies: bool) -> None:
    assert only_copies("{% for m in messages %}" + text + "{% endfor %}") == copies


def test_what_a_template_looks_for_is_known() -> None:
    watch = Watch("{% if '/no' in x.content or x.content.split('END') or x.role == 'tool' or x.content[:2] == 'ab' %}"
                  "{% generation %}{{ x.content.strip('=') }}{% endgeneration %}{% endif %}")  # fmt: skip
    for words in ("say /no", "the END", "tool", "cab"):
        assert watch.sees(["Hello", words])
    assert not watch.sees(["Hello", "a tool = good", "content"])


def test_which_of_several_turns_is_asked_for_by_a_number_is_no_reason() -> None:
    assert not Watch("{% if messages[0]['role'] != 'system' and (messages | last).role == 'user' %}{% endif %}").sees(
        ["Hello user of the system"]
    )
    assert Watch("{% if '\n' in x.content %}{% endif %}").sees(["a\nb"])


@pytest.mark.parametrize("name", ["chatml", "stripped", "default system", "a line in the prompt", "gemma3"])
@given(st.lists(WORDS.filter(str.strip), min_size=1, max_size=5))
@settings(max_examples=25)
def test_every_turn_is_found_alike_in_both_ways(name: str, said: list[str]) -> None:
    text = OWN.get(name) or template(name)
    messages = [says(words) if place % 2 else user(words) for place, words in enumerate(said)]
    encode = _fast(f"{name}, every turn", text, "all_turns")
    assert found(encode, {"messages": messages}) == found(slow(text, "all_turns"), {"messages": messages})
    assert all(encode._shapes.values())  # none of them goes the long way by its shape


def test_words_that_stand_in_their_own_end_are_learned_with_it() -> None:
    talk = {"messages": [user("|"), says("a"), user("im_end"), says("b")]}
    assert found(_fast("every", OWN["stripped"], "all_turns"), talk) == found(slow(OWN["stripped"], "all_turns"), talk)


@pytest.mark.parametrize(
    ("name", "words"), [("a thought in the prompt", "<think>\nfoo</think>\nbar"), ("a line in the prompt", "\nfoo")]
)
def test_words_that_begin_as_the_prompt_goes_on_are_not_learned_twice(name: str, words: str) -> None:
    messages = [user("Hello"), says(words), user("Why?"), says("So.")]
    assert found(_fast(name, OWN[name]), {"messages": messages}) == found(slow(OWN[name]), {"messages": messages})
    plain = _fast(name, OWN[name])
    plain({"messages": MANY[:4]})
    assert all(plain._shapes.values())  # other words still go the fast way


@pytest.mark.parametrize(
    "text",
    [
        "{% set marks = ['/no'] %}{% for mark in marks %}{% if mark in x.content %}{% endif %}{% endfor %}",
        "{% for mark in ['/no', 'b'] %}{% if mark in x.content %}{% endif %}{% endfor %}",
        "{% set seen = namespace(mark='/no') %}{% if seen.mark in x.content %}{% endif %}",
        "{% macro say(x, mark='/no') %}{% if mark in x.content %}{% endif %}{% endmacro %}",
        "{% set mark %}/no{% endset %}{% if mark in x.content %}{% endif %}",
        "{% set mark %}{% if x %}{{ '/no' }}{% endif %}{% endset %}{% if mark in x.content %}{% endif %}",
        "{% macro mark() %}/no{% endmacro %}{% if mark() in x.content %}{% endif %}",
        "{% macro mark() %}/no{% endmacro %}{% set said = mark() %}{% if said in x.content %}{% endif %}",
        "{% if x.content[4] == '/' %}{% endif %}",
        "{% if x.content | last == '/' %}{% endif %}",
    ],
)
def test_what_a_template_looks_for_by_a_name_is_known(text: str) -> None:
    watch = Watch(text + "{% set said = x['name'].strip('=') %}")
    assert watch.sees(["say /no"])
    assert not watch.sees(["a name = good"])
