"""What makes a Hugging Face folder usable beside its weights: configuration, tokenizer and chat template."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

MODEL_FILES = ("config.json", "generation_config.json")
TEMPLATE_FILE = "chat_template.jinja"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    TEMPLATE_FILE,
)


@dataclass(frozen=True)
class Companions:
    """Where a run's companions come from.

    Args:
        model: the model's folder.
        tokenizer: folder of the tokenizer; None: the model's own.
        chat_template: text of the template that the rows were rendered with; None: the tokenizer's own.
    """

    model: Path
    tokenizer: Path | None = None
    chat_template: str | None = None

    def copy_to(self, folder: Path, *, with_config: bool = True) -> None:
        """Copy the files that there are into ``folder``; without the model's configuration beside an adapter,
        where it would make the folder look like a whole model."""
        if with_config:
            copy_files(self.model, folder, MODEL_FILES)
        copy_files(self.tokenizer or self.model, folder, TOKENIZER_FILES)
        if self.chat_template is not None:
            (folder / TEMPLATE_FILE).write_text(self.chat_template, encoding="utf-8")


def copy_files(source: Path, folder: Path, names: tuple[str, ...]) -> None:
    """Copy those of the named files that there are."""
    for name in names:
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
