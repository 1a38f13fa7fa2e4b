"""The sizes of a model, from its modules: what ``config.json`` leaves to the model's class is known here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shardwise.models.build import build_on_meta
from shardwise.models.calling import num_positions
from shardwise.models.structure import Structure, find_structure, text_config
from shardwise.spec.counts import num_active_experts, num_experts
from shardwise.spec.model import NO_LIMIT, ModelSpec, has_weights, hash_of, read_config

# Names of a size in configuration classes, which map most of their own spellings to the first one.
_HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def describe_folder(folder: Path) -> ModelSpec:
    """The specification of the model in ``folder``, built on meta.

    Raises:
        ConfigError: transformers cannot build it.
        PlanError: it has no blocks, embedding or head that can be told.
    """
    model = build_on_meta(folder, None)
    return describe_sizes(model, find_structure(model), folder)


def describe_sizes(model: PreTrainedModel, structure: Structure, folder: Path) -> ModelSpec:
    """The specification of ``model``, which was built from the ``config.json`` in ``folder``."""
    _, content = read_config(folder / "config.json")
    config = text_config(model)
    hidden, heads = int(config.hidden_size), _number(config, _HEADS) or 0
    head_dim = _number(config, ("head_dim",)) or (hidden // heads if heads else 0)
    embedding = model.get_submodule(structure.embedding)
    vocabulary = int(getattr(embedding, "num_embeddings", 0)) or int(config.vocab_size)
    blocks = list(model.get_submodule(structure.blocks).children())
    inside = [count_block(block, config) for block in blocks]
    before, after = _around(model, structure, vocabulary * hidden)
    return ModelSpec(
        model_type=model.config.model_type,
        architecture=type(model).__name__,
        num_blocks=len(blocks),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=_number(config, _KV_HEADS) or heads,
        head_dim=head_dim,
        intermediate_size=_number(config, ("intermediate_size",)) or _widest(blocks),
        vocab_size=vocabulary,
        max_position_embeddings=min(_number(config, _POSITIONS) or NO_LIMIT, num_positions(model) or NO_LIMIT),
        tied=structure.tied,
        has_weights=has_weights(folder),
        hash=hash_of(content),
        block_parameters=sum(whole for whole, _, _ in inside) // len(blocks),
        block_norm_parameters=sum(vectors for _, vectors, _ in inside) // len(blocks),
        block_matrix_parameters=sum(matrices for _, _, matrices in inside) // len(blocks),
        before_parameters=before,
        after_parameters=after,
        num_experts=num_experts(vars(config)),
        measured=True,
    )


def count_block(block: nn.Module, config: Any) -> tuple[int, int, int]:
    """Parameters of a block: all, those of its norms, and of its matrices what one token is multiplied by.

    Of a stack of experts (a parameter of three dims, one of them the experts) a token meets those it is routed to.
    """
    numbers = vars(config)
    experts = num_experts(numbers)
    used = num_active_experts(numbers) / max(experts, 1)
    norms, matrices = 0, 0.0
    for name, module in block.named_modules():
        for parameter in module.parameters(recurse=False):
            is_stack = parameter.dim() == 3 and parameter.shape[0] == experts and not isinstance(module, nn.Conv1d)
            if parameter.dim() > 1:
                matrices += parameter.numel() * (used if is_stack or ".experts." in f".{name}." else 1)
            elif "norm" in type(module).__name__.lower():
                norms += parameter.numel()
    return sum(parameter.numel() for parameter in block.parameters()), norms, round(matrices)


def _around(model: nn.Module, structure: Structure, matrix: int) -> tuple[int, int]:
    """Parameters before and after the blocks, one ``matrix`` of the embedding and of the head left out."""
    own = set(map(id, model.get_submodule(structure.blocks).parameters()))
    head = set(map(id, model.get_submodule(structure.head).parameters()))
    before, after = -matrix, 0 if structure.tied else -matrix
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in own:
                continue
            own.add(id(parameter))
            if isinstance(module, nn.Embedding) and (structure.tied or id(parameter) not in head):
                before += parameter.numel()
            else:
                after += parameter.numel()
    return before, after


def _widest(blocks: Iterable[nn.Module]) -> int:
    """The largest dim of a weight in the blocks."""
    return max(size for block in blocks for parameter in block.parameters() for size in parameter.shape)


def _number(config: Any, names: Iterable[str]) -> int | None:
    """The first of ``names`` that the configuration has as a whole number; of one for each block the largest."""
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
            value = max(value)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None
