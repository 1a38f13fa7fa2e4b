"""Loading a tokenizer, with one message where there is none. Imports transformers when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path, **settings: Any) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder; no hub is asked.

    Raises:
        ConfigError: the folder holds none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, **settings)
    except Exception as error:  # of transformers, of the tokenizers library, of the file: one message for all
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        rule = f"holds no tokenizer that can be read ({type(error).__name__}: {reason[:200]})"
        remedy = "Name a folder that has one with tokenizer=FOLDER, or use rows of token ids"
        raise ConfigError(f"tokenizer in {folder}", rule, remedy) from error


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS that the tokenizer itself puts before a text, as a list of one id or none.

    Where it does so, the model has been trained to see one. Texts that a chat template has rendered are tokenised
    without special tokens, and get it back unless the template writes it.
    """
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []
