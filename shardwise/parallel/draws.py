"""Random numbers that a forward pass draws in training, and which splits they rule out.

Dropout modules draw by name and attention by block (:mod:`shardwise.parallel.dropout`). What a forward draws
otherwise cannot be followed: a router that samples its experts, noise on hidden states, blocks that are skipped.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.parallel.mesh import Mesh


class _Functions(TorchFunctionMode):
    """Notes whether ``F.dropout`` draws on a tensor of the residual stream, which all tensor ranks hold alike.

    ``in_dropout`` is True inside of it, and inside of torch's attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = self.in_dropout = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
            # Attention weights have a dim of heads, and their masks may differ between tensor ranks.
            replicated = given["input"].dim() <= 3
            self.found |= replicated and given.get("training", True) and given.get("p", 0.5) > 0.0
        outer = self.in_dropout
        self.in_dropout |= func in (F.dropout, F.scaled_dot_product_attention)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.in_dropout = outer


class _Operators(TorchDispatchMode):
    """Notes the operators outside of dropout and attention that draw, by their names."""

    def __init__(self, functions: _Functions) -> None:
        super().__init__()
        self._functions = functions
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.strip("_")
        if torch.Tag.nondeterministic_seeded in func.tags and not self._functions.in_dropout:
            self.names += [] if name in self.names else [name]
        return func(*args, **(kwargs or {}))


def refuse_draws(small: PreTrainedModel, degree: int) -> None:
    """Refuse what tensor ranks would draw each for itself on tensors that all of them hold.

    Args:
        small: a copy of the model; it is called as in training.

    Raises:
        PlanError: the model draws dropout on replicated tensors by a function, or other random numbers.
    """
    trained = copy.deepcopy(small).train()
    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(trained.parameters()).device)
    functions = _Functions()
    operators = _Operators(functions)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), operators, functions:
        trained(input_ids=ids, use_cache=False)
    name = type(small).__name__
    if functions.found:
        rule = f"{name} drops out of tensors that all tensor ranks hold, and their masks would differ"
        remedy = "Use tp=1, or set the residual and embedding dropout in its config.json to 0"
        raise PlanError(f"strategy.tp = {degree}", rule, remedy)
    if operators.names:
        drawn = ", ".join(operators.names)
        rule = f"{name} draws random numbers in training ({drawn}), and those of the tensor ranks would differ"
        raise PlanError(f"strategy.tp = {degree}", rule, "Use tp=1, and pp or dp_shard in its place")


def refuse_skipped_blocks(model: nn.Module, mesh: Mesh) -> None:
    """Refuse blocks that are skipped by chance (``layerdrop``) where ranks must skip the same ones.

    Under the data axis with whole copies each rank may skip its own.

    Raises:
        PlanError: tensor ranks, shards or stages would wait for each other, or lose a hidden state.
    """
    shares = {getattr(module, "layerdrop", 0.0) for module in model.modules()}
    share = max((share for share in shares if isinstance(share, int | float)), default=0.0)
    for axis in ("tp", "dp_shard", "pp"):
        if share > 0 and mesh.size(axis) > 1:
            rule = f"{type(model).__name__} skips blocks by chance (layerdrop {share:g}), each rank others"
            remedy = "Set layerdrop in its config.json to 0, or use dp_replicate in its place"
            raise PlanError(f"strategy.{axis} = {mesh.size(axis)}", rule, remedy)
