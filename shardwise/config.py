"""Reading YAML and ``key.sub=value`` overrides into a plain tree of dictionaries.

YAML 1.1 reads ``no`` as false, ``1e-4`` as a string, ``010`` as eight and ``1:30`` as ninety. A
configuration must mean what it says, so scalars are read here as YAML 1.2 reads them, and
:func:`dump_yaml` writes what :func:`load_yaml` reads back equal. Imports nothing but PyYAML.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from shardwise.errors import ConfigError

# The rule that a key breaks whose feature is not built yet.
NOT_AVAILABLE = "not available in this version"

# A bare name of these on the command line is short for ``strategy.NAME``.
STRATEGY_KEYS = frozenset(
    [
        "pp",
        "tp",
        "dp",
        "dp_replicate",
        "dp_shard",
        "reshard",
        "cp",
        "ep",
        "sequence_parallel",
        "tp_whole",
        "schedule",
        "virtual_stages",
        "micro_batch_size",
        "gradient_aggregation_group",
        "recompute",
        "stages",
        "plan",
    ]
)

_SCALARS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        (
            r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
)


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars; a key that is written twice is an error, not a silent last one wins."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, Hashable) and key in seen:
                problem = f"the key {key!r} is written twice, here and on line {seen[key]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            if isinstance(key, Hashable):
                seen[key] = line
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep=deep)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes every string that either YAML 1.1 or :class:`_Loader` would read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012
        first: list(rules) for first, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def represent_str(self, text: str) -> Any:
        """Control characters and Unicode line breaks survive in double quotes alone."""
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _tag, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), list(_first))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``names`` that ``name`` was most likely meant to be, None when nothing is close.

    An abbreviation (``lr`` for ``learning_rate``) counts as closest; ``cutoff`` is difflib's ratio, 0 to 1.
    """
    candidates = sorted(set(names))
    for candidate in candidates:
        if "_" in candidate and name == "".join(word[:1] for word in candidate.split("_")):
            return candidate
    matches = difflib.get_close_matches(name, candidates, n=1, cutoff=cutoff)
    return matches[0] if matches else None


def nearest_multiples(value: int, unit: int) -> list[int]:
    """The multiples of ``unit`` around ``value`` that are above 0: ``(10, 8) -> [8, 16]``."""
    below = value // unit * unit
    return [size for size in (below, below + unit) if size > 0]


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: no such file, not UTF-8, no valid YAML (with the line), or not a mapping.
    """
    value = f"configuration file {path}"
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        remedy = f"The folder holds {_listing(Path(path).parent)}" if Path(path).parent.is_dir() else ""
        raise ConfigError(value, "there is no such file", remedy) from None
    except IsADirectoryError:
        raise ConfigError(value, "is a folder", "Give the path of a YAML file in it") from None
    except OSError as error:
        raise ConfigError(value, f"cannot be read ({error.strerror})") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"{value}, line {line}", "is not UTF-8", "Save the file in the encoding UTF-8") from None
    tree = _parse(text, value)
    if tree is None:
        raise ConfigError(value, "is empty", "It needs at least `model: FOLDER` and `data: {train: FILE}`")
    if not isinstance(tree, dict):
        raise ConfigError(value, f"holds a {type(tree).__name__}, not a mapping", "Write `key: value` lines")
    return tree


def dump_yaml(tree: dict[str, Any]) -> str:
    """YAML that :func:`load_yaml` reads back as an equal tree; keys stay in their order."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"train": {"seed": 1}}`` -> ``{"train.seed": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of ``tree`` with ``key.sub=value`` entries set; a later entry wins over an earlier one.

    Values are read as YAML scalars; a list is written ``[a, b]``, a string that looks like a number
    in quotes. A bare strategy key (``tp=2``) is short for ``strategy.tp``.

    Raises:
        ConfigError: no ``=``, no value, or a path that runs through a value.
    """
    result = deepcopy(tree)
    for override in overrides:
        key, equals, text = override.partition("=")
        key, text = key.strip(), text.strip()
        if not equals or not all(key.split(".")):
            raise ConfigError(f"argument {override!r}", "is not of the form key=value", "For example train.epochs=2")
        if not text:
            raise ConfigError(f"argument {override!r}", "has no value", f"Write {key}=null for none")
        set_key(result, full_key(key), _scalar(text, override))
    return result


def full_key(key: str) -> str:
    """``tp`` -> ``strategy.tp``; any other key as it is."""
    return f"strategy.{key}" if key in STRATEGY_KEYS else key


def set_key(tree: dict[str, Any], dotted: str, value: Any) -> None:
    """Set ``section.key`` in ``tree`` itself; sections that it lacks are made.

    Raises:
        ConfigError: the path runs through a value.
    """
    *sections, name = dotted.split(".")
    for depth, section in enumerate(sections, 1):
        if tree.get(section) is None:
            tree[section] = {}
        if not isinstance(tree[section], dict):
            shown = f"{'.'.join(sections[:depth])} = {tree[section]!r}"
            raise ConfigError(shown, f"is not a section, so {dotted} cannot be set", f"Remove it, or {dotted}")
        tree = tree[section]
    tree[name] = value


def _scalar(text: str, override: str) -> Any:
    """Only lists and quoted strings are parsed as YAML: a template such as ``{{ x }}`` stays text."""
    if text[0] in "[\"'":
        return _parse(text, f"argument {override!r}")
    loader = _Loader("")
    try:
        tag = loader.resolve(yaml.ScalarNode, text, (True, False))
        return loader.construct_object(yaml.ScalarNode(tag, text), deep=True)
    finally:
        loader.dispose()


def _parse(text: str, value: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{value}, line {mark.line + 1}" if mark else value
        raise ConfigError(where, f"no valid YAML: {error.problem or error.context}") from None
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(f"{value}, line {line}", f"no valid YAML: {error.reason}") from None
    except (ValueError, KeyError) as error:  # a scalar that its explicit tag does not fit
        raise ConfigError(value, f"no valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(value, "is nested too deeply") from None


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".yaml", ".yml"))
    return ", ".join(names[:8]) or "no YAML file"
