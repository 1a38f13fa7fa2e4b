"""What stands in the place of a module of a model: its attributes, and nothing of its weight."""

from __future__ import annotations

from typing import Any

from torch import nn


class _Itself:
    """Holds something that a deep copy shares."""

    def __init__(self, held: nn.Module) -> None:
        self.held = held

    def __deepcopy__(self, _memo: dict[int, Any]) -> _Itself:
        return self


class StandIn(nn.Module):
    """In the place of a module that is not run here: no parameters, but its attributes can be read.

    Models read what a block is (``attention_type``) in their own forward. The replaced module is no submodule of this
    one, so nothing of it is counted, moved or saved, and copies share it.
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self.__dict__["_replaced"] = _Itself(replaced)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            replaced = self.__dict__.get("_replaced")
            if replaced is None:  # while it is copied
                raise
            return getattr(replaced.held, name)
