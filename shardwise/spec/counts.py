"""How many parameters a model has, from the headers of its weight files, else estimated from its ``config.json``.

An estimate takes a block of Llama's kind. It serves messages until the model has been built once: then its numbers
are those of its modules. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError
from shardwise.spec.weight_files import weight_files

_MAX_HEADER_BYTES = 100 * 10**6
# Names by which configurations say how many experts a token is routed to.
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


@dataclass(frozen=True)
class Sizes:
    """The sizes that a count depends on, under one name for each."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    positions: int
    blocks: int
    tied: bool

    @classmethod
    def of(cls, sizes: Mapping[str, Any], *, tied: bool) -> Sizes:
        """From the commonest spellings of ``config.json``; only ``head_dim`` may be None."""
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        return cls(
            hidden=hidden,
            heads=heads,
            kv_heads=sizes["num_key_value_heads"],
            head_dim=sizes["head_dim"] or hidden // heads,
            inner=sizes["intermediate_size"],
            vocabulary=sizes["vocab_size"],
            positions=sizes["max_position_embeddings"],
            blocks=sizes["num_hidden_layers"],
            tied=tied,
        )


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters: of one block (on average), of its norms, before and after the blocks.

    ``before`` leaves out the token embedding, ``after`` the head's matrix. ``block_matrices`` are those of a block
    that one token is multiplied by: no norms, no biases, and of experts only as many as it is routed to.
    """

    block: int
    block_norm: int
    block_matrices: int
    before: int
    after: int


def count(config: Mapping[str, Any], sizes: Sizes, folder: Path) -> Counts:
    """The counts of a model; see the module's docstring for where they come from."""
    return _stored(folder, config, sizes) or _estimated(config, sizes)


def _estimated(config: Mapping[str, Any], sizes: Sizes) -> Counts:
    """Those of a gated block with two norms."""
    hidden, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    attention = hidden * (2 * q + 2 * kv)
    biases = q + 2 * kv + hidden if config.get("attention_bias") else 0
    biases += 2 * sizes.inner + hidden if config.get("mlp_bias") else 0
    return Counts(
        block=attention + biases + _feed_forward(config, sizes, num_experts(config)) + 2 * hidden,
        block_norm=2 * hidden,
        block_matrices=attention + _feed_forward(config, sizes, num_active_experts(config)),
        before=0,
        after=hidden,
    )


def _feed_forward(config: Mapping[str, Any], sizes: Sizes, used_experts: int) -> int:
    """Weights of the matrices of the feed-forward part, with ``used_experts`` of its experts."""
    hidden, experts = sizes.hidden, num_experts(config)
    if not experts:
        return 3 * sizes.inner * hidden
    inner = config.get("moe_intermediate_size") or sizes.inner
    shared = config.get("shared_expert_intermediate_size") or 0
    # Router; the shared expert has a gate of its own.
    routed = used_experts * 3 * inner * hidden + experts * hidden
    return routed + (3 * shared * hidden + hidden if shared else 0)


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a block that are routed to; 0 for a dense model."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((int(config[name]) for name in names if config.get(name)), 0)


def num_active_experts(config: Mapping[str, Any]) -> int:
    """Experts of a block that one token is routed to; all of them where the configuration does not say."""
    experts = num_experts(config)
    return min(experts, next((int(config[name]) for name in EXPERTS_PER_TOKEN if config.get(name)), experts))


def _stored(folder: Path, config: Mapping[str, Any], sizes: Sizes) -> Counts | None:
    """Counts from the weight files; None where they cannot be read or are named in an unknown way."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        files = weight_files(folder)
    except CheckpointError:
        return None
    for file in files:
        try:
            with file.open("rb") as handle:
                length = int.from_bytes(handle.read(8), "little")
                header = json.loads(handle.read(min(length, _MAX_HEADER_BYTES)))
            shapes |= {n: tuple(v["shape"]) for n, v in header.items() if n != "__metadata__"}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    elements = {name: math.prod(shape) for name, shape in shapes.items()}
    in_blocks = {name: size for name, size in elements.items() if re.search(r"\.(\d+)\.", f".{name}")}
    if not in_blocks:
        return None
    vectors = sum(size for name, size in in_blocks.items() if "norm" in name.lower() or ".ln" in name.lower())
    used = num_active_experts(config) / max(num_experts(config), 1)
    matrices = sum(
        size * (used if ".experts." in name else 1) for name, size in in_blocks.items() if len(shapes[name]) > 1
    )
    ends = (1 if sizes.tied else 2) * sizes.vocabulary * sizes.hidden
    rest = sum(elements.values()) - sum(in_blocks.values()) - ends
    whole = sum(in_blocks.values())
    return Counts(
        *(whole // sizes.blocks, vectors // sizes.blocks, int(matrices) // sizes.blocks), before=0, after=max(rest, 0)
    )
