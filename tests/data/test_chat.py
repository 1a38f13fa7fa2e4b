from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from shardwise.data.chat import ChatEncoder
from shardwise.data.rows import Row
from shardwise.errors import ConfigError
from tests.data.helpers import CHATML, load, make_tokenizer, write

SAY = {
    "one turn": ["user:Hello there", "assistant:I am fine, thank you."],
    "many turns": [
        "user:Hello",
        "assistant:Hi 😀",
        "user:你好",
        "assistant:今天天气很好。",
        "user:42?",
        "assistant:42",
    ],
    "system": ["system:You are kind.", "user:Hello", "assistant: padded \n\n answer "],
    "two answers in a row": ["user:Hello", "assistant:one", "assistant:two"],
    "the same words": ["user:Hello", "assistant:Hello", "user:Hello", "assistant:Hello"],
}
# Qwen3's habit: an empty thought before the last answer only.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts the system message into the last user turn, as Mistral's templates do.
FOLDING = (
    "{% for m in messages %}{% if m.role == 'user' %}[{% if loop.index >= messages | length - 1 %}SYS {% endif %}"
    "{{ m.content }}]{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def conversation(*turns: str) -> dict[str, Any]:
    return {"messages": [dict(zip(("role", "content"), turn.split(":", 1), strict=True)) for turn in turns]}


def expected(tokenizer: PreTrainedTokenizerFast, pieces: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Ids and labels, from pieces of text that are tokenised one by one (their borders are special tokens)."""
    ids, labels = [], []
    for text, supervised in pieces:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += part if supervised else [-100] * len(part)
    return ids, labels


def load_one(folder: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], **given: Any) -> Row:
    (loaded,) = load(write(folder / "d.jsonl", [row]), len(tokenizer), tokenizer=lambda: tokenizer, **given)
    return loaded


@pytest.mark.parametrize("name", SAY)
def test_the_loss_is_on_the_assistants_words_and_their_end_mark(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, name: str
) -> None:
    pieces: list[tuple[str, bool]] = []
    for turn in SAY[name]:
        role, content = turn.split(":", 1)
        pieces += [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>\n", role == "assistant")]
    ids, labels = expected(tokenizer, pieces)
    row = load_one(tmp_path, tokenizer, conversation(*SAY[name]))
    whole = tokenizer.apply_chat_template(conversation(*SAY[name])["messages"], tokenize=True)["input_ids"]
    assert row.input_ids.tolist() == ids == whole
    assert row.labels.tolist() == labels
    answered = tokenizer.decode(row.labels[row.labels != -100])
    assert answered == "".join(f"{turn[10:]}<|im_end|>\n" for turn in SAY[name] if turn.startswith("assistant"))


def test_a_template_that_decorates_only_the_last_answer(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(THINKING)
    row = load_one(tmp_path, tokenizer, conversation(*SAY["many turns"]))
    answered = tokenizer.decode(row.labels[row.labels != -100])
    assert answered == "Hi 😀<|im_end|>\n今天天气很好。<|im_end|>\n<think>\n\n</think>\n\n42<|im_end|>\n"


@pytest.mark.parametrize("first", ["Hi", "<b>Hi</b>", "a"])
def test_a_generation_prompt_that_begins_a_thought_which_no_turn_has(tmp_path: Path, first: str) -> None:
    tokenizer = make_tokenizer(CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"))
    row = load_one(tmp_path, tokenizer, conversation("user:Hello", f"assistant:{first}", "user:you", "assistant:good"))
    assert tokenizer.decode(row.labels[row.labels != -100]) == f"{first}<|im_end|>\ngood<|im_end|>\n"


def test_a_template_that_leaves_out_what_is_said_is_refused(tmp_path: Path) -> None:
    # Templates of models that also see images read a list of parts, and write nothing for a text.
    parts = CHATML.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: the chat template leaves out the text of turn 2"):
        load_one(tmp_path, make_tokenizer(parts), conversation(*SAY["one turn"]))


def test_a_template_that_rewrites_what_came_before_is_refused_by_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(FOLDING)
    assert load_one(tmp_path, tokenizer, conversation("user:Hello", "assistant:Hi"))
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: turn 2 \(assistant\) cannot be found"):
        load_one(tmp_path, tokenizer, conversation("user:Hello", "assistant:Hi", "user:you", "assistant:Hi"))


def test_the_loss_ends_with_the_turn_also_without_a_mark(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    row = load_one(tmp_path, tokenizer, conversation("user:4", "assistant:Hello", "user:2", "assistant:you"))
    tokens = zip(tokenizer.convert_ids_to_tokens(row.input_ids.tolist()), row.labels.tolist(), strict=True)
    assert [token for token, label in tokens if label == -100] == ["4", "2"]
    assert row.input_ids[-1] == row.labels[-1] == tokenizer.eos_token_id  # or the model would not learn to stop


@pytest.mark.parametrize("printed", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_whoever_writes_it(tmp_path: Path, printed: bool, adds_bos: bool) -> None:
    tokenizer = make_tokenizer(("{{ bos_token }}" if printed else "") + CHATML, adds_bos=adds_bos)
    row = load_one(tmp_path, tokenizer, conversation(*SAY["one turn"]))
    assert row.input_ids.tolist().count(tokenizer.bos_token_id) == int(printed or adds_bos)
    assert len(row.labels) == len(row.input_ids)
    assert tokenizer.decode(row.labels[row.labels != -100]) == "I am fine, thank you.<|im_end|>\n"


def test_the_end_mark_is_supervised_when_it_is_the_padding_token_too(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML.replace("<|im_end|>\n", "</s>"))
    tokenizer.pad_token = tokenizer.eos_token
    row = load_one(tmp_path, tokenizer, conversation(*SAY["one turn"]))
    assert row.input_ids[-1] == row.labels[-1] == tokenizer.eos_token_id


def test_a_token_that_a_merge_draws_over_the_border_holds_the_answer(tmp_path: Path) -> None:
    # Prompt and answer meet inside "Hello": wherever the tokens break, the answer's last letter is supervised.
    tokenizer = make_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    row = load_one(tmp_path, tokenizer, conversation("user:Hel", "assistant:lo there"))
    answered = tokenizer.decode(row.labels[row.labels != -100])
    assert "Hello there</s>".endswith(answered)
    assert answered.endswith("lo there</s>")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": []}, "empty"),
        ({"messages": None}, "NoneType"),
        ({"messages": ["hi"]}, "turn 1 is a str"),
        ({"messages": [{"role": "user", "content": None}]}, "turn 1 (user) has no content"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}, "turn 2 (assistant) has no content"),
        (conversation("user:a", "assistant: "), "turn 2 (assistant) has empty content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "part of type 'text'"),
        (conversation("user:a"), "no turn of the assistant"),
        (conversation("user:a", "assistant:b", "user:c"), "ends with a turn of role user"),
        (conversation("alien:a", "gpt:b"), "role 'alien'"),
        ({"messages": [{"from": "human", "value": "a"}]}, "ShareGPT"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "list as role"),
        ({"input_ids": [1, 2]}, "format tokens"),
    ],
)
def test_a_bad_conversation_is_refused_with_its_line_and_reason(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, row: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "d.jsonl", [conversation("user:a", "assistant:b"), row])
    with pytest.raises(ConfigError) as error:
        load(path, tokenizer=lambda: tokenizer)
    assert "d.jsonl:2: " in str(error.value)
    assert reason in str(error.value)


def test_what_the_template_refuses_is_a_bad_row(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("{{ raise_exception('no system here') if messages[0].role == 'system' }}" + CHATML)
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: .*no system here"):
        load_one(tmp_path, tokenizer, conversation(*SAY["system"]))
    broken = make_tokenizer("{{ messages[0].content + 1 }}")
    with pytest.raises(ConfigError, match=r"d\.jsonl:1: the chat template"):
        load_one(tmp_path, broken, conversation(*SAY["one turn"]))


def test_the_template_can_be_a_file_or_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(None)
    plain = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(plain)
    by_text = load_one(tmp_path, tokenizer, conversation("user:Hello", "assistant:Hi"), chat_template=plain)
    by_file = load_one(
        tmp_path, tokenizer, conversation("user:Hello", "assistant:Hi"), chat_template=str(tmp_path / "chat.jinja")
    )
    assert tokenizer.decode(by_text.input_ids) == "Hello</s>Hi</s>"
    assert by_text.labels.tolist() == by_file.labels.tolist()


@pytest.mark.parametrize(
    ("template", "words"), [("nowhere.jinja", "neither a file"), ("{% for m in messages %}", "not a valid template")]
)
def test_a_template_that_cannot_be_used_is_refused_at_once(template: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatEncoder(make_tokenizer(), template)


def test_an_id_beyond_the_models_vocabulary_is_refused(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(tmp_path / "d.jsonl", [conversation("user:a", "assistant:b")])
    with pytest.raises(
        ConfigError, match=r"d\.jsonl:1: the tokenizer's id \d+ is outside the model's vocabulary \[0, 4\)"
    ):
        load(path, 4, tokenizer=lambda: tokenizer)


def test_a_model_without_a_template_gets_one_of_its_own_tokens_and_says_so(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(None), list[str]()
    row = load_one(tmp_path, tokenizer, conversation(*SAY["system"]), notify=said.append)
    assert tokenizer.decode(row.labels[row.labels != -100]) == " padded \n\n answer <|im_end|>\n"
    assert "no chat template" in said[0]
    assert "<|im_start|>" in said[0]
    plain = make_tokenizer(None, marks=False)
    row = load_one(tmp_path, plain, conversation(*SAY["many turns"]))
    assert plain.decode(row.labels[row.labels != -100]) == "Hi 😀</s>\n今天天气很好。</s>\n42</s>\n"
    plain.eos_token = None
    with pytest.raises(ConfigError, match=r"neither a chat template nor a token that could end a turn.*chat_template="):
        load_one(tmp_path, plain, conversation(*SAY["one turn"]))


TALK = ("system:You are kind.", "user:Hello", "assistant:one", "user:Hi", "assistant:two", "user:42?")
LEARNED = {
    "assistant": "one<|im_end|>\ntwo<|im_end|>\n",
    "last_turn": "two<|im_end|>\n",
    "all_turns": "You are kind.<|im_end|>\nHello<|im_end|>\none<|im_end|>\nHi<|im_end|>\ntwo<|im_end|>\n",
}


@pytest.mark.parametrize("loss", ["assistant", "last_turn", "all_turns", "text"])
def test_what_is_learned_is_chosen(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, loss: str) -> None:
    row = load_one(tmp_path, tokenizer, conversation(*TALK[:5]), loss=loss)
    learned = tokenizer.decode(row.labels[row.labels != -100])
    assert learned == (tokenizer.decode(row.input_ids) if loss == "text" else LEARNED[loss])
    if loss in ("all_turns", "text"):  # nobody has to answer
        load_one(tmp_path, tokenizer, conversation(*TALK), loss=loss)
    else:
        with pytest.raises(ConfigError, match="ends with a turn of role user"):
            load_one(tmp_path, tokenizer, conversation(*TALK), loss=loss)


def test_short_words_are_not_taken_for_what_the_template_writes(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    row = load_one(tmp_path, tokenizer, conversation("system:s", "user:user", "assistant:a", "user:a", "assistant:t"))
    every = load_one(
        tmp_path,
        tokenizer,
        conversation("system:s", "user:user", "assistant:a", "user:a", "assistant:t"),
        loss="all_turns",
    )
    assert tokenizer.decode(row.labels[row.labels != -100]) == "a<|im_end|>\nt<|im_end|>\n"
    said = "".join(f"{word}<|im_end|>\n" for word in ("s", "user", "a", "a", "t"))
    assert tokenizer.decode(every.labels[every.labels != -100]) == said


def test_all_turns_of_a_template_that_puts_the_system_text_elsewhere(tmp_path: Path) -> None:
    folded = (
        "{% for m in messages %}{% if m.role == 'user' %}[{% if loop.index == 2 and messages[0].role == 'system' %}"
        "{{ messages[0].content }} {% endif %}{{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content }}</s>"
        "{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(folded)
    row = load_one(tmp_path, tokenizer, conversation(*TALK[:5]), loss="all_turns")
    assert tokenizer.decode(row.input_ids) == "[You are kind. Hello]one</s>[Hi]two</s>"
    assert tokenizer.decode(row.labels[row.labels != -100]) == "You are kind. Hello]one</s>Hi]two</s>"


CALL = {"type": "function", "function": {"name": "weather", "arguments": '{"place": "Wuhan"}'}}
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments.place }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_calls_of_tools_are_learned_and_their_results_are_not(tmp_path: Path) -> None:
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
    row = conversation("user:Hello", "tool:22", "assistant:It is 22.")
    row["messages"].insert(1, call)
    for template in (
        TOOLS,
        TOOLS.replace(
            "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}<think>{% endif %}{{ m.content }}"
        ),
    ):
        tokenizer = make_tokenizer(template)
        loaded = load_one(tmp_path, tokenizer, row)
        said = tokenizer.decode(loaded.labels[loaded.labels != -100])
        answer = "<think>It is 22." if "think" in template else "It is 22."
        assert said == f"<call>weather Wuhan</call><call>weather Wuhan</call><|im_end|>\n{answer}<|im_end|>\n"
    with pytest.raises(ConfigError, match="leaves out the call of weather of turn 2"):
        load_one(tmp_path, make_tokenizer(CHATML), row)
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    with pytest.raises(ConfigError, match=r"turn 1: the arguments of its tool call"):
        load_one(tmp_path, make_tokenizer(TOOLS), {"messages": [broken]})


def test_marks_of_a_template_are_used_where_its_turns_change(tmp_path: Path) -> None:
    marked = FOLDING.replace("{{ m.content }}</s>", "{% generation %}{{ m.content }}</s>{% endgeneration %}")
    tokenizer = make_tokenizer(marked)
    row = load_one(tmp_path, tokenizer, conversation("user:Hello", "assistant:Hi", "user:you", "assistant:42"))
    assert tokenizer.decode(row.labels[row.labels != -100]) == "Hi</s>42</s>"


def test_an_answer_beyond_the_limit_stays_whole_or_its_row_is_dropped(tmp_path: Path) -> None:
    tokenizer, said = make_tokenizer(adds_bos=True), list[str]()
    talks = [
        conversation("user:" + "Write a poem. " * 20, "assistant:Hi"),
        conversation("user:a", "assistant:b"),
        conversation("user:a", "assistant:" + "Write a poem. " * 20),
        conversation("user:a", "assistant:b", "user:Write a poem.", "assistant:" + "Write a poem. " * 20),
    ]
    rows = load(
        write(tmp_path / "d.jsonl", talks),
        len(tokenizer),
        tokenizer=lambda: tokenizer,
        max_length=32,
        on_long="truncate",
        notify=said.append,
    )
    assert [row.line for row in rows] == [1, 2, 4]
    assert [tokenizer.decode(row.labels[row.labels != -100]) for row in rows] == [
        "Hi<|im_end|>\n", "b<|im_end|>\n", "b<|im_end|>\n"
    ]  # fmt: skip
    assert len(rows[0].input_ids) == 32
    assert tokenizer.decode(rows[0].input_ids).startswith("<s>")
    assert tokenizer.decode(rows[0].input_ids).endswith("<|im_start|>assistant\nHi<|im_end|>\n")
    assert "1 rows longer" in said[0]
    assert "2 rows cut" in said[1]


def test_other_forms_of_rows_follow_the_same_choice(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def said(row: dict[str, Any], loss: str) -> str:
        loaded = load_one(tmp_path, tokenizer, row, loss=loss)
        return str(tokenizer.decode(loaded.labels[loaded.labels != -100]))

    completion = {"prompt": "Hello ", "completion": "Hi"}
    assert said(completion, "assistant") == said(completion, "last_turn") == "Hi</s>"
    assert said(completion, "text") == said(completion, "all_turns") == "Hello Hi</s>"
    turns = {"prompt": conversation("user:Hello")["messages"], "completion": conversation("assistant:Hi")["messages"]}
    assert said(turns, "assistant") == "Hi<|im_end|>\n"
    assert said(turns, "all_turns") == "Hello<|im_end|>\nHi<|im_end|>\n"
    pair = {"question": "Hello", "answer": "Hi"}
    assert said(pair, "assistant") == "Hi<|im_end|>\n"
    assert said(pair, "all_turns") == "Hello<|im_end|>\nHi<|im_end|>\n"
    talk = conversation(*TALK[1:5])
    talk["messages"][1]["weight"] = 0  # given, not learned
    assert said(talk, "assistant") == "two<|im_end|>\n"
    assert said(talk, "all_turns") == "Hello<|im_end|>\nHi<|im_end|>\ntwo<|im_end|>\n"


def test_a_conversation_may_begin_with_an_answer() -> None:
    tokenizer = make_tokenizer()
    talk = [{"role": role, "content": text} for role, text in
            (("assistant", "Hello"), ("user", "Why?"), ("assistant", "So."))]  # fmt: skip
    for messages in (talk, [{"role": "system", "content": "Be kind."}, *talk]):
        for loss, expected in (("assistant", "Hello<|im_end|>\nSo.<|im_end|>\n"), ("last_turn", "So.<|im_end|>\n")):
            tokens = ChatEncoder(tokenizer, loss=loss)({"messages": messages})
            assert tokenizer.decode(tokens.labels[tokens.labels != -100]) == expected
