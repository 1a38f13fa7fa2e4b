"""A model as its ``config.json`` describes it: what a strategy can be checked against before any import.

Reads JSON alone, no torch and no transformers. A size that the file does not name is that of the model's class; then
whoever reads has the model described from its modules. Whether it can be cut the workers find out, before weights
load.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
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
_ALL = (_HIDDEN, _BLOCKS, _HEADS, _KV_HEADS, _INNER, _POSITIONS, ("vocab_size",), ("head_dim",))
# Keys of a rotary position embedding.
_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling")

NO_LIMIT = 2**31 - 1  # positions of a model that takes rows of any length


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder: ``num_*`` are counts, ``*_parameters`` numbers of weights, ``hash`` that of ``config.json``.

    Args:
        block_parameters: of one block, on average.
        block_norm_parameters: those of them that no tensor rank splits.
        block_matrix_parameters: those of them that one token is multiplied by; of experts the ones it is routed to.
        before_parameters: before the first block, the token embedding left out.
        after_parameters: after the last block, the head's matrix left out.
        num_heads: 0 where the blocks have no attention heads, as ``num_kv_heads`` and ``head_dim`` are then.
        max_position_embeddings: :data:`NO_LIMIT` where the model has none.
        num_experts: experts of a block that are routed to, 0 for a dense model.
        measured: whether the numbers are those of the model's modules; else ``config.json`` names the sizes, and the
            numbers of parameters are counted in the weight files, or estimated.
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
    measured: bool = False

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


def read_model(folder: str | Path, describe: Callable[[Path], ModelSpec] | None = None) -> ModelSpec:
    """The specification of the model in ``folder``.

    Args:
        describe: gives the specification from the model's modules; it is asked where ``config.json`` leaves a size to
            the model's class. None: such a file is refused.

    Raises:
        ConfigError: no or a broken ``config.json``, a model that is no causal decoder, sizes that are
            missing or do not fit each other.
    """
    path = Path(folder) / "config.json"
    config, content, family, architecture = _checked(path)
    sizes = {spellings[0]: _optional_size(config, spellings, path) for spellings in _ALL}
    hidden, heads, kv_heads = sizes["hidden_size"], sizes["num_attention_heads"], sizes["num_key_value_heads"]
    if hidden is not None and heads is not None:
        missing = _check_heads(family, config, sizes, path)
    else:
        missing = "hidden_size" if hidden is None else "num_attention_heads"
    if "num_key_value_heads" in config and kv_heads is None:
        kv_heads = heads  # an explicit null means as many
    needed = ("num_hidden_layers", "intermediate_size", "max_position_embeddings", "vocab_size")
    missing = missing or next((name for name in needed if sizes[name] is None), None)
    missing = missing or ("num_key_value_heads" if kv_heads is None else None)
    missing = missing or ("tie_word_embeddings" if config.get("tie_word_embeddings") is None else None)
    if missing is not None:
        if describe is None:
            raise ConfigError(str(path), f"has no {missing}", "It must hold the sizes of the model")
        return describe(Path(folder))
    plain = Sizes.of(sizes | {"num_key_value_heads": kv_heads}, tied=bool(config["tie_word_embeddings"]))
    counts = count(config, plain, Path(folder))
    return ModelSpec(
        model_type=family,
        architecture=architecture,
        num_blocks=plain.blocks,
        hidden_size=plain.hidden,
        num_heads=plain.heads,
        num_kv_heads=plain.kv_heads,
        head_dim=plain.head_dim,
        intermediate_size=plain.inner,
        vocab_size=plain.vocabulary,
        max_position_embeddings=plain.positions,
        tied=plain.tied,
        has_weights=has_weights(folder),
        hash=hash_of(content),
        block_parameters=counts.block,
        block_norm_parameters=counts.block_norm,
        block_matrix_parameters=counts.block_matrices,
        before_parameters=counts.before,
        after_parameters=counts.after,
        num_experts=num_experts(config),
    )


def check_config(folder: str | Path) -> None:
    """Refuse a folder whose ``config.json`` is broken or of no causal decoder, before anything is built.

    Raises:
        ConfigError: the reason.
    """
    _checked(Path(folder) / "config.json")


def _checked(path: Path) -> tuple[dict[str, Any], bytes, str, str]:
    """What the file holds, its bytes, the model's type and the name of its class."""
    config, content = read_config(path)
    family = _family(config, path)
    return config, content, family, _architecture(config, family, path)


def hash_of(content: bytes) -> str:
    """What names a model in plans and checkpoints: the hash of its ``config.json``."""
    return hashlib.sha256(content).hexdigest()


def has_weights(folder: str | Path) -> bool:
    """Whether a folder holds any safetensors weights."""
    return any(Path(folder).glob("*.safetensors"))


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


def read_config(path: Path) -> tuple[dict[str, Any], bytes]:
    """What a ``config.json`` holds, and its bytes.

    Raises:
        ConfigError: no such file, or no JSON object in it.
    """
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


def _optional_size(config: dict[str, Any], spellings: Sequence[str], path: Path) -> int | None:
    """The size under the first spelling that has a value; None where the file leaves it to the model's class.

    Some families give the feed-forward width of each block (Gemma 3n): then their mean.
    """
    key = _key(config, spellings)
    if key is None:
        return None
    value = config[key]
    if spellings is _INNER and isinstance(value, list) and value and all(type(w) is int and w > 0 for w in value):
        return round(sum(value) / len(value))
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} = {value!r}", "must be a whole number above 0", "Correct the file")
    return value


def _check_heads(family: str, config: dict[str, Any], sizes: dict[str, int | None], path: Path) -> str | None:
    """Refuse heads that cannot be; the name of a size that only the model's class can tell, None if there is none."""
    hidden, heads, head_dim = sizes["hidden_size"], sizes["num_attention_heads"], sizes["head_dim"]
    assert hidden is not None
    assert heads is not None
    kv_heads = sizes["num_key_value_heads"] or heads
    is_llama = family == "llama"  # Llama's own configuration insists on it
    if hidden % heads and is_llama:
        nearby = ", ".join(map(str, nearest_multiples(hidden, heads)))
        value = f"{path}: hidden_size = {hidden}, num_attention_heads = {heads}"
        raise ConfigError(value, "the heads must divide the hidden size", f"Nearest hidden sizes: {nearby}")
    if heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        value = f"{path}: num_attention_heads = {heads}, num_key_value_heads = {kv_heads}"
        raise ConfigError(value, "the KV heads must divide the heads", f"Possible: {divisors}")
    if head_dim is None and hidden % heads:
        return "head_dim"
    width = head_dim or hidden // heads
    if width % 2 and (is_llama or any(config.get(key) for key in _ROTARY)):
        value = f"{path}: head_dim = {width}"
        raise ConfigError(value, "rotary position embedding needs an even head_dim", "Correct the file")
    return "head_dim" if width % 2 else None
