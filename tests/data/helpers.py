"""What the data tests share: writing files, loading them, and a small real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from shardwise.data.rows import Row, Rows, Source, load_rows
from shardwise.spec.run import DataConfig, RunConfig

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = [
    "system user assistant Hello there, how are you today? I am fine, thank you.",
    "你好，今天天气怎么样？今天天气很好。",
    "The answer is 42. 😀 Write a poem about the sea.",
]


def make_row(index: int, ids: list[int], labels: list[int] | None = None, positions: list[int] | None = None) -> Row:
    as_array = lambda values: np.array(values, dtype=np.int32)  # noqa: E731
    return Row(
        index,
        index + 1,
        as_array(ids),
        as_array(ids if labels is None else labels),
        None if positions is None else as_array(positions),
    )


def write(path: Path, rows: list[Any]) -> Path:
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8"))
    return path


def no_tokenizer() -> Any:
    raise AssertionError("token rows need no tokenizer")


def load(path: Path, vocab_size: int = 132, **given: Any) -> Rows:
    """``load_rows`` with the keys of ``data`` among the arguments."""
    data = {key: given.pop(key) for key in list(given) if key in DataConfig.model_fields}
    run = RunConfig(model="m", chat_template=given.pop("chat_template", None), data=DataConfig(**data))
    given.setdefault("tokenizer", no_tokenizer)
    source = Source(path, run, vocab_size, given.pop("max_positions", None), run.data.max_samples)
    return load_rows(source, **given)


def make_tokenizer(
    template: str | None = CHATML, *, adds_bos: bool = False, marks: bool = True
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained here, with ChatML's marks as special tokens if it has ``marks``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", *(["<|im_start|>", "<|im_end|>"] if marks else [])]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    if template is not None:
        fast.chat_template = template
    return fast
