"""Proof, before any weight is read, that a tensor plan gives the gradients of one process.

A small copy of the model (two blocks, the same numbers of heads, narrow heads) runs whole and split on the
tensor ranks themselves, in float64, and logits and gradients are compared. So a published plan that does not
fit what a configuration switches on is refused, whatever the architecture.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.shard import Shard, take
from shardwise.models.sharding import published_table
from shardwise.models.structure import find_structure
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.replicate import sum_gradients
from shardwise.parallel.tensor import apply_tensor
from shardwise.spec.layout import ParamLayout, chunk_range
from shardwise.spec.tolerance import PROOF, relative_error

_BLOCKS, _SMALLEST_HEAD, _ROWS, _LENGTH = 2, 8, 2, 6
_SEED = 0


def prove_tensor_plan(model: PreTrainedModel, mesh: Mesh) -> None:
    """Compare the split with the whole on a small copy of ``model``; a no-op at tensor degree 1.

    Called by all tensor ranks together, and all of them come to the same answer.

    Raises:
        PlanError: the copy cannot be built or split, or the results differ.
    """
    degree = mesh.size("tp")
    if degree == 1:
        return
    value, remedy = f"strategy.tp = {degree}", "Use tp=1, and pp or dp_shard in its place"
    try:
        whole = _small_copy(model, degree, mesh.device)
        _refuse_dropout_by_function(whole, value)
        error, where = _largest_error(whole, mesh)
    except PlanError:
        raise
    except Exception as failure:  # whatever a foreign forward raises on split weights
        name = type(model).__name__
        reason = f"the tensor plan of {name} does not run on a small copy ({type(failure).__name__}: {failure})"
        raise PlanError(value, reason, remedy) from failure
    if not error <= PROOF:
        rule = f"on a small copy of {type(model).__name__} the split differs from one process ({where}: {error:.1e})"
        raise PlanError(value, rule, remedy)


class _Dropouts(TorchFunctionMode):
    """Notes whether ``F.dropout`` draws on a tensor of the residual stream, which all tensor ranks hold alike."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.dropout:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | (kwargs or {})
            # Attention weights have a dim of heads, and their masks may differ between tensor ranks.
            replicated = given["input"].dim() <= 3
            self.found |= replicated and given.get("training", True) and given.get("p", 0.5) > 0.0
        return func(*args, **(kwargs or {}))


def _refuse_dropout_by_function(small: PreTrainedModel, value: str) -> None:
    """Dropout modules draw by name, the same on all tensor ranks; a function called in a forward cannot be followed.

    Raises:
        PlanError: the model draws dropout on replicated tensors by a function.
    """
    trained = copy.deepcopy(small).train()
    for module in trained.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.zeros(1, 2, dtype=torch.int64, device=next(trained.parameters()).device)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Dropouts() as seen:
        trained(input_ids=ids, use_cache=False)
    if seen.found:
        rule = f"{type(small).__name__} drops out of tensors that all tensor ranks hold, and their masks would differ"
        raise PlanError(value, rule, "Use tp=1, or set the residual and embedding dropout in its config.json to 0")


def _small_copy(model: PreTrainedModel, degree: int, device: torch.device) -> PreTrainedModel:
    config = small_config(model.config, degree)
    dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
    attention = model.config._attn_implementation
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        small: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        with torch.no_grad():
            for parameter in small.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return small.to(device).eval()


def small_config(config: Any, degree: int) -> Any:
    """``config`` with two blocks, narrow heads, and what ``degree`` divides or not as it does in the original."""
    small = copy.deepcopy(config)
    blocks, heads = config.num_hidden_layers, config.num_attention_heads
    width = _head_width(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == blocks:
            setattr(small, name, value[:_BLOCKS])
    small.num_hidden_layers = min(_BLOCKS, blocks)
    small.hidden_size = heads * width
    if getattr(config, "head_dim", None) is not None:
        small.head_dim = width
    if getattr(config, "rotary_dim", None) is not None:
        small.rotary_dim = min(config.rotary_dim, width)
    for factors in _factor_lists(getattr(small, "rope_parameters", None)):
        del factors[width // 2 :]
    if getattr(config, "intermediate_size", None) is not None:
        small.intermediate_size = 8 * degree - (1 if config.intermediate_size % degree else 0)
    small.vocab_size = 8 * degree + config.vocab_size % degree
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    return small


def _head_width(config: Any) -> int:
    """The smallest even head that leaves rotary positions an even part of it."""
    rope = getattr(config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    candidates = (width for width in range(_SMALLEST_HEAD, 257, 2) if int(width * share) % 2 == 0 < int(width * share))
    return next(candidates, config.hidden_size // config.num_attention_heads)


def _factor_lists(rope: Any) -> Iterator[list[float]]:
    """Lists of one factor for each rotary frequency (``long_factor``)."""
    for value in rope.values() if isinstance(rope, dict) else ():
        if isinstance(value, list):
            yield value
        elif isinstance(value, dict):
            yield from _factor_lists(value)


def _largest_error(whole: PreTrainedModel, mesh: Mesh) -> tuple[float, str]:
    """The largest relative error of logits and gradients over the tensor ranks, and where this rank has its own."""
    split = copy.deepcopy(whole)
    layouts = {name: ParamLayout(name, tuple(p.shape)) for name, p in split.named_parameters()}
    table = published_table(split, find_structure(split), mesh.size("tp"))
    layouts = apply_tensor(split, table, mesh, layouts)
    originals = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in split.named_parameters():
            parameter.copy_(take(originals[name], layouts[name]))
    vocabulary = slice(*chunk_range(whole.config.vocab_size, mesh.size("tp"), mesh.coordinate("tp")))
    want = _pass(whole, slice(None), mesh.device)
    got = _pass(split, vocabulary, mesh.device)
    errors = {"logits": _error(got, want[..., vocabulary], 0.0)}
    total = float(torch.stack([p.grad.norm() for p in whole.parameters() if p.grad is not None]).norm())
    for name, parameter in split.named_parameters():
        grad, original = parameter.grad, originals[name].grad
        if grad is None or original is None:
            errors[name] = 0.0 if grad is original else float("inf")
            continue
        if layouts[name].tp_partial:
            sum_gradients([Shard(layouts[name], parameter)], mesh, None)
        errors[name] = _error(grad, take(original, layouts[name]), total)
    where = max(errors, key=lambda name: errors[name])
    worst = torch.tensor(errors[where], dtype=torch.float32, device=mesh.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=mesh.group("tp"))
    return float(worst), where


def _pass(model: nn.Module, vocabulary: slice, device: torch.device) -> torch.Tensor:
    """The logits, after a backward pass of a loss that weighs each of them by a fixed random number."""
    size = model.config.vocab_size
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, size, (_ROWS, _LENGTH), generator=generator).to(device)
    weights = torch.randn(_ROWS, _LENGTH, size, generator=generator, dtype=torch.float64)[..., vocabulary].to(device)
    positions = torch.arange(_LENGTH, device=device).expand(_ROWS, _LENGTH)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    (logits * weights.to(logits.dtype)).sum().backward()
    return logits.detach()


def _error(got: torch.Tensor, want: torch.Tensor, total: float) -> float:
    if got.shape != want.shape:
        return float("inf")
    error = relative_error(float((got - want).norm()), float(want.norm()), total)
    return error if math.isfinite(error) else float("inf")
