"""After a run on chats: what the model answered before, and what it answers now."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwise.data.convert import read_conversation
from shardwise.data.detect import format_of
from shardwise.data.format import BadRow
from shardwise.data.readers import files_of, read_records
from shardwise.errors import ConfigError
from shardwise.report.console import show_line
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig, SourceConfig, data_sources

# Answers come from one process on the CPU; above this size that would outlast the training.
MAX_PARAMETERS = 500_000_000
NUM_PROMPTS = 2
ANSWER_TOKENS = 48
_LOOKED_AT = 100  # rows of a file


def show_answers(run: RunConfig, plan: Plan, export: Path, console: Console) -> None:
    """Print the answers of the input folder and of the export to the first questions of the data.

    Only for rows of messages and models that one process can run in seconds; else nothing is printed.
    """
    prompts = first_questions(data_sources(run.data.eval) or data_sources(run.data.train))
    if not prompts or run.model_init == "random" or plan.model.num_parameters > MAX_PARAMETERS:
        return
    from shardwise.models.generate import generate  # loads transformers, which costs seconds

    try:
        before = generate(Path(run.model), prompts, ANSWER_TOKENS, Path(run.tokenizer) if run.tokenizer else None)
        after = generate(export, prompts, ANSWER_TOKENS)
    except Exception as error:  # the training is done and exported: answers are an extra
        console.print(f"no answers: {error}", markup=False, highlight=False)
        return
    for prompt, old, new in zip(prompts, before, after, strict=True):
        for label, text in (("question", prompt), ("before", old), ("after", new)):
            show_line(console, label, text.replace("\n", " "))


def first_questions(sources: Iterable[SourceConfig]) -> list[str]:
    """The first user turns among the first rows of each file of conversations; none of other rows."""
    questions: list[str] = []
    for source in sources:
        try:
            for file in files_of(Path(source.path)):
                for record in read_records(file, _LOOKED_AT):
                    questions += _questions(record.value)
        except ConfigError:  # answers are an extra
            continue
    return list(dict.fromkeys(questions))[:NUM_PROMPTS]


def _questions(value: Any) -> list[str]:
    kind = format_of(value)
    if kind not in ("messages", "sharegpt"):
        return []
    try:
        messages = read_conversation(value).messages
    except BadRow:
        return []
    return [turn["content"] for turn in messages if turn["role"] == "user" and isinstance(turn["content"], str)][:1]
