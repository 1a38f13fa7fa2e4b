"""The key ``chat_template``: a file, or the text of a template itself. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError


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
