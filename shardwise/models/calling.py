"""One way to call a language model: Hugging Face's with all their options, and a plain module of ids."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def call_model(model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """The logits [rows, length, vocabulary]; both inputs are [rows, length].

    Positions are always given and a cache never: only so are masks right for every attention implementation.
    What a model has no argument for it is not given.
    """
    given: dict[str, Any] = {"position_ids": position_ids + first_position(model), "use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    known = set(parameters)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        known.add("use_cache")
    output = model(input_ids, **{key: value for key, value in given.items() if key in known})
    if isinstance(output, torch.Tensor):
        return output
    logits: torch.Tensor = output[0] if isinstance(output, tuple) else output.logits
    return logits


@contextmanager
def leaving_no_state(model: nn.Module) -> Iterator[None]:
    """Take from modules the tensors that a pass leaves in their attributes (a recurrent state, say).

    They hold on to the graph of the pass, and a module that holds them cannot be copied.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, had in before:
            for key, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor) and had.get(key) is not value:
                    if key in had:
                        vars(module)[key] = had[key]
                    else:
                        del vars(module)[key]


def first_position(model: nn.Module) -> int:
    """Where the positions of a model begin: behind the row of its table of positions that stands for padding."""
    table = _padded_table(model)
    return 0 if table is None or table.padding_idx is None else table.padding_idx + 1


def num_positions(model: nn.Module) -> int | None:
    """Rows of the table of positions that are left for tokens, where some stand before them; None where none do."""
    table = _padded_table(model)
    return None if table is None else table.num_embeddings - first_position(model)


def _padded_table(model: nn.Module) -> nn.Embedding | None:
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None and "position" in name:
            return module
    return None
