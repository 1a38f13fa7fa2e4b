"""Adapters folded into their base model: a plain Hugging Face folder, by plain peft in one process on the CPU."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.checkpoint.adapter import find_adapter
from shardwise.checkpoint.companions import TOKENIZER_FILES, copy_files
from shardwise.checkpoint.export import writing
from shardwise.errors import ConfigError
from shardwise.models.adapter_folder import base_folder, load_with_adapter
from shardwise.models.lora import has_adapter
from shardwise.spec import tolerance

_PROBE_TOKENS = (2, 32)  # rows x length of the ids on which logits are compared


@dataclass(frozen=True)
class Comparison:
    """Logits of an export, read back from its files, against those of the live model (base and adapter apart).

    ``difference`` is the largest difference, ``scale`` the largest logit, ``limit`` the relative limit of the
    files' ``dtype``.
    """

    difference: float
    scale: float
    limit: float
    dtype: str

    @property
    def agrees(self) -> bool:
        return self.difference <= self.limit * max(1.0, self.scale)

    def __str__(self) -> str:
        return (
            f"largest difference of logits before and after: {self.difference:.2e} "
            f"(largest logit {self.scale:.3g}, limit {self.limit * max(1.0, self.scale):.2e}, files in {self.dtype})"
        )


def merge(source: Path, out: Path, base: Path | None = None) -> Comparison:
    """Write the model that an adapter makes of its base to ``out``, and compare both.

    Memory: the model in fp32 once, and what one layer's product needs.

    Args:
        source: a run's output folder or an adapter folder.
        out: a folder that is not there yet, or empty.
        base: the base model, where the one that the adapter names has moved.

    Raises:
        ConfigError, CheckpointError: no adapter or no base model, or an ``out`` with something in it.
    """
    adapter = find_adapter(source)
    folder = base_folder(adapter, base)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(str(out), "is not empty", "Name a folder that is not there yet")
    stored = AutoConfig.from_pretrained(folder).dtype or torch.float32
    model = load_with_adapter(adapter, folder)
    ids = probe(model.config.get_text_config().vocab_size)
    before = logits_of(model, ids)
    was_tied = bool(model.config.get_text_config().tie_word_embeddings)
    _untie_adapted_head(model.get_base_model())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns of every tie; the next lines settle it
        merged: PreTrainedModel = model.merge_and_unload()
    del model
    if was_tied:
        _settle_tie(merged)
    with writing(out):
        merged.to(stored).save_pretrained(out)
    del merged
    for holder in (folder, adapter):  # the adapter's own tokenizer files, else those of its base
        copy_files(holder, out, TOKENIZER_FILES)
    return compare_logits(out, ids, before, stored)


def compare_logits(folder: Path, ids: torch.Tensor, before: torch.Tensor, stored: torch.dtype) -> Comparison:
    """The model in ``folder``, in fp32, against the logits ``before``; its files are rounded to ``stored``."""
    after = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)
    return Comparison(
        difference=float((after - before).abs().max()),
        scale=float(before.abs().max()),
        limit=tolerance.EXPORT_LOGITS
        if stored is torch.float32
        else tolerance.MERGED_ROUNDING * torch.finfo(stored).eps,
        dtype=str(stored).removeprefix("torch."),
    )


def probe(vocab_size: int) -> torch.Tensor:
    """Ids from all over the vocabulary, the same at every call."""
    rows, length = _PROBE_TOKENS
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (rows, length), generator=generator)


@torch.no_grad()
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What a model answers to ``ids``, [rows, length, vocabulary]."""
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _untie_adapted_head(model: PreTrainedModel) -> None:
    """Give a tied head that has an adapter a weight of its own: merging would add the adapter to the embedding too."""
    head = model.get_output_embeddings()
    if head is not None and has_adapter(head) and head.weight is model.get_input_embeddings().weight:
        head.base_layer.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def _settle_tie(model: PreTrainedModel) -> None:
    """Tie head and embedding again where they still are equal, else let the configuration say that they are not."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = torch.equal(head.weight, embedding.weight)
    if tied:
        head.weight = embedding.weight
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = tied
