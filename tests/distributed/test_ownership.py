"""Parameters and optimizers that miss one another: the engine takes gradients that no optimizer ever sees.

Oracle: a step that could change nothing is refused by the name of a parameter; parameters without an
optimizer are named once in the log, and nothing is said where that is how it is meant. Two ranks over gloo.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.recorder import logged
from tests.reference import grid

WIDTH = 15


class Pair(nn.Module):
    """Two halves that are trained by two optimizers, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.second(self.first(x)))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.5)


def engine_of(model: nn.Module, stage: int) -> zs.ZeroEngine:
    return zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))


def backward(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH) + rank()).square().mean().backward()


@contextmanager
def said() -> Iterator[list[str]]:
    """Collect what rank 0 says about parameters without an optimizer."""
    with logged(logging.INFO) as lines:
        yield lines
    lines[:] = [line for line in lines if "in no optimizer" in line]


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_the_step_of_an_optimizer_that_was_not_sharded_is_refused_by_name(stage: int) -> None:
    model = Pair()
    engine = engine_of(model, stage)
    sharded, forgotten = engine.shard_optimizer(sgd(model.first)), sgd(model.second)
    backward(model)
    sharded.step()
    for optimizer, name in ((forgotten, "second.weight"), (sharded.optimizer, "first.weight")):
        with expect_error(zs.ConfigError, ["plain SGD", f"'{name}'", "engine.close()"]):
            optimizer.step()
    sgd(model.frozen).step()  # has nothing to do with the engine, as in torch
    sgd(nn.Linear(2, 2)).step()
    engine.close()
    if stage < 3:
        before = model.second.weight.clone()
        for param in model.parameters():
            param.grad = None
        backward(model)
        for optimizer in (forgotten, sharded.optimizer):
            optimizer.step()
        assert not torch.equal(model.second.weight, before)


@distributed(world_size=2)
@grid(stage=(1, 3))
def test_parameters_that_get_gradients_and_are_in_no_optimizer_are_named_once(stage: int) -> None:
    model = Pair()
    engine = engine_of(model, stage)
    sharded = engine.shard_optimizer(sgd(model.first))
    with said() as lines:
        for _ in range(4):
            backward(model)
            sharded.step()
            model.zero_grad()
    assert len(lines) == (rank() == 0)
    assert all("second.weight, second.bias." in line and "first" not in line for line in lines)
    engine.close()


@distributed(world_size=2)
@grid(stage=(1, 3))
def test_nothing_is_said_of_frozen_unused_and_alternating_parameters(stage: int) -> None:
    model = Pair()
    model.unused = nn.Linear(WIDTH, WIDTH)
    engine = engine_of(model, stage)
    optimizers = [engine.shard_optimizer(sgd(half)) for half in (model.first, model.second)]
    with said() as lines:
        for step in range(4):
            for number, half in enumerate((model.first, model.second)):
                half.requires_grad_(number == step % 2)
            backward(model)
            optimizers[step % 2].step()
            model.zero_grad()
    assert not lines
    engine.close()


@distributed(world_size=2)
def test_an_engine_that_is_gone_leaves_nothing_with_torchs_optimizers() -> None:
    before = len(_global_optimizer_pre_hooks)
    with subtest("closed"):
        engine = engine_of(Pair(), 2)
        assert len(_global_optimizer_pre_hooks) == before + 1
        engine.close()
        assert len(_global_optimizer_pre_hooks) == before
    with subtest("dropped, at rest"):
        engine = engine_of(Pair(), 2)
        engine.rest()
        watch, gone = engine.watch, weakref.ref(engine)
        del engine
        gc.collect()
        assert gone() is None and len(_global_optimizer_pre_hooks) == before
        watch.close()
