"""A small GPT on pairs of bytes.

A token is two bytes of text: 65,536 tokens need no tokenizer, and their two tables hold nearly all
parameters. So the state is large enough for a kill to hit a save in the middle, while a step stays short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

TOKENS = 1 << 16


@dataclass(frozen=True)
class Size:
    """``width`` must be a multiple of ``heads``; ``context`` and ``batch`` count tokens and sequences per step."""

    width: int
    layers: int
    heads: int
    context: int
    batch: int
    dropout: float = 0.1


SIZES = {
    "full": Size(width=136, layers=4, heads=4, context=32, batch=2),
    "medium": Size(width=64, layers=2, heads=4, context=32, batch=2),
    "small": Size(width=16, layers=1, heads=2, context=16, batch=2),
    # Without dropout: its mask would depend on how many ranks share the batch of 8.
    "ranks": Size(width=32, layers=2, heads=2, context=32, batch=8, dropout=0.0),
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.before_attention = nn.LayerNorm(size.width)
        self.mix = nn.Linear(size.width, 3 * size.width)
        self.merge = nn.Linear(size.width, size.width)
        self.before_feed = nn.LayerNorm(size.width)
        self.feed = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.drop = nn.Dropout(size.dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        mixed = self.mix(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4).unbind(0)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.merge(seen.transpose(1, 2).reshape(batch, length, width)))
        return cast(Tensor, x + self.drop(self.feed(self.before_feed(x))))


class Transformer(nn.Module):
    """Maps int64 tokens of shape (batch, context + 1) to the mean cross-entropy in nats of all but the first."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.drop = nn.Dropout(size.dropout)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.unembed = nn.Linear(size.width, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.drop(self.embed(inputs) + self.position(torch.arange(inputs.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.unembed(self.norm(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
