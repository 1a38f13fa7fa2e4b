"""Models are called as they call themselves."""

from __future__ import annotations

import pytest
import torch

from shardwise.models.calling import call_model, first_position
from shardwise.models.shrink import build_small, shrink
from tests.architectures.survey import default_config


@pytest.mark.parametrize(("name", "first"), [("roberta", 2), ("opt", 0), ("bert", 0)])
def test_positions_begin_where_the_model_itself_begins(name: str, first: int) -> None:
    model = build_small(shrink(default_config(name)))
    assert first_position(model) == first
    ids = torch.randint(5, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    own = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(call_model(model, ids, torch.arange(8).expand(2, 8)), own)
