"""Buffers of every dtype that a forward writes from a rank's own data; 2 ranks over gloo.

Oracle: torch's DDP in the same processes, which makes them rank 0's. Tolerance 0, of buffers and weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.harness import distributed, rank
from tests.reference import Ddp, Recipe, Zero, grid

WIDTH = 15


class Counting(nn.Module):
    """What it returns depends on a mean, a counter and a mask that its training forwards have written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))  # odd sizes before wider ones
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rounded", torch.zeros(5, dtype=torch.bfloat16))
        self.register_buffer("exact", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("strided", torch.zeros(3, 8)[:, ::2])  # a view, with gaps

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x + self.mean) * (1 + self.count + self.mask.sum() + self.exact.sum().float())
        if self.training:
            self.seen.fill_(True)
            self.mask[rank()] = True
            self.mean += x.detach().mean(0)
            self.count += len(x) + rank()
            self.rounded += 0.1 * (1 + rank())
            self.exact += 0.1 * (1 + rank())
            self.strided += torch.arange(4) * (1 + rank())
        return out


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_buffers_of_every_dtype_are_rank_0s_as_under_ddp(stage: int) -> None:
    recipe = Recipe(build=lambda _: Counting())
    expected, zero = Ddp(recipe), Zero(recipe, stage=stage)
    for step in range(4):
        for way in (expected, zero):
            way.backward(way.module(torch.ones(2 + rank(), WIDTH) * (step + rank())).square().mean())
            way.step()
    # DDP makes them equal before the next forward, here a step does.
    expected.module(torch.ones(1, WIDTH))
    zero.module(torch.ones(1, WIDTH))
    for (name, buffer), wanted in zip(zero.model.named_buffers(), expected.model.buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    weights = zero.weights()
    for name, weight in expected.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], weight), name
    zero.close()
