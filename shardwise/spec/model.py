"""A model as its ``config.json`` describes it: what a strategy can be checked against before any import.

Reads JSON alone, no torch and no transformers. The families are those whose split is known in this
version; defaults for keys that a ``config.json`` leaves out are those of the family.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.config import NOT_AVAILABLE, nearest_multiples
from shardwise.errors import ConfigError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
_NUM_KV_HEADS: dict[str, int | None] = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32}  # None: as the heads
_HEAD_DIM: dict[str, int | None] = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128}  # None: hidden / heads


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder: ``num_*`` are counts, ``hash`` is the sha256 of ``config.json``.

    ``biases`` names the projections that have one, of ``q k v o gate up down``; ``qk_norm`` says whether
    queries and keys are normalised for each head.
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
    biases: tuple[str, ...]
    qk_norm: bool
    has_weights: bool
    hash: str

    @property
    def block_parameters(self) -> int:
        """Number of parameters of one decoder block: projections, their biases, norms."""
        rows = self._projection_rows()
        weights = sum(rows[name] for name in ("q", "k", "v", "gate", "up")) * self.hidden_size
        weights += self.hidden_size * (self.num_heads * self.head_dim + self.intermediate_size)
        return weights + sum(rows[name] for name in self.biases) + self.block_norm_parameters

    @property
    def block_norm_parameters(self) -> int:
        """Number of parameters of one block that no tensor rank splits."""
        return 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def block_matrix_parameters(self) -> int:
        """Number of parameters of one block that a token is multiplied by: neither norms nor biases."""
        rows = self._projection_rows()
        return self.block_parameters - self.block_norm_parameters - sum(rows[name] for name in self.biases)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding, and of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model; a tied head is counted once."""
        ends = self.embedding_parameters * (1 if self.tied else 2) + self.hidden_size
        return self.num_blocks * self.block_parameters + ends

    def _projection_rows(self) -> dict[str, int]:
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        inner = self.intermediate_size
        return {
            "q": heads,
            "k": kv_heads,
            "v": kv_heads,
            "o": self.hidden_size,
            "gate": inner,
            "up": inner,
            "down": self.hidden_size,
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"biases": list(self.biases)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelSpec:
        return cls(**(data | {"biases": tuple(data["biases"])}))


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
        ConfigError: no or a broken ``config.json``, a family that cannot be split yet, sizes that are
            missing or do not fit each other.
    """
    path = Path(folder) / "config.json"
    config, content = _read_config(path)
    family = _family(config, path)
    heads = _size(config, "num_attention_heads", path)
    hidden = _size(config, "hidden_size", path)
    default_kv_heads = heads if "num_key_value_heads" in config else _NUM_KV_HEADS[family]
    kv_heads = _optional_size(config, "num_key_value_heads", path, default_kv_heads) or heads
    default_head_dim = _HEAD_DIM[family] if "head_dim" not in config else None
    head_dim = _optional_size(config, "head_dim", path, default_head_dim)
    _check_heads(family, hidden, heads, kv_heads, head_dim, path)
    return ModelSpec(
        model_type=family,
        architecture=_architecture(config, family, path),
        num_blocks=_size(config, "num_hidden_layers", path),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=_size(config, "intermediate_size", path),
        vocab_size=_size(config, "vocab_size", path),
        max_position_embeddings=_optional_size(config, "max_position_embeddings", path, _MAX_POSITIONS[family])
        or _MAX_POSITIONS[family],
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=_biases(config, family),
        qk_norm=family == "qwen3",
        has_weights=any(Path(folder).glob("*.safetensors")),
        hash=hashlib.sha256(content).hexdigest(),
    )


def check_weights(folder: str | Path, model: ModelSpec) -> None:
    """Refuse a folder without complete safetensors weights, by its file names alone.

    Raises:
        ConfigError: no ``*.safetensors``, or one that the index lists is absent.
    """
    folder = Path(folder)
    value, remedy = f"model folder {folder}", "Use model_init=random to train from random weights"
    if not model.has_weights:
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        if pickled:
            remedy = f"Convert {pickled[0]} with transformers' save_pretrained, or u{remedy[1:]}"
            raise ConfigError(value, f"its weights are pickled ({pickled[0]}), only *.safetensors is read", remedy)
        raise ConfigError(value, "holds no *.safetensors, and model_init is pretrained", remedy)
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            listed = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index}", "is no index of safetensors files", "Download the model again") from None
        absent = [name for name in listed if not (folder / name).is_file()]
        if absent:
            rule = f"{len(absent)} of {len(listed)} weight files are absent: {', '.join(absent[:4])}"
            raise ConfigError(value, rule, "Download the model again")


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
    family, available = config.get("model_type"), ", ".join(_ARCHITECTURES)
    if family is None:
        raise ConfigError(str(path), "has no model_type", f"Available families: {available}")
    if family not in list(_ARCHITECTURES):  # a list: what JSON holds may not be hashable
        raise ConfigError(f"{path}: model_type = {family!r}", NOT_AVAILABLE, f"Available families: {available}")
    if config.get("quantization_config"):
        remedy = "Use a folder with unquantised weights"
        raise ConfigError(f"{path}: quantization_config", NOT_AVAILABLE, remedy)
    return str(family)


def _architecture(config: dict[str, Any], family: str, path: Path) -> str:
    names = config.get("architectures") or [_ARCHITECTURES[family]]
    if names != [_ARCHITECTURES[family]]:
        remedy = f"Available for {family}: {_ARCHITECTURES[family]}"
        raise ConfigError(f"{path}: architectures = {names}", NOT_AVAILABLE, remedy)
    return _ARCHITECTURES[family]


def _size(config: dict[str, Any], key: str, path: Path) -> int:
    if key not in config:
        raise ConfigError(str(path), f"has no {key}", "It must hold the sizes of the model")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} = {value!r}", "must be a whole number above 0", "Correct the file")
    return value


def _optional_size(config: dict[str, Any], key: str, path: Path, default: int | None) -> int | None:
    return default if config.get(key) is None else _size(config, key, path)


def _check_heads(family: str, hidden: int, heads: int, kv_heads: int, head_dim: int | None, path: Path) -> None:
    if hidden % heads and (head_dim is None or family == "llama"):  # Llama's own configuration insists on it
        nearby = ", ".join(map(str, nearest_multiples(hidden, heads)))
        value = f"{path}: hidden_size = {hidden}, num_attention_heads = {heads}"
        raise ConfigError(value, "the heads must divide the hidden size", f"Nearest hidden sizes: {nearby}")
    if heads % kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        value = f"{path}: num_attention_heads = {heads}, num_key_value_heads = {kv_heads}"
        raise ConfigError(value, "the KV heads must divide the heads", f"Possible: {divisors}")
    if (head_dim or hidden // heads) % 2:
        value = f"{path}: head_dim = {head_dim or hidden // heads}"
        raise ConfigError(value, "rotary position embedding needs an even head_dim", "Correct the file")


def _biases(config: dict[str, Any], family: str) -> tuple[str, ...]:
    """Which projections have a bias, as the modules of each family decide it."""
    if family == "qwen2":
        return ("q", "k", "v")
    attention = ("q", "k", "v", "o") if config.get("attention_bias") and family != "mistral" else ()
    return attention + (("gate", "up", "down") if config.get("mlp_bias") and family == "llama" else ())
