"""A small copy of any Hugging Face causal language model: same class, same special cases, narrow.

What a plan relies on stays: what the tensor degree divides and what not, heads over KV heads, a head width of its
own, groups, experts, latent ranks, and the order of the kinds of blocks, of each of which a few are kept. So a
fault of a split shows on the copy, in seconds and on a CPU.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.errors import PlanError
from shardwise.models.build import (
    arrange,
    causal_model,
    freeze_stored_buffers,
    widen,
)
from shardwise.models.kinds import block_signatures
from shardwise.models.sizes import SKIPPED, Path, Tree
from shardwise.models.small_config import shrink_sizes, text_path
from shardwise.models.structure import find_blocks, text_config

_NOISE = 0.2
_LENGTHS = r"layers?$|^num_blocks$|^depth$"  # names of numbers of blocks


def shrink(config: Any, *, degree: int = 2, num_blocks_per_kind: int = 2, scale: int = 1) -> Any:
    """A small configuration with the special cases of ``config``.

    Args:
        config: of a causal language model; not changed.
        degree: the tensor degree that the copy is to be split by: what it divides stays divisible, what it does
            not divide stays indivisible.
        num_blocks_per_kind: how many blocks of each kind stay (all, where there are fewer).
        scale: 2: heads and most widths are twice as wide as they need be.

    Raises:
        PlanError: the small configuration cannot be built.
    """
    try:
        path = text_path(config)
        narrow = _short_others(shrink_sizes(config.to_dict(), path, degree, scale), config.to_dict(), path)
        signatures = _signatures(_rebuilt(config, narrow))
        last = narrow
        for kept in _choices(signatures, num_blocks_per_kind):
            last = _cut_blocks(narrow, path, len(signatures), kept)
            small = _rebuilt(config, last)
            if _signatures(small) == [signatures[index] for index in kept]:
                return small
        return _rebuilt(config, last)
    except PlanError:
        raise
    except Exception as error:  # whatever a foreign configuration class raises
        raise PlanError(
            type(config).__name__, f"no small copy of it can be built ({type(error).__name__}: {error})", ""
        ) from error


def build_small(config: Any, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """The model of a small configuration on the CPU, in evaluation mode, no parameter at a special value.

    Weights that start as zeros or ones (norms, biases) would hide faults, so noise is added to all.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = causal_model(config, dtype=dtype, attn_implementation=config._attn_implementation)
        freeze_stored_buffers(model)
        widen(model, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn_like(parameter) * _NOISE
                    parameter.copy_(torch.where(parameter.isfinite(), parameter + noise, noise))
    arrange(model)
    return model.eval()


def _rebuilt(config: Any, tree: Tree) -> Any:
    small = type(config).from_dict(copy.deepcopy(tree))
    small._attn_implementation = config._attn_implementation
    small._experts_implementation = config._experts_implementation
    return small


def _signatures(config: Any) -> list[Hashable]:
    """What makes the blocks of a configuration's model kinds."""
    with torch.device("meta"):
        model = causal_model(config)
    blocks = find_blocks(model)
    if blocks is None:
        return []
    return block_signatures(list(model.get_submodule(blocks)), text_config(model))


def _choices(signatures: Sequence[Hashable], per_kind: int) -> Iterator[list[int]]:
    """Blocks to keep, best first: a few of each kind; else the shortest beginning that has them.

    Where a formula and no list decides the kinds, only a beginning has the same ones.
    """
    wanted: list[int] = []
    counts: dict[Hashable, int] = {}
    for index, signature in enumerate(signatures):
        counts[signature] = counts.get(signature, 0) + 1
        if counts[signature] <= per_kind:
            wanted.append(index)
    yield wanted
    if wanted and wanted != list(range(wanted[-1] + 1)):
        yield list(range(wanted[-1] + 1))


def _cut_blocks(tree: Tree, path: Path, num_blocks: int, kept: Sequence[int]) -> Tree:
    """The configuration with only the blocks ``kept``: their number, lists of a value for each, lists of places."""
    small = copy.deepcopy(tree)
    inner: Any = small
    for key in path:
        inner = inner[key]
    for part in (small, inner) if path else (small,):
        for key, value in part.items():
            part[key] = _cut_value(key, value, num_blocks, kept)
    return small


def _short_others(narrow: Tree, tree: Tree, path: Path) -> Tree:
    """``narrow`` with lists of a value for each block no longer than the blocks of parts beside the language part."""
    for key, part in narrow.items():
        if isinstance(part, dict) and (key,) != path and isinstance(tree[key], dict):
            lengths = {tree[key][k]: v for k, v in part.items() if isinstance(v, int) and re.search(_LENGTHS, k)}
            for old, new in lengths.items():
                if new < old:
                    narrow[key] = {k: _cut_value(k, v, old, range(new)) for k, v in part.items()}
    return narrow


def _cut_value(key: str, value: Any, num_blocks: int, kept: Sequence[int]) -> Any:
    if isinstance(value, int) and value == num_blocks and re.search(_LENGTHS, key):
        return len(kept)
    if isinstance(value, list | tuple) and _is_places(key, value, num_blocks):
        return [place for place, index in enumerate(kept) if index in value]
    if isinstance(value, list | tuple) and len(value) == num_blocks:
        return [value[index] for index in kept]
    if isinstance(value, dict) and value and all(str(place).isdecimal() for place in value):
        by_place = {int(place): item for place, item in value.items()}
        if max(by_place) < num_blocks and key not in SKIPPED:
            return {place: by_place[index] for place, index in enumerate(kept) if index in by_place}
    return value


def _is_places(key: str, value: Any, num_blocks: int) -> bool:
    """Whether a list holds numbers of blocks."""
    named = re.search(r"(layers|indices|idxs|layer_ids)$", key) is not None
    whole = all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < num_blocks for item in value)
    return named and whole and len(set(value)) == len(value)
