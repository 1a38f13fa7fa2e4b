"""Arguments of a setter by name: those that have an effect, those that say why they have none, all others refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.log import say


class Arguments:
    """The arguments of one setter.

    Attributes:
        said: argument -> its value, of those that a script has given.
    """

    def __init__(
        self,
        setter: str,
        defaults: Mapping[str, Any],
        no_effect: Mapping[str, str],
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """``defaults``: argument with an effect -> what holds where a script says nothing; ``no_effect``: argument
        without one -> why; ``aliases``: another name of an argument -> the argument."""
        self._setter, self._defaults, self._no_effect = setter, dict(defaults), dict(no_effect)
        self._aliases = dict(aliases or {})
        self.said: dict[str, Any] = {}

    def take(self, given: Mapping[str, Any], check: Callable[[str, Any], None]) -> None:
        """Keep what a script gives; ``check`` looks at each argument with an effect.

        Raises:
            ConfigError: an unknown argument, two names of one, or what ``check`` raises.
        """
        renamed = {self._aliases.get(name, name): value for name, value in given.items()}
        if len(renamed) < len(given):
            twice = sorted(name for name in given if name in self._aliases or name in self._aliases.values())
            raise ConfigError(" and ".join(twice), "are names for the same thing", "Give one of them")
        for name, value in renamed.items():
            if name in self._no_effect:
                tell(self._setter, name, value, self._no_effect[name])
            elif name in self._defaults:
                check(name, value)
            else:
                raise unknown(self._setter, name, value, self._known())
            self.said[name] = value

    def get(self, getter: str, name: str) -> Any:
        """The value of an argument, or what holds where it has not been given.

        Raises:
            ConfigError: an unknown argument.
        """
        name = self._aliases.get(name, name)
        if name not in self._defaults and name not in self._no_effect:
            raise unknown(getter, name, None, self._known())
        return self.said.get(name, self._defaults.get(name))

    def _known(self) -> list[str]:
        return [*self._defaults, *self._aliases, *self._no_effect]


def by_name(function: str, order: Sequence[str], arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """What a call gives, all by name; ``order`` names the arguments that may come without theirs.

    Raises:
        ConfigError: more of them than there are, or one that is given twice.
    """
    if len(arguments) > len(order):
        rule = f"takes at most {len(order)} arguments without a name"
        raise ConfigError(f"{function}() with {len(arguments)}", rule, "Give arguments by their names")
    given = dict(zip(order, arguments, strict=False))
    twice = next((name for name in given if name in named), None)
    if twice is not None:
        rule = f"is given twice: {given[twice]!r} by its place, {named[twice]!r} by its name"
        raise ConfigError(f"{function}({twice}=...)", rule, "Give it once")
    return given | dict(named)


def tell(function: str, name: str, value: Any, why: str) -> None:
    """Print that an argument has no effect, and why."""
    say(f"{function}({name}={value!r}) has no effect: {why}")


def check_number(name: str, value: Any) -> int:
    """A whole number above 0.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} = {value!r}", "must be a whole number above 0", "Correct it")
    return value


def check_switch(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(value, bool):
        raise ConfigError(f"{name} = {value!r}", "must be True or False", "Correct it")
    return value


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """One of ``choices``.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in choices:
        shown = ", ".join(map(str, choices))
        raise ConfigError(f"{name} = {value!r}", f"must be one of {shown}", "Use one of them")
