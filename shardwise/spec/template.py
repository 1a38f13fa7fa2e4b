"""Chat templates as they are given: a file, or the text itself, and what a template is told. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError

# Arguments of apply_chat_template that the code which calls it sets; all others reach the template.
OWN_SETTINGS = (
    *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "sanitize_control_tokens", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask"),
)


def template_text(template: str) -> str:
    """The text of a template that is given as a file or as itself.

    Raises:
        ConfigError: no such file, or one that is not UTF-8.
    """
    if "{" in template:
        return template
    try:
        return Path(template).read_bytes().decode("utf-8-sig")
    except OSError as error:
        rule = f"neither a file that can be read ({error.strerror}) nor the text of a template"
        raise ConfigError(f"chat_template = {template}", rule, "Name a Jinja file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template = {template}", "the file is not UTF-8", "Save it as UTF-8") from None
