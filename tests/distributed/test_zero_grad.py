"""`zero_grad`: what is cleared, and what `set_to_none=False` leaves for the optimizer; 2 ranks over gloo.

Oracle: torch's DDP in the same processes. Tolerance 0: one reduction per step at two ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import distributed, rank, subtest
from tests.reference import Ddp, Recipe, Zero, grid

WIDTH = 15


class Branches(nn.Module):
    """The second branch is used when asked for, the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, uses_second: bool) -> Tensor:
        return self.second(self.first(x)) if uses_second else self.first(x)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


CLEARING: dict[str, Callable[[Any], None]] = {
    "optimizer": lambda way: way.optimizer.zero_grad(set_to_none=False),
    "model": lambda way: way.model.zero_grad(set_to_none=False),
    "model, to None": lambda way: way.model.zero_grad(),
}


def train(way: Any, clear: Callable[[Any], None], *, accumulates: bool) -> list[dict[str, Tensor]]:
    """Use the second branch in the first step only; return the weights after every step."""
    weights = []
    for step in range(4):
        if accumulates:
            with way.no_sync():
                way.backward(way.module(torch.ones(2, WIDTH), step == 0).square().mean())
        if step == 1:
            clear(way)  # in the middle of a window: of what was accumulated nothing is left
        way.backward(way.module(torch.ones(2, WIDTH) + rank() + step, step == 0).square().mean())
        way.optimizer.step()
        clear(way)
        weights.append(way.weights())
    return weights


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3), accumulates=(False, True))
def test_zeros_that_are_kept_are_stepped_as_under_ddp(stage: int, accumulates: bool) -> None:
    # Both move a weight whose gradient is zero, by decay or by momentum.
    recipe = Recipe(build=lambda _: Branches(), optimizer=adamw if accumulates == stage % 2 else momentum)
    for name, clear in CLEARING.items():
        with subtest(name):
            expected = train(Ddp(recipe), clear, accumulates=accumulates)
            settings = {"stage": stage, "accumulate_whole_gradients": True, "reduce_bucket_size": 300}
            zero = Zero(recipe, **settings)
            found = train(zero, clear, accumulates=accumulates)
            zero.close()
            for step in range(4) if rank() == 0 else ():
                for key, value in expected[step].items():
                    assert torch.equal(found[step][key], value), f"step {step}: {key}"
            moves = not torch.equal(expected[3]["second.weight"], expected[0]["second.weight"])
            assert moves == (name != "model, to None")
            assert torch.equal(expected[3]["third.weight"], expected[0]["third.weight"])


@distributed(world_size=2)
@grid(stage=(1, 2))
def test_while_the_engine_rests_the_model_clears_as_torch_does(stage: int) -> None:
    zero = Zero(Recipe(build=lambda _: Branches()), stage=stage)
    zero.engine.rest()
    zero.model(torch.ones(2, WIDTH), False).square().mean().backward()
    grad = zero.model.first.weight.grad
    assert grad is not None and grad.any()
    zero.model.zero_grad(set_to_none=False)
    assert zero.model.first.weight.grad is grad and not grad.any()
    zero.model.zero_grad()
    assert zero.model.first.weight.grad is None
    zero.close()
