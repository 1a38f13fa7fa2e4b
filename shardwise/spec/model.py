"""A model as its ``config.json`` describes it: what a strategy can be checked against before any import.

Reads JSON alone, no torch and no transformers. Any causal language model can be described; whether it can be
built and cut the workers find out from its modules, before weights load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.config import NOT_AVAILABLE, nearest_multiples
from shardwise.errors import ConfigError
from shardwise.spec.counts import Sizes, count, num_experts
from shardwise.spec.weight_files import weight_files

# Spellings of one size, the commonest first.
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")

# What a configuration class of transformers fills in where ``config.json`` leaves a key out. A family that is
# not named here leaves nothing out that matters, or is taken by the general rule behind the comma.
_MAX_POSITIONS = {"mistral": 131072, "mixtral": 131072, "qwen2": 32768, "qwen3": 32768, "gemma": 8192, "gpt2": 1024}
_MAX_POSITIONS |= {"gemma2": 8192, "gemma3_text": 131072, "phi3": 4096, "glm": 131072, "glm4": 131072}
_MAX_POSITIONS |= {"qwen2_moe": 32768, "qwen3_moe": 32768, "starcoder2": 4096, "cohere": 8192, "cohere2": 8192}
_OTHER_MAX_POSITIONS = 2048
_NUM_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4, "gemma": 16, "gemma2": 4}
_NUM_KV_HEADS |= {"gemma3_text": 4, "glm": 2, "glm4": 2, "starcoder2": 2, "smollm3": 4, "qwen2_moe": 16}
_HEAD_DIM = {"qwen3": 128, "gemma": 256, "gemma2": 256, "gemma3_text": 256, "glm": 128, "glm4": 128}
_TIED = ("gpt2", "gemma", "gemma2", "gemma3_text", "cohere", "cohere2", "opt", "starcoder2", "smollm3", "bloom")
_LEARNED_POSITIONS = ("gpt2", "opt", "gpt_neo", "gpt_bigcode", "biogpt", "bloom", "mpt", "xglm")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder: ``num_*`` are counts, ``*_parameters`` numbers of weights, ``hash`` that of ``config.json``.

    Args:
        block_parameters: of one block, on average.
        block_norm_parameters: those of them that no tensor rank splits.
        block_matrix_parameters: those of them that one token is multiplied by; of experts the ones it is routed to.
        before_parameters: before the first block, the token embedding left out.
        after_parameters: after the last block, the head's matrix left out.
        num_experts: experts of a block that are routed to, 0 for a dense model.
    """

    model_type: str
    architecture: str
    num_blocks: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tied: bool
    has_weights: bool
    hash: str
    block_parameters: int
    block_norm_parameters: int
    block_matrix_parameters: int
    before_parameters: int
    after_parameters: int
    num_experts: int = 0

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model; a tied head is counted once."""
        ends = self.embedding_parameters * (1 if self.tied else 2)
        return self.num_blocks * self.block_parameters + ends + self.before_parameters + self.after_parameters

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        return cls(**data)


def find_model(name: str, models_dir: str | Path | None = None) -> Path:
    """The folder of a model: ``name`` as a path, ``models_dir/name``, ``models_dir/last part of name``.

    Raises:
        ConfigError: none of them is a folder; the message lists what was looked for.
    """
    looked_for = [Path(name).expanduser()]
    if models_dir is not None:
        base = Path(models_dir).expanduser()
        looked_for += [base / name, base / Path(name).name]
    for folder in looked_for:
        if folder.is_dir():
            return folder
    if looked_for[0].is_file():
        raise ConfigError(f"model = {name!r}", "is a file", "Give the folder with config.json and *.safetensors")
    places = ", ".join(dict.fromkeys(str(folder) for folder in looked_for))
    remedy = "" if models_dir is not None else "; models_dir=FOLDER (or SHARDWISE_MODELS_DIR) names a further place"
    raise ConfigError(
        f"model = {name!r}", f"no such model folder (looked for {places})", f"Give the path of a folder{remedy}"
    )


def read_model(folder: str | Path) -> ModelSpec:
    """The specification of the model in ``folder``.

    Raises:
        ConfigError: no or a broken ``config.json``, a model that is no causal decoder, sizes that are
            missing or do not fit each other.
    """
    path = Path(folder) / "config.json"
    config, content = _read_config(path)
    family = _family(config, path)
    heads, hidden = _size(config, _HEADS, path), _size(config, _HIDDEN, path)
    default_kv_heads = heads if "num_key_value_heads" in config else _NUM_KV_HEADS.get(family)
    kv_heads = _optional_size(config, _KV_HEADS, path, default_kv_heads) or heads
    default_head_dim = None if "head_dim" in config else _HEAD_DIM.get(family)
    head_dim = _optional_size(config, ("head_dim",), path, default_head_dim)
    _check_heads(family, hidden, heads, kv_heads, head_dim, path)
    sizes = Sizes(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        inner=_inner(config, hidden, path),
        vocabulary=_size(config, ("vocab_size",), path),
        positions=_optional_size(config, _POSITIONS, path, None) or _MAX_POSITIONS.get(family, _OTHER_MAX_POSITIONS),
        blocks=_size(config, _BLOCKS, path),
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
    )
    counts = count(family, config, sizes, Path(folder))
    return ModelSpec(
        model_type=family,
        architecture=_architecture(config, family, path),
        num_blocks=sizes.blocks,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.inner,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.positions,
        tied=sizes.tied,
        has_weights=any(Path(folder).glob("*.safetensors")),
        hash=hashlib.sha256(content).hexdigest(),
        block_parameters=counts.block,
        block_norm_parameters=counts.block_norm,
        block_matrix_parameters=counts.block_matrices,
        before_parameters=counts.before,
        after_parameters=counts.after,
        num_experts=num_experts(config),
    )


def check_weights(folder: str | Path, model: ModelSpec) -> None:
    """Refuse a folder without complete safetensors weights, by its file names alone.

    Raises:
        ConfigError: no ``*.safetensors``.
        CheckpointError: what :func:`shardwise.spec.weight_files.weight_files` refuses.
    """
    folder = Path(folder)
    value, remedy = f"model folder {folder}", "Use model_init=random to train from random weights"
    if not model.has_weights:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        if pickled:
            remedy = f"Convert {pickled[0]} with transformers' save_pretrained, or u{remedy[1:]}"
            raise ConfigError(value, f"its weights are pickled ({pickled[0]}), only *.safetensors is read", remedy)
        raise ConfigError(value, "holds no *.safetensors, and model_init is pretrained", remedy)
    weight_files(folder)


def _read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        rule = "holds no config.json"
        raise ConfigError(f"model folder {path.parent}", rule, "Give a Hugging Face model folder") from None
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from None
    try:
        config = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), f"is not valid JSON ({error})", "Download or write the file again") from None
    if not isinstance(config, dict):
        raise ConfigError(str(path), f"holds a {type(config).__name__}, not an object", "Write the file again")
    return config, content


def _family(config: dict[str, Any], path: Path) -> str:
    """The model's type. Whether transformers has such a causal model, the workers see before weights load."""
    family = config.get("model_type")
    if family is None:
        raise ConfigError(str(path), "has no model_type", "Write the type of the model, such as llama")
    if not isinstance(family, str):
        raise ConfigError(f"{path}: model_type = {family!r}", "must be text", "Write it as llama")
    remedy = "Use a model that only generates text, such as llama or gpt_neox"
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{path}: model_type = {family!r}, is_encoder_decoder", NOT_AVAILABLE, remedy)
    if "text_config" in config:
        raise ConfigError(f"{path}: model_type = {family!r} with a text_config beside others", NOT_AVAILABLE, remedy)
    if config.get("quantization_config"):
        remedy = "Use a folder with unquantised weights"
        raise ConfigError(f"{path}: quantization_config", NOT_AVAILABLE, remedy)
    return family


