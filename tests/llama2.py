"""A small Llama with a real Llama-2-style tokenizer: 32,000 pieces, byte fallback, no chat template."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from tests.fixtures import make_model

_FILE = "data/tokenizer.model.v1"  # in the package mistral-common (Apache-2.0)


def make_llama2(folder: Path) -> Path:
    """Four blocks, four heads; skips the test where the packages of the tokenizer are absent."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("needs mistral-common and sentencepiece (pip install --editable .[dev])")
    from transformers import LlamaTokenizer

    sizes = {"vocab_size": 32000, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    make_model(folder, "llama", **sizes)
    source = folder / "tokenizer.model"
    shutil.copyfile(Path(spec.submodule_search_locations[0]) / _FILE, source)
    tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.save_pretrained(folder)
    source.unlink()
    return folder
