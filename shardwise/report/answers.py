"""After a run on chats: what the model answered before, and what it answers now."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from shardwise.report.console import show_line
from shardwise.spec.plan import Plan
from shardwise.spec.run import RunConfig

# Answers come from one process on the CPU; above this size that would outlast the training.
MAX_PARAMETERS = 500_000_000
NUM_PROMPTS = 2
ANSWER_TOKENS = 48


def show_answers(run: RunConfig, plan: Plan, export: Path, console: Console) -> None:
    """Print the answers of the input folder and of the export to the first questions of the data.

    Only for rows of messages and models that one process can run in seconds; else nothing is printed.
    """
    prompts = first_questions(Path(run.data.eval or run.data.train or ""))
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


def first_questions(path: Path) -> list[str]:
    """The first user turns of a file of messages; none for other rows."""
    questions: list[str] = []
    with path.open(encoding="utf-8-sig") as file:
        for line in file:
            try:
                messages = json.loads(line)["messages"]
                question = next(m["content"] for m in messages if m["role"] == "user")
            except (ValueError, KeyError, TypeError, StopIteration):
                continue
            if question not in questions:
                questions.append(question)
            if len(questions) == NUM_PROMPTS:
                break
    return questions
