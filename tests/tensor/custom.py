"""Models of our own that no list of families knows: plain modules with a list of blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, VOCAB = 24, 4, 48


class OddBlock(nn.Module):
    """Value, key and query in one matrix, in that order; attention and MLP side by side, the MLP's gate last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.vkq = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.up_and_gate = nn.Linear(WIDTH, 2 * 40)
        self.down = nn.Linear(40, WIDTH, bias=True)
        self.temperature = nn.Parameter(torch.ones(HEADS))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden_states)
        rows, length, _ = x.shape
        value, key, query = self.vkq(x).chunk(3, dim=-1)
        heads = [t.view(rows, length, -1, WIDTH // HEADS).transpose(1, 2) for t in (query, key, value)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        attended = attended * self.temperature.view(1, -1, 1, 1)
        attended = self.mix(attended.transpose(1, 2).reshape(rows, length, -1))
        up, gate = self.up_and_gate(x).chunk(2, dim=-1)
        return hidden_states + attended + self.down(up * F.silu(gate))


class StubbornBlock(nn.Module):
    """Attention that insists on the whole width, written as a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows, length, _ = hidden_states.shape
        query, key, value = (
            t.reshape(rows, length, HEADS, 6).transpose(1, 2)
            for t in self.qkv(self.norm(hidden_states)).split(WIDTH, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return hidden_states + self.out(attended.transpose(1, 2).reshape(rows, length, WIDTH))


class FedBlock(nn.Module):
    """An MLP whose inner features meet an input that the model makes for all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(WIDTH, 16)
        self.wide = nn.Linear(16, WIDTH)

    def forward(self, hidden_states: torch.Tensor, fed: torch.Tensor) -> list[torch.Tensor]:
        return [hidden_states + self.wide(F.silu(self.narrow(hidden_states)) * fed)]


class Repeating(nn.Module):
    """A stack of experts that adds its input to the result, as experts without weights do."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 6, width)), nn.Parameter(torch.randn(2, width, 6))

    def forward(self, x: torch.Tensor, repeated: float) -> torch.Tensor:
        return sum(F.silu(x @ u.T) @ d.T for u, d in zip(self.up, self.down, strict=True)) + repeated * x


class RepeatingBlock(nn.Module):
    """A residual block of such a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), Repeating(WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + self.experts(self.norm(hidden_states), 0.5)


class Custom(nn.Module):
    """Embedding, blocks, norm, head: ids in, logits out."""

    def __init__(self, blocks: list[nn.Module], *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Fed(Custom):
    """Blocks that get, beside the hidden state, what one more matrix makes of the embedding, and return lists."""

    def __init__(self) -> None:
        super().__init__([FedBlock(), FedBlock()])
        self.side = nn.Linear(WIDTH, 16)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        fed = self.side(hidden)
        for block in self.blocks:
            (hidden,) = block(hidden, fed)
        return self.head(self.norm(hidden))


def small(model: nn.Module) -> nn.Module:
    """``model`` in float64, no parameter at a special value."""
    generator = torch.Generator().manual_seed(0)
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model.eval()