def _architecture(config: dict[str, Any], family: str, path: Path) -> str:
    """The name of the class; transformers takes the one that generates text, so another one is refused."""
    names = config.get("architectures") or [family]
    if len(names) == 1 and (names == [family] or re.search(r"(ForCausalLM|LMHeadModel)$", str(names[0]))):
        return str(names[0])
    near = re.sub(r"(For|Model)[A-Za-z]*$", "", str(names[0])) + "ForCausalLM"
    raise ConfigError(f"{path}: architectures = {names}", NOT_AVAILABLE, f"Available for {family}: {near}")


def _key(config: dict[str, Any], spellings: Sequence[str]) -> str | None:
    """The spelling that the configuration has a value under."""
    return next((key for key in spellings if config.get(key) is not None), None)


def _size(config: dict[str, Any], spellings: Sequence[str], path: Path) -> int:
    key = _key(config, spellings)
    if key is None:
        raise ConfigError(str(path), f"has no {spellings[0]}", "It must hold the sizes of the model")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} = {value!r}", "must be a whole number above 0", "Correct the file")
    return value


def _optional_size(config: dict[str, Any], spellings: Sequence[str], path: Path, default: int | None) -> int | None:
    return default if _key(config, spellings) is None else _size(config, spellings, path)


def _inner(config: dict[str, Any], hidden: int, path: Path) -> int:
    """Width of the feed-forward part: four times the hidden size in families that leave it out (GPT-2, Bloom).

    Some families give the width of each block (Gemma 3n): then their mean.
    """
    key = _key(config, _INNER)
    each = [] if key is None else config[key]
    if isinstance(each, list) and each and all(type(width) is int and width > 0 for width in each):
        return round(sum(each) / len(each))
    gpt_like = "n_embd" in config or "n_inner" in config or config.get("model_type") in ("bloom", "falcon", "mpt")
    return _optional_size(config, _INNER, path, 4 * hidden if gpt_like else None) or _size(config, _INNER, path)


def _check_heads(family: str, hidden: int, heads: int, kv_heads: int, head_dim: int | None, path: Path) -> None:
    if hidden % heads and (head_dim is None or family == "llama"):  # Llama's own configuration insists on it
        nearby = ", ".join(map(str, nearest_multiples(hidden, heads)))
        value = f"{path}: hidden_size = {hidden}, num_attention_heads = {heads}"
        raise ConfigError(value, "the heads must divide the hidden size", f"Nearest hidden sizes: {nearby}")
    if heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        value = f"{path}: num_attention_heads = {heads}, num_key_value_heads = {kv_heads}"
        raise ConfigError(value, "the KV heads must divide the heads", f"Possible: {divisors}")
    if (head_dim or hidden // heads) % 2 and family not in _LEARNED_POSITIONS:
        value = f"{path}: head_dim = {head_dim or hidden // heads}"
        raise ConfigError(value, "rotary position embedding needs an even head_dim", "Correct the file")
