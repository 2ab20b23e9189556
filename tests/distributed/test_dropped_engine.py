"""An engine that is dropped with its model, without close(), leaves nothing behind.

Oracles: weak references after a garbage collection; torch's own list of process groups; threads, hooks.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Mlp
from zero_strategy.errors import CheckpointError

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"stage": 0},
    {"stage": 2, "bf16": True},
    {"stage": 3, "stage3_param_persistence_threshold": 0},
    {"stage": 3, "fp16": True, "stage3_param_persistence_threshold": 0},
)


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def wait_for_threads_to_end() -> None:
    deadline = time.monotonic() + 20
    while any(t.name == "zero_strategy.watch" for t in threading.enumerate()):
        assert time.monotonic() < deadline, "a watch goes on"
        time.sleep(0.05)


def trained(layout: dict[str, Any]) -> tuple[zs.ZeroEngine, zs.ShardedEMA]:
    model = Mlp(depth=2, width=32)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(**layout))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
    average = zs.ShardedEMA(engine, decay=0.9)
    inputs = torch.ones(3, 32, dtype=next(model.parameters()).dtype)
    for _ in range(2):
        with engine.no_sync():
            engine.backward(model(inputs).sum())
        engine.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
        average.update()
    return engine, average


def use(layout: dict[str, Any], *, fails: bool) -> list[weakref.ref[Any]]:
    """Train for two steps and drop everything; return weak references to what must go."""
    engine, average = trained(layout)
    if fails:
        with expect_error(CheckpointError):
            engine.load_full_state_dict({"odd": torch.zeros(1)})
    things = (engine, engine.model, engine.optimizers[0], average, engine.buckets[0].flat)
    return [weakref.ref(thing) for thing in things]


@distributed(world_size=2)
def test_it_is_freed_with_its_groups_and_its_watch_whatever_it_was_used_for() -> None:
    groups_before, hook_before = num_groups(), sys.excepthook
    for number, layout in enumerate(LAYOUTS):
        fails = number % 2 == 1
        with subtest(f"{layout}, fails {fails}"):
            left = use(layout, fails=fails)
            gc.collect()
            assert [reference() for reference in left] == [None] * len(left)
            assert num_groups() == groups_before
            wait_for_threads_to_end()
            assert sys.excepthook == hook_before
            dist.barrier()
    with subtest("a rank that drops an engine early leaves the others in peace"):
        dropped = use(LAYOUTS[0], fails=False) if rank() == 0 else []
        engine = trained(LAYOUTS[0])[0] if rank() == 1 else None
        gc.collect()
        time.sleep(2.0)  # two looks of the watch
        dist.barrier()
        assert [reference() for reference in dropped] == [None] * len(dropped)
        assert engine is None or engine.watch.failure is None


@distributed(world_size=2)
def test_one_that_is_refused_gives_its_groups_and_its_thread_back_at_once() -> None:
    groups_before, hook_before = num_groups(), sys.excepthook
    gc.disable()  # nothing is left to it
    try:
        refused = {
            "allgather_bucket_size": [nn.Linear(3, 5), {"zero_optimization": {"allgather_bucket_size": -1}}],
            "The model differs": [nn.Linear(3, 5 + rank()), {"zero_optimization": {"stage": 3}}],
        }
        for text, arguments in refused.items():
            with expect_error(zs.ConfigError, text):
                zs.ZeroEngine(*arguments)
            assert num_groups() == groups_before and sys.excepthook == hook_before
            wait_for_threads_to_end()
    finally:
        gc.enable()


def test_a_model_alone_keeps_its_engine() -> None:
    model = nn.Linear(3, 3)
    engine = weakref.ref(zs.ZeroEngine(model, zs.ZeroConfig(stage=2)))
    gc.collect()
    model(torch.ones(1, 3)).sum().backward()
    living = engine()
    assert living is not None and living.full_grad(model.weight) is not None
    living.close()
