"""Callbacks that only ask for something that the Trainer does: a line of the loss, a checkpoint every so many steps."""

from __future__ import annotations

from typing import Any, NoReturn

from shardwise.api.messages import unknown
from shardwise.errors import ConfigError
from shardwise.log import say
from shardwise.mindspore.absent import refuse
from shardwise.mindspore.arguments import by_name, check_number, check_switch, tell
from shardwise.train import callbacks

# Arguments of CheckpointConfig in MindSpore's order, in which they may be given without their names.
_ORDER = (
    *("save_checkpoint_steps", "save_checkpoint_seconds", "keep_checkpoint_max", "keep_checkpoint_per_n_minutes"),
    *("integrated_save", "async_save", "saved_network", "append_info", "enc_key", "enc_mode", "exception_save"),
    *("crc_check", "remove_redundancy", "format"),
)
# Those without an effect, and why.
_NO_EFFECT = {
    "integrated_save": "each rank writes its part, and export/ has the whole model",
    "remove_redundancy": "what several ranks hold is written once",
    "saved_network": "the model of the Trainer is saved",
    "enc_mode": "checkpoints are not encrypted",
    "append_info": "a checkpoint holds all that a resume needs",
    "crc_check": "files are checked against their hashes when they are read",
    "format": "weights are safetensors",
    "exception_save": "a failed run goes on from its last checkpoint",
    "map_param_inc": "checkpoints load under any plan",
    "global_step_num": "steps are counted from the checkpoint that a run resumes",
}
# Arguments that would change when a checkpoint is written, how many stay or who can read them, and why they cannot.
# None, 0 and an empty key ask for nothing.
_REFUSED = {
    "save_checkpoint_seconds": "checkpoints are written after a number of steps",
    "keep_checkpoint_per_n_minutes": "the newest keep_checkpoint_max stay",
    "enc_key": "checkpoints are not encrypted",
}


class _Keys(callbacks.Callback):
    """A callback that is done with the keys of ``run.yaml`` that it asks for."""

    may_stop = False

    def __init__(self, keys: dict[str, Any]) -> None:
        """``keys``: dotted key -> value."""
        self.keys_given = keys


class LossMonitor(_Keys):
    """Print the loss every ``per_print_times`` steps.

    Raises:
        ConfigError: a number below 0.
    """

    def __init__(self, per_print_times: int = 1) -> None:
        if per_print_times == 0:
            say("LossMonitor(per_print_times=0) has no effect: the lines of the Trainer stay")
            super().__init__({})
        else:
            super().__init__({"log.steps": check_number("per_print_times", per_print_times)})


class TimeMonitor(_Keys):
    """The time of each step, which the Trainer prints and writes to ``metrics.jsonl`` anyway."""

    def __init__(self, data_size: int | None = None, data_time: bool = False) -> None:
        super().__init__({})
        if data_size is not None:
            tell("TimeMonitor", "data_size", data_size, "every printed step has its seconds")
        if data_time:
            tell("TimeMonitor", "data_time", data_time, "rows are tokenised ahead of the steps")


class CheckpointConfig:
    """When checkpoints are written, and how many stay. Arguments without their names come in MindSpore's order.

    Args:
        save_checkpoint_steps: a checkpoint every so many steps.
        keep_checkpoint_max: how many stay.
        async_save: whether steps go on while a checkpoint is written.

    Raises:
        ConfigError: an unknown argument or value, or one that cannot be followed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        given = by_name("CheckpointConfig", _ORDER, arguments, named)
        values = {"save_checkpoint_steps": 1, "keep_checkpoint_max": 5, "async_save": False}
        for name, value in given.items():
            if name in values:
                values[name] = value
            elif name in _REFUSED:
                if value:
                    rule = f"is not supported: {_REFUSED[name]}"
                    raise ConfigError(f"CheckpointConfig({name}=...)", rule, "Leave it out")
            elif name in _NO_EFFECT:
                tell("CheckpointConfig", name, value, _NO_EFFECT[name])
            else:
                raise unknown("CheckpointConfig", name, value, [*values, *_REFUSED, *_NO_EFFECT])
        self.keys = {
            "save.strategy": "steps",
            "save.steps": check_number("save_checkpoint_steps", values["save_checkpoint_steps"]),
            "save.keep": check_number("keep_checkpoint_max", values["keep_checkpoint_max"]),
            "save.async": check_switch("async_save", values["async_save"]),
        }


class ModelCheckpoint(_Keys):
    """Write checkpoints as ``config`` says, None: after every step; they lie in ``checkpoints`` of the output folder.

    Raises:
        ConfigError: a ``config`` of another kind.
    """

    def __init__(self, prefix: str = "CKP", directory: str | None = None, config: Any = None) -> None:
        if config is not None and not isinstance(config, CheckpointConfig):
            value = f"ModelCheckpoint(config) of type {type(config).__name__}"
            raise ConfigError(value, "must be a CheckpointConfig", "Use shardwise.mindspore.train.CheckpointConfig")
        super().__init__(dict((config or CheckpointConfig()).keys))
        if prefix != "CKP":
            tell("ModelCheckpoint", "prefix", prefix, "a checkpoint is named by its step")
        if directory is not None:
            tell("ModelCheckpoint", "directory", directory, "TrainingArguments(output_dir=...) sets where they lie")


def __getattr__(name: str) -> NoReturn:
    """Refuse what MindSpore has in this module and Shardwise has elsewhere, or not."""
    refuse(__name__, name)
