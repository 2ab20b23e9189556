"""An engine at rest whose ranks are trained apart: what wakes it or saves goes on from rank 0's values.

Oracle: rank 0's parameters as they are just before the call, sent to all ranks past the engine; its masters
are those from before wherever they still round to the weight. Tolerance 0. Two ranks over gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.reference import grid

WIDTH = 15
BF16 = {"bf16": {"enabled": True}}
APART = ["The ranks had different weights", "each rank by itself", "Call engine.wake() before the forward"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7)
        self.frozen = nn.Linear(7, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(self.first(x.to(self.first.weight.dtype)).tanh()))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(2, WIDTH) + rank()).float().square().mean()


def at_rest(stage: int, settings: dict[str, Any]) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
    """Train a step, so that masters are more precise than the weights, and rest."""
    engine = zs.ZeroEngine(
        Net(), {"zero_optimization": {"stage": stage, "reduce_bucket_size": 64}, **settings}
    )
    optimizer = engine.shard_optimizer(sgd(engine.model))
    engine.backward(loss_of(engine.model))
    optimizer.step()
    optimizer.zero_grad()
    engine.rest()
    return engine, optimizer


def write_apart(model: nn.Module) -> dict[str, Tensor]:
    """Write other values on each rank, here and there; return rank 0's weights on all."""
    with torch.no_grad():
        for param in model.parameters():
            param.view(-1)[::3] += 1 + rank()
    return rank_0s(model)


def rank_0s(model: nn.Module) -> dict[str, Tensor]:
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    for value in values.values():
        dist.broadcast(value, src=0)
    return values


def assert_taken(engine: zs.ZeroEngine, weights: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Compare every rank's weights, and on rank 0 the masters."""
    for name, param in engine.model.named_parameters():
        assert torch.equal(param, weights[name]), name
    masters = engine.full_state_dict(dtype=torch.float32)
    for name, value in masters.items():
        kept = before[name].to(weights[name].dtype) == weights[name]
        assert torch.equal(value, torch.where(kept, before[name], weights[name].float())), name
        assert 0 < kept.sum() < kept.numel(), name


@distributed(world_size=2)
@grid(stage=[0, 1, 2], settings=[{}, BF16])
def test_what_ends_a_rest_takes_rank_0s_weights_and_masters(stage: int, settings: dict[str, Any]) -> None:
    calls: dict[str, Callable[[zs.ZeroEngine], Any]] = {
        "wake": lambda engine: engine.wake(),
        "shard_optimizer": lambda engine: engine.shard_optimizer(sgd(engine.model)),
    }
    for name, call in calls.items():
        with subtest(name):
            engine, optimizer = at_rest(stage, settings)
            if name == "shard_optimizer":
                engine.forget_optimizers()
            before = engine.full_state_dict(dtype=torch.float32)
            weights = write_apart(engine.model)
            found = call(engine)
            assert name != "wake" or found is True
            assert engine.wake() is False, "it is awake"
            assert_taken(engine, weights, before)
            if name == "wake":
                engine.backward(loss_of(engine.model))
                optimizer.step()
                weights = rank_0s(engine.model)
                assert all(torch.equal(p, weights[n]) for n, p in engine.model.named_parameters())
            engine.close()


@distributed(world_size=2)
@grid(stage=[0, 1, 2], settings=[{}, BF16])
def test_what_is_saved_during_a_rest_is_rank_0s(stage: int, settings: dict[str, Any]) -> None:
    engine, _ = at_rest(stage, settings)
    before = engine.full_state_dict(dtype=torch.float32)
    weights = write_apart(engine.model)
    engine.full_state_dict()
    assert_taken(engine, weights, before)
    assert engine.is_resting
    engine.close()


@distributed(world_size=2)
@grid(stage=[0, 1, 2])
def test_a_loss_of_weights_that_differed_between_ranks_is_refused_on_all_and_the_next_trains(
    stage: int,
) -> None:
    engine, optimizer = at_rest(stage, {})
    with subtest("the same on all ranks"):
        loss = loss_of(engine.model)
        engine.backward(loss)
        assert not engine.is_resting
        optimizer.zero_grad()
    with subtest("apart"):
        engine.rest()
        weights = write_apart(engine.model)
        loss = loss_of(engine.model)
        with expect_error(zs.ShardingError, APART):
            engine.backward(loss)
        assert all(torch.equal(p, weights[n]) for n, p in engine.model.named_parameters())
        with expect_error(RuntimeError, "modified by an inplace operation"):
            engine.backward(loss)
        engine.backward(loss_of(engine.model))
        optimizer.step()
        stepped = rank_0s(engine.model)
        assert all(torch.equal(p, stepped[n]) for n, p in engine.model.named_parameters())
        assert not torch.equal(stepped["first.weight"], weights["first.weight"])
    engine.close()
