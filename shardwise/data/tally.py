"""What became of the rows that are not in use: counted by kind, the first of each kept, one message for all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.data.tokenise import Chunk
from shardwise.errors import ConfigError

_SHOWN = 3  # bad rows that one message spells out, and kinds of them
_SHOWN_COLUMNS = 10
_VARIES = re.compile(r"'[^']*'|\d+")  # what differs between two reasons of one kind
_HELD_OUT = re.compile(r"(?:test|valid|validation|val|dev|eval)(?![a-z])")
Notify = Callable[[str], None]


@dataclass
class Fate:
    """Rows that met one end: how many, where the first stands, the longest."""

    count: int = 0
    first: str = ""
    first_length: int = 0
    longest: int = 0

    def add(self, name: str, found: list[tuple[int, int]]) -> None:
        """Count ``(line, length)`` pairs of the file ``name``."""
        if found and not self.count:
            self.first, self.first_length = f"{name}:{found[0][0]}", found[0][1]
        self.count += len(found)
        self.longest = max([self.longest, *(length for _, length in found)])


@dataclass
class Tally:
    """Counts over all files of a source; ``kinds`` maps a kind of fault to its first reason and its count."""

    num_items: int = 0
    num_bad: int = 0
    first_bad: list[tuple[str, str]] = field(default_factory=list)  # (file:line, reason)
    kinds: dict[str, tuple[str, int]] = field(default_factory=dict)
    hopeless: tuple[str, str] | None = None
    refused: Fate = field(default_factory=Fate)
    dropped: Fate = field(default_factory=Fate)
    truncated: Fate = field(default_factory=Fate)
    split: Fate = field(default_factory=Fate)
    formats: dict[str, str] = field(default_factory=dict)  # by file
    unused: dict[str, list[str]] = field(default_factory=dict)  # by file: columns with text that are not looked at

    def add(self, chunk: Chunk, name: str) -> None:
        """Count a chunk of the file ``name``."""
        self.num_items += chunk.num_items
        if chunk.kind or name not in self.formats:  # it may be found late
            self.formats[name] = chunk.kind or "none"
        found = self.unused.setdefault(name, [])
        found += [column for column in chunk.unused if column not in found]
        for line, reason in chunk.bad:
            self.num_bad += 1
            if len(self.first_bad) < _SHOWN:
                self.first_bad.append((f"{name}:{line}", reason))
            kind = _VARIES.sub("*", reason)
            self.kinds[kind] = (self.kinds.get(kind, (reason, 0))[0], self.kinds.get(kind, (reason, 0))[1] + 1)
        if chunk.hopeless and not self.hopeless:
            self.hopeless = (f"{name}:{chunk.hopeless[0]}", chunk.hopeless[1])
        for fate in ("refused", "dropped", "truncated", "split"):
            getattr(self, fate).add(name, getattr(chunk, fate))

    def by_reason(self) -> str:
        """The kinds of faults, the most frequent first, each with its first reason and its count."""
        counted = sorted(self.kinds.values(), key=lambda kind: -kind[1])
        shown = "; ".join(f"{reason} ({count})" for reason, count in counted[:_SHOWN])
        return shown + (f"; and {len(counted) - _SHOWN} other reasons" if len(counted) > _SHOWN else "")

    def check(
        self,
        name: str,
        num_rows: int,
        num_learned: int,
        limit: str,
        *,
        skip_bad: bool,
        splits: bool = False,
        is_look: bool = False,
    ) -> None:
        """Refuse what a run cannot use.

        Args:
            name: of the source, for messages that speak of all of it.
            num_rows: rows in use; ``num_learned`` of them have a supervised token.
            limit: what the longest row follows from, in words.
            skip_bad: bad rows are left out; they are refused only where no row is left.
            splits: texts that are too long became several rows, so what is refused is none that can.
            is_look: rows that are too long are left out.

        Raises:
            ConfigError: what :func:`shardwise.data.rows.load_rows` says.
        """
        if not self.num_items:
            raise ConfigError(name, "holds no rows")
        if skip_bad and self.hopeless:
            rule = f"{self.hopeless[1]}; the rows behind it cannot be read, so leaving this one out would lose them"
            raise ConfigError(self.hopeless[0], rule, "Correct it")
        if self.num_bad and not (skip_bad and num_rows):
            raise self._bad_rows(name, skip_bad=skip_bad)
        if self.refused.count and not is_look:
            count, longest = self.refused.count, self.refused.longest
            rule = (
                f"{self.refused.first_length} tokens are more than {limit} ({count} such rows, the longest {longest})"
            )
            remedy = "Cut them with data.on_long=truncate, leave them out with data.on_long=drop"
            if splits:
                rule += ", and only a text learned as a whole can be split: half of a conversation has no answer"
            raise ConfigError(self.refused.first, rule, remedy)
        if not num_learned:
            rule = f"none of {self.num_items} rows has a supervised token, there is nothing to learn"
            out, longest = self.dropped.count + self.refused.count, max(self.dropped.longest, self.refused.longest)
            if out + self.num_bad == self.num_items and out:
                rule = f"no row is left: {out} of {self.num_items} are longer than {limit}, the longest {longest}"
                raise ConfigError(name, rule, "Cut them with data.on_long=truncate, or allow longer ones")
            within = f" within {limit}" if out else ""
            raise ConfigError(name, rule + within, "Look at the rows' labels")

    def _bad_rows(self, name: str, *, skip_bad: bool) -> ConfigError:
        """One message for all bad rows: the first few spelled out, the rest counted by kind."""
        if skip_bad:
            return ConfigError(name, f"no valid rows: {self.num_bad} left out because {self.by_reason()}")
        if self.num_bad == 1:
            return ConfigError(*self.first_bad[0], "Correct it")
        lines = [f"{place}: {reason}" for place, reason in self.first_bad]
        if self.num_bad > _SHOWN:
            lines.append(f"and {self.num_bad - _SHOWN} more; by kind: {self.by_reason()}")
        rule = f"{self.num_bad} of {self.num_items} rows cannot be used"
        return ConfigError(
            name, rule, "\n  ".join(["Correct them, or leave them out with data.on_bad_rows=skip:", *lines])
        )

    def counts(self) -> dict[str, Any]:
        """What is counted, as data."""
        return {
            "rows_read": self.num_items,
            "formats": dict(self.formats),
            "bad": dict(self.kinds.values()),
            "dropped": self.dropped.count,
            "truncated": self.truncated.count,
            "split": self.split.count,
            "refused": self.refused.count,
        }

    def notes(self, name: str, limit: str) -> list[str]:
        """A line for each kind of rows that are left out or cut; ``name`` is the source's."""
        told = []
        if self.num_bad:
            first = _line(self.first_bad[0][0], name)
            told.append(f"{self.num_bad} bad rows left out, the first {first}: {self.by_reason()}")
        if self.refused.count:
            first = _line(self.refused.first, name)
            told.append(
                f"{self.refused.count} rows longer than {limit} that cannot be split left out, the first {first}"
            )
        if self.dropped.count:
            first = _line(self.dropped.first, name)
            told.append(f"{self.dropped.count} rows longer than {limit} dropped, the first {first}")
        if self.truncated.count:
            told.append(f"{self.truncated.count} rows cut to {limit}, the first {_line(self.truncated.first, name)}")
        if self.split.count:
            told.append(
                f"{self.split.count} texts longer than {limit} split, the first {_line(self.split.first, name)}"
            )
        return told + self._held_out() + self._unused(name)

    def _held_out(self) -> list[str]:
        """A line where files to train on lie beside files whose names say that they are for a test."""
        plain = {file: file.rpartition("/")[2].lower() for file in self.formats}
        apart = [file for file, base in plain.items() if _HELD_OUT.match(base)]
        if not apart or not any(base.startswith("train") for base in plain.values()):
            return []
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        return [f"rows of {apart[0]}{more} are used like the others; a pattern such as train* leaves them out"]

    def _unused(self, name: str) -> list[str]:
        """A line for the files that have the same columns without a use."""
        files: dict[tuple[str, ...], list[str]] = {}
        for file, columns in self.unused.items():
            files.setdefault(tuple(columns), []).append(file)
        told = []
        for names, having in files.items():
            if not names:
                continue
            place = "" if having == [name] else f" in {having[0]}"
            place += f" and {len(having) - 1} more files" if len(having) > 1 else ""
            shown = ", ".join(names[:_SHOWN_COLUMNS]) + (", ..." if len(names) > _SHOWN_COLUMNS else "")
            told.append(f"columns with text that are not used{place}: {shown}")
        return told


def _line(place: str, name: str) -> str:
    file, _, line = place.rpartition(":")
    return f"on line {line}" + ("" if file == name else f" of {file}")
