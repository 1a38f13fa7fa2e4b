"""To which parameters weight decay applies. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Of a parameter's name where it is a norm or a bias, whatever its shape (norms of heads, biases of experts).
_NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)", re.IGNORECASE)


def decays(name: str, shape: Sequence[int]) -> bool:
    """Whether a parameter decays: matrices do, norms and biases do not (the names are those of Hugging Face's rule)."""
    return len(shape) > 1 and not _NORM_OR_BIAS.search(name)
