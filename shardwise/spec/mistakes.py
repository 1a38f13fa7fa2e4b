"""What the schema finds wrong with a tree, in our words: the key, its value, the rule, the nearest key or value."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from shardwise.config import nearest
from shardwise.errors import ConfigError
from shardwise.spec.keys import fields_of, item_of, known_keys, section_of
from shardwise.spec.run import RunConfig

# What others call a value of ours, where the nearest in spelling is another one.
_OTHER_NAMES = {"gpu": "cuda", "ascend": "npu"}


def config_error(errors: list[ErrorDetails]) -> ConfigError:
    """One message for all that is wrong; the kinds that a value may have are joined by ``or``."""
    found: dict[str, tuple[str, list[str], str]] = {}
    for place, error in _innermost(errors):
        key = place.key
        shown = key if error["type"] in ("missing", "invalid_key") else f"{key} = {error['input']!r}"
        rule, remedy = _explain(error, place)
        known = found.setdefault(key, (shown, [], remedy))
        if rule not in known[1]:
            known[1].append(rule)
    (value, rules, remedy), *others = found.values()
    more = [f"Also {shown}: {_either(rules)}" + (f" ({hint})" if hint else "") for shown, rules, hint in others]
    return ConfigError(value, _either(rules), ". ".join(filter(None, [remedy, *more])))


def _either(rules: list[str]) -> str:
    return ", or ".join([rules[0], *(rule.removeprefix("must be ") for rule in rules[1:])])


class _Place(NamedTuple):
    """Where an error lies: ``strategy.stages[0]`` of StrategyConfig; ``section`` if a section should stand there."""

    key: str
    owner: type[BaseModel]
    section: type[BaseModel] | None


def _innermost(errors: list[ErrorDetails]) -> list[tuple[_Place, ErrorDetails]]:
    """Each error with its place; of a list that might have been a text, what is wrong inside it."""
    placed = [(_place(error["loc"]), error) for error in errors]
    keys = {place.key for place, _ in placed}
    return [(place, error) for place, error in placed if not any(key.startswith(f"{place.key}[") for key in keys)]


def _place(location: tuple[int | str, ...]) -> _Place:
    """The place of ``('strategy', 'stages', 0)``; names of union branches are left out of the key."""
    key = ""
    owner: type[BaseModel] = RunConfig
    model: type[BaseModel] | None = RunConfig
    annotation: Any = None
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
            model = item_of(annotation)
        elif model is not None:
            key += f".{part}" if key else part
            owner = model
            field = fields_of(model).get(part)
            annotation = field.annotation if field else None
            model = section_of(annotation)
    return _Place(key, owner, model)


def _explain(error: ErrorDetails, place: _Place) -> tuple[str, str]:
    kind, given, key = error["type"], error["input"], place.key
    if kind == "extra_forbidden":
        return "unknown key", _suggest(key, place.owner)
    if kind == "missing":
        return "missing", f"Give it as {key}=VALUE"
    if kind == "literal_error":
        choices = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = _OTHER_NAMES.get(str(given).lower()) or nearest(str(given).lower(), choices)
        return f"must be {error['ctx']['expected']}", f"Did you mean {near}?" if near else ""
    if kind in ("model_type", "model_attributes_type"):
        keys = ", ".join(fields_of(place.section or place.owner))
        return "is a section of keys, not a value", f"Write {key}.KEY=..., one of {keys}"
    if kind == "tuple_type":
        return "must be a list", "Write it in brackets, such as [4, 3]"
    if kind == "dict_type":
        return "must be names with values", "Write it in braces, such as {prompt: question, response: answer}"
    if kind == "string_type":
        return "must be text", f"Write it in quotes: {key}='{given}'" if isinstance(given, int | float) else ""
    if kind == "value_error":
        return str(error["ctx"]["error"]), ""
    return error["msg"].replace("Input should be", "must be"), ""


def _suggest(key: str, owner: type[BaseModel]) -> str:
    """The nearest key of the same section, else the same name in another section, else what there is."""
    section, _, name = key.rpartition(".")
    siblings = list(fields_of(owner))
    near = nearest(name, siblings)
    if near is not None:
        return f"Did you mean {section + '.' if section else ''}{near}?"
    by_name = {known.rpartition(".")[2]: known for known in known_keys()}
    other = nearest(name, by_name, cutoff=0.75)  # other sections have many short names
    return f"Did you mean {by_name[other]}?" if other else f"Known keys here: {', '.join(siblings)}"
