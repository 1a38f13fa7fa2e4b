"""The keys of the contract in dotted form, as the sections of :class:`RunConfig` make them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shardwise.spec.run import RunConfig


def known_keys() -> list[str]:
    """Every key of the contract in dotted form, sections included."""
    return list(_walk(RunConfig, ""))


def get(run: RunConfig, dotted: str) -> Any:
    """The value at a dotted key, as the contract spells it (``save.async``)."""
    value: Any = run
    for part in dotted.split("."):
        value = getattr(value, "async_" if part == "async" else part)
    return value


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that a field holds, for ``X`` and for ``X | None``."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in fields_of(model).items():
        key = prefix + name
        yield key
        section = section_of(field.annotation)
        if section is not None:
            yield from _walk(section, f"{key}.")


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section under the names that the contract has."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def item_of(annotation: Any) -> type[BaseModel] | None:
    """The section class that the items of a list are, for a field that may hold such a list."""
    for candidate in (annotation, *get_args(annotation)):
        if get_origin(candidate) is tuple:
            return section_of(get_args(candidate)[0])
    return None
