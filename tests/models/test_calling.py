"""Models are called as they call themselves."""

from __future__ import annotations

import pytest
import torch

from shardwise.models.calling import call_model, first_position, num_positions
from shardwise.models.shrink import build_small, shrink
from tests.architectures.survey import default_config


@pytest.mark.parametrize(("name", "first"), [("roberta", 2), ("opt", 0), ("bert", 0)])
def test_positions_begin_where_the_model_itself_begins(name: str, first: int) -> None:
    """And rows may be as long as what is left of the table of positions."""
    small = shrink(default_config(name))
    model = build_small(small)
    assert first_position(model) == first
    assert num_positions(model) == (small.max_position_embeddings - first if first else None)
    for length in (8, num_positions(model) or 8):
        ids = torch.randint(5, 40, (2, length), generator=torch.Generator().manual_seed(0))
        own = model(input_ids=ids, use_cache=False).logits
        assert torch.equal(call_model(model, ids, torch.arange(length).expand(2, length)), own)
    if first:
        with pytest.raises((IndexError, RuntimeError)):
            call_model(model, *(torch.full((1, length + 1), 5), torch.arange(length + 1)[None]))
