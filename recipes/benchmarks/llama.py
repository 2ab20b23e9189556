"""The model that the benchmarks step: shaped like Llama, in plain torch, with seeded weights and data."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Shape(NamedTuple):
    """Sizes of a model and of its batch; the default has 33.7M parameters."""

    hidden: int = 512
    mlp_hidden: int = 1376
    layers: int = 8
    heads: int = 8
    vocabulary: int = 8192
    sequence: int = 128
    batch: int = 2


SMALL = Shape(hidden=64, mlp_hidden=172, layers=2, heads=2, vocabulary=256)  # 0.13M parameters: all overhead


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key = rotate(split(self.query(x)), angles), rotate(split(self.key(x)), angles)
        mixed = F.scaled_dot_product_attention(query, key, split(self.value(x)), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.hidden)
        self.gate = nn.Linear(shape.hidden, shape.mlp_hidden, bias=False)
        self.up = nn.Linear(shape.hidden, shape.mlp_hidden, bias=False)
        self.down = nn.Linear(shape.mlp_hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), angles)
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Tokens in, mean loss of predicting the next one out: the whole step's forward is one call."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList([Layer(shape) for _ in range(shape.layers)])
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        half = shape.hidden // shape.heads // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("angles", torch.outer(torch.arange(shape.sequence), frequencies))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.angles)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of features by an angle that grows with the position."""
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def build_model(shape: Shape, dtype: torch.dtype) -> Llama:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return Llama(shape).to(dtype)


def build_batch(shape: Shape, rank: int) -> Tensor:
    """Return a rank's own tokens, [batch, sequence]."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(shape.vocabulary, (shape.batch, shape.sequence), generator=generator)
