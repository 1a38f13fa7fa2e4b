"""How many parameters a model has, from its ``config.json``, or from the headers of its weight files.

For families whose block is described here the count is exact. Any other is counted in its files, and
without files estimated as a block of Llama's kind. It serves messages and estimates alone: what runs is
built from transformers' modules. Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class _Kind:
    """What a block is made of.

    Args:
        gated: three matrices in the feed-forward part, not two.
        biases: which of ``q k v o mlp`` have one.
        norms: norms over the hidden size in a block; ``norm_bias``: they have a bias too.
        qk_norm: "" for none, "head" for one weight a head dim, "all" for one over all heads.
        positions: rows of a learned position table, beyond the number of positions; None: no table.
        head_bias: the head has one.
    """

    gated: bool = True
    biases: str = ""
    norms: int = 2
    norm_bias: bool = False
    qk_norm: str = ""
    positions: int | None = None
    head_bias: bool = False
    final_norm: bool = True


_KINDS: dict[str, _Kind] = {
    "llama": _Kind(),
    "mistral": _Kind(),
    "mixtral": _Kind(),
    "qwen2": _Kind(biases="q k v"),
    "qwen2_moe": _Kind(biases="q k v"),
    "qwen3": _Kind(qk_norm="head"),
    "qwen3_moe": _Kind(qk_norm="head"),
    "gemma": _Kind(),
    "gemma2": _Kind(norms=4),
    "gemma3_text": _Kind(norms=4, qk_norm="head"),
    "glm": _Kind(),
    "glm4": _Kind(norms=4),
    "phi3": _Kind(),
    "phi": _Kind(gated=False, biases="q k v o mlp", norms=1, norm_bias=True, head_bias=True),
    "gpt_neox": _Kind(gated=False, biases="mlp", norm_bias=True),
    "gpt2": _Kind(gated=False, biases="q k v o mlp", norm_bias=True, positions=0),
    "gptj": _Kind(gated=False, biases="mlp", norms=1, norm_bias=True, head_bias=True),
    "opt": _Kind(gated=False, biases="q k v o mlp", norm_bias=True, positions=2),
    "starcoder2": _Kind(gated=False, biases="q k v o mlp", norm_bias=True),
    "olmo": _Kind(norms=0, final_norm=False),
    "olmo2": _Kind(qk_norm="all"),
    "olmoe": _Kind(qk_norm="all"),
    "granite": _Kind(),
    "cohere": _Kind(norms=1),
    "cohere2": _Kind(norms=1),
    "smollm3": _Kind(),
}


def count(family: str, config: Mapping[str, Any], sizes: Sizes, folder: Path) -> Counts:
    """The counts of a model; see the module's docstring for where they come from."""
    kind = _KINDS.get(family)
    if kind is None:
        return _stored(folder, config, sizes) or _of_kind(_Kind(), config, sizes)
    return _of_kind(_as_configured(family, kind, config), config, sizes)


def _as_configured(family: str, kind: _Kind, config: Mapping[str, Any]) -> _Kind:
    """``kind`` with the biases that a configuration switches on or off."""
    biases = kind.biases
    if family in ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text", "granite", "cohere", "olmo2"):
        biases = "q k v o" if config.get("attention_bias") else biases
    if family == "smollm3" and config.get("attention_bias"):
        biases = "q k v o"
    if family in ("glm", "glm4") and config.get("attention_bias", family == "glm"):
        biases = "q k v"
    if family == "gpt_neox" and config.get("attention_bias", True):
        biases = "q k v o mlp"
    if family == "starcoder2" and not config.get("use_bias", True):
        biases = ""
    if family in ("llama", "granite") and config.get("mlp_bias"):
        biases += " mlp"
    qk_norm = "all" if family == "cohere" and config.get("use_qk_norm") else kind.qk_norm
    return replace(kind, biases=biases, qk_norm=qk_norm)


def _of_kind(kind: _Kind, config: Mapping[str, Any], sizes: Sizes) -> Counts:
    hidden, q, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    norm = hidden * (2 if kind.norm_bias else 1)
    attention = hidden * (2 * q + 2 * kv)
    widths = {"q": q, "k": kv, "v": kv, "o": hidden, "mlp": 0 if num_experts(config) else _inner_biases(kind, sizes)}
    biases = sum(widths[name] for name in kind.biases.split())
    norms = kind.norms * norm + {"": 0, "head": 2 * sizes.head_dim, "all": q + kv}[kind.qk_norm]
    return Counts(
        block=attention + biases + _feed_forward(kind, config, sizes, num_experts(config)) + norms,
        block_norm=norms,
        block_matrices=attention + _feed_forward(kind, config, sizes, num_active_experts(config)),
        before=(sizes.positions + kind.positions) * hidden if kind.positions is not None else 0,
        after=(norm if kind.final_norm else 0) + (sizes.vocabulary if kind.head_bias else 0),
    )


def _inner_biases(kind: _Kind, sizes: Sizes) -> int:
    return (2 if kind.gated else 1) * sizes.inner + sizes.hidden


def _feed_forward(kind: _Kind, config: Mapping[str, Any], sizes: Sizes, used_experts: int) -> int:
    """Weights of the matrices of the feed-forward part, with ``used_experts`` of its experts."""
    hidden, experts = sizes.hidden, num_experts(config)
    if experts:
        inner = config.get("moe_intermediate_size") or sizes.inner
        shared = config.get("shared_expert_intermediate_size") or 0
        # Router; the shared expert has a gate of its own.
        routed = used_experts * 3 * inner * hidden + experts * hidden
        return routed + (3 * shared * hidden + hidden if shared else 0)
    return (3 if kind.gated else 2) * sizes.inner * hidden


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
