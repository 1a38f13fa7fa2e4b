"""The errors that a user sees: one message, with the value, the rule and the nearest remedy."""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base of the errors that are shown to the user without a traceback.

    Args:
        value: what was given, with its name (``strategy.tp = 4``).
        rule: the rule that it breaks.
        remedy: the nearest thing that works.
    """

    exit_code = 2

    def __init__(self, value: str, rule: str, remedy: str = "") -> None:
        self.value, self.rule, self.remedy = value, rule, remedy
        super().__init__(f"{value}: {rule}" + (f". {remedy}" if remedy else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.value, self.rule, self.remedy)


class ConfigError(ShardwiseError):
    """A key, a value or an input file that cannot be used as it is given."""


class AbsentError(ConfigError, AttributeError):
    """A name of another library that is not here, and what serves in its place; ``hasattr`` answers False."""


class PlanError(ShardwiseError):
    """A strategy that this model, batch or number of devices cannot be split by."""


class CheckpointError(ShardwiseError):
    """Weights, a checkpoint or an export that is incomplete, foreign or does not fit."""


class DifferenceError(ShardwiseError):
    """A comparison that was asked for found a difference."""

    exit_code = 4


class SaveError(ShardwiseError):
    """A checkpoint or an export that could not be written; what was there before is untouched.

    ``rank`` is the one that could not write, where the others have heard of it.
    """

    exit_code = 3
    rank: int | None = None

    def of_rank(self, rank: int) -> SaveError:
        """The same with the rank that met it."""
        error = SaveError(self.value, f"rank {rank}: {self.rule}", self.remedy)
        error.rank = rank
        return error


class LaunchError(ShardwiseError):
    """A rank that died, or a job that could not be started."""

    exit_code = 3


def require(condition: object, value: str, rule: str, remedy: str) -> None:
    """Refuse ``value`` where a condition does not hold.

    Raises:
        ConfigError: it does not.
    """
    if not condition:
        raise ConfigError(value, rule, remedy)
