"""``Trainer(peft_config=...)``: PEFT's configuration of LoRA as keys of the section ``lora``."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from shardwise.errors import ConfigError

# Field -> our key.
_KEYS = {
    "r": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
}
# What an adapter's file says of itself, or what follows from the model.
_SAID = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "fan_in_fan_out", "runtime_config"),
)


def lora_keys(config: Any) -> dict[str, Any]:
    """The section ``lora`` that ``config`` (peft.LoraConfig) asks for.

    Raises:
        ConfigError: another kind of adapter, or a setting that cannot be followed.
    """
    if type(config).__name__ != "LoraConfig" or not hasattr(config, "lora_alpha"):
        rule = "is not supported: LoRA is the only adapter"
        raise ConfigError(f"peft_config of type {type(config).__name__}", rule, "Use peft.LoraConfig")
    plain = type(config)()
    for name in [field.name for field in fields(config) if field.name not in (*_KEYS, *_SAID, "use_rslora")]:
        given, default = getattr(config, name), getattr(plain, name)
        if given is not None and given != default and (given or default):
            rule = "is not supported: adapters are plain LoRA"
            raise ConfigError(f"peft_config.{name} = {given!r}", rule, f"Leave {name} out")
    if config.target_modules is None:
        rule = "not given: PEFT would take names by the type of the model"
        raise ConfigError("peft_config.target_modules", rule, "Use target_modules='all-linear', or a list of names")
    given = {key: getattr(config, name) for name, key in _KEYS.items() if getattr(config, name) is not None}
    if config.use_rslora:  # scales by alpha / sqrt(r), and we by alpha / r
        given["alpha"] = config.lora_alpha * math.sqrt(config.r)
    # PEFT keeps names as a set, whose order differs from process to process.
    return {key: sorted(value) if isinstance(value, set | list | tuple) else value for key, value in given.items()}
