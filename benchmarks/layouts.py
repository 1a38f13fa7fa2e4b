"""The layouts that are measured, the models, and the batches that both sides train on. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

ROWS = 8
LENGTH = 64
LEARNING_RATE = 1e-4
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Layout:
    """Degrees of one split; ``bar`` is the least ratio ours / baseline, None where none is set."""

    name: str
    tp: int = 1
    pp: int = 1
    dp_shard: int = 1
    bar: float | None = None

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp * self.dp_shard

    @property
    def num_threads(self) -> int:
        """OpenMP threads of a rank: the cores shared out, at least one."""
        return max(1, num_cores() // self.num_ranks)


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("one", bar=0.95),
        Layout("tp3", tp=3, bar=1.2),
        Layout("pp2", pp=2, bar=0.98),
        Layout("tp3pp2", tp=3, pp=2, bar=1.15),
        Layout("fsdp2", dp_shard=2),
    )
}


def llama(hidden: int, ffn: int, blocks: int, heads: tuple[int, int], vocab: int, **more: Any) -> dict[str, Any]:
    """The ``config.json`` of a Llama; ``heads`` are its attention heads and its key/value heads."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return config | more


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quiet_environment(num_threads: int) -> dict[str, str]:
    """Environment of the ranks of both sides, that of the product's launcher; set before the ranks are started."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo",
    }
