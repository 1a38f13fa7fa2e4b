"""Answers of a model in a Hugging Face folder, by plain transformers in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from shardwise.errors import ConfigError
from shardwise.models.adapter_folder import base_folder, is_adapter_folder, load_with_adapter
from shardwise.models.tokenizer import leading_bos, load_tokenizer


def generate(
    folder: Path, prompts: Sequence[str], max_new_tokens: int = 64, tokenizer_folder: Path | None = None
) -> list[str]:
    """Greedy answers to ``prompts``; through the chat template where the tokenizer has one.

    Args:
        folder: a model, or an adapter in PEFT's format beside the base model that it names.
        tokenizer_folder: another folder's tokenizer.

    Raises:
        ConfigError: the folder holds no model and no adapter.
    """
    is_adapter = is_adapter_folder(folder)
    if not is_adapter and not (folder / "config.json").exists():
        raise ConfigError(str(folder), "not a Hugging Face model folder (no config.json)", "Give a run's export folder")
    logging.disable_progress_bar()
    if is_adapter:
        base = base_folder(folder)
        model = load_with_adapter(folder, base)
        # The base model's configuration tells transformers which class of tokenizer the files are for.
        tokenizer = load_tokenizer(tokenizer_folder or folder, config=model.base_model.model.config)
    else:
        tokenizer = load_tokenizer(tokenizer_folder or folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            encoded = tokenizer(text, add_special_tokens=False)
            bos = leading_bos(tokenizer)  # as in training
            ids = bos * (encoded["input_ids"][:1] != bos) + encoded["input_ids"]
            encoded = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        else:
            encoded = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(
                **encoded,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=tokenizer.eos_token_id,
            )
        answers.append(tokenizer.decode(out[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return answers
