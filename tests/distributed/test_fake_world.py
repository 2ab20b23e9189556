"""Bytes held and sent at 64 and 1024 ranks, of which one is real.

torch's fake process group runs rank r of N with the memory and the calls of a real one and with wrong values,
so that nothing here looks at a number that was trained. Oracle: the formulas of `estimate.py`, exact
(tolerance 0). `Even` needs no padding at any of these sizes, so there the formulas must hold for the number
of parameters itself, on every rank. `Odd` has shards of which some are partly and some wholly padding; its
padding is counted here by marking every element of a flat buffer that belongs to a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from zero_strategy.estimate import (
    BucketTraffic,
    bucket_traffic_bytes,
    live_bytes,
    model_state_bytes,
    traffic_numel,
)

WORLD_SIZES = [64, pytest.param(1024, marks=pytest.mark.slow)]
DTYPES = [torch.float32, torch.bfloat16]
NUM_BLOCKS = 3
ADAM_BYTES = 8  # two fp32 moments
START_BYTES = 256  # what a parameter's start is aligned to
END_BYTES = 64  # what a shard's end is aligned to; 16 elements or more


class Even(nn.Module):
    """Blocks of 65,536 elements each, a multiple of 32 x 1024: no padding, and nothing in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 256, bias=False), nn.Tanh(), nn.Linear(256, 128, bias=False))
            for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Odd(nn.Module):
    """Blocks of 1,207 elements between an embedding and a head that belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 17)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(17), nn.Linear(17, 33), nn.Tanh(), nn.Linear(33, 17))
            for _ in range(NUM_BLOCKS)
        )
        self.head = nn.Linear(17, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Flat(NamedTuple):
    """One flat buffer, recounted from the shapes alone."""

    padded_numel: int
    used_by_rank: list[int]  # elements of parameters in each rank's shard
    is_root: bool


class World(NamedTuple):
    """A cell of the grid: which rank of how many, at which stage, in which dtype."""

    rank: int
    size: int
    stage: int
    dtype: torch.dtype


def cells(world_size: int) -> Iterator[World]:
    """The first, second and last rank of a world, at every stage, in both dtypes."""
    for rank, stage, dtype in product((0, 1, world_size - 1), (1, 2, 3), DTYPES):
        yield World(rank, world_size, stage, dtype)


@contextmanager
def fake_world(world: World) -> Iterator[None]:
    """Be one rank of a world in which nobody else exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=world.rank, world_size=world.size)
    try:
        with subtest(str(world)):
            yield
    finally:
        dist.destroy_process_group()


class Training:
    """A model on an engine, and what the ledger said along the way."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model.to(world.dtype)
        settings: dict[str, Any] = {"stage": world.stage, "stage3_param_persistence_threshold": 0}
        self.engine = zs.ZeroEngine(self.model, zs.ZeroConfig(**settings))
        self.optimizer = self.engine.shard_optimizer(torch.optim.AdamW(self.model.parameters()))
        self.unsharded_bytes: list[int] = []  # at every beginning of a block's forward and backward
        for block in self.model.blocks:
            block.register_forward_pre_hook(self._look)
            block.register_full_backward_hook(self._look)
        is_even = isinstance(model, Even)
        self.inputs = torch.randn(2, 128, dtype=world.dtype) if is_even else torch.randint(0, 41, (2, 3))

    def step(self) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
        """Train one step; return the memory before gradients are cleared, and what was sent."""
        self.engine.ledger.reset()
        self.engine.backward(self.model(self.inputs).sum())
        self.optimizer.step()
        held = self.engine.ledger.memory
        self.optimizer.zero_grad()
        return held, self.engine.ledger.comm

    def _look(self, *args: Any) -> None:
        self.unsharded_bytes.append(self.engine.ledger.memory["unsharded"])


# -- no padding: the formulas themselves ---------------------------------------------------------------------


@pytest.mark.parametrize("size", WORLD_SIZES)
@distributed(world_size=1, process_group=False)
def test_every_rank_holds_and_sends_what_the_formulas_say(size: int) -> None:
    num_params = NUM_BLOCKS * 65_536
    for world in cells(size):
        with fake_world(world):
            training = Training(Even(), world)
            for _ in range(2):
                held, sent = training.step()
                formula = model_state_bytes(num_params, size, world.stage, param_bytes=world.dtype.itemsize)
                assert {kind: held[kind] for kind in formula._fields} == formula._asdict()
                assert held["padding"] == held["unsharded"] == 0
                wanted = traffic_numel(num_params, size, world.stage) * world.dtype.itemsize
                assert sent["all_gather"]["bytes_sent"] + sent["reduce_scatter"]["bytes_sent"] == wanted
                assert sent["all_reduce"]["bytes_sent"] == 0


@pytest.mark.parametrize("size", WORLD_SIZES)
@distributed(world_size=1, process_group=False)
def test_stage3_never_holds_more_than_two_blocks_whole(size: int) -> None:
    for rank in (0, size - 1):
        with fake_world(world := World(rank, size, 3, torch.float32)):
            training = Training(Even(), world)
            for _ in range(3):  # from the second on, the next block is gathered ahead
                training.step()
            block_bytes = 65_536 * 4
            assert max(training.unsharded_bytes) == live_bytes([block_bytes] * NUM_BLOCKS, root_bytes=0)
            assert min(training.unsharded_bytes) == block_bytes


# -- padding, counted element by element ---------------------------------------------------------------------


@pytest.mark.parametrize("size", WORLD_SIZES)
@distributed(world_size=1, process_group=False)
def test_what_exceeds_the_formulas_is_the_padding_that_is_declared(size: int) -> None:
    for world in cells(size):
        flats = flats_of(Odd(), world)
        padded_numel = sum(flat.padded_numel for flat in flats)
        used_numel = sum(flat.used_by_rank[world.rank] for flat in flats)
        padding_of_shard = padded_numel // size - used_numel
        padding_of_whole = padded_numel - sum(param.numel() for param in Odd().parameters())
        with fake_world(world):
            held, sent = Training(Odd(), world).step()
            itemsize, master_bytes = world.dtype.itemsize, 4 if world.dtype.itemsize < 4 else 0
            # Shards are equal, so what a rank holds is the formula for the padded number of elements; the
            # optimizer alone has no padding, since it works on slices of parameters.
            formula = model_state_bytes(padded_numel, size, world.stage, param_bytes=itemsize)
            formula = formula._replace(optimizer=formula.optimizer - ADAM_BYTES * padding_of_shard)
            assert {kind: held[kind] for kind in formula._fields} == formula._asdict()
            padding = (
                itemsize * (padding_of_shard if world.stage >= 3 else padding_of_whole)  # parameters
                + itemsize * (padding_of_shard if world.stage >= 2 else padding_of_whole)  # gradients
                + master_bytes * padding_of_shard
            )
            assert held["padding"] == padding
            assert held["optimizer"] == ADAM_BYTES * used_numel
            check_sent(sent, flats, world)


def check_sent(sent: dict[str, dict[str, int]], flats: list[Flat], world: World) -> None:
    """Require a gather and a reduction of every bucket, and a second gather of blocks at stage 3."""
    traffic = [
        BucketTraffic(
            flat.padded_numel,
            world.dtype.itemsize,
            num_gathers=2 if world.stage == 3 and not flat.is_root else 1,
            num_reductions=1,
        )
        for flat in flats
    ]
    flow = sent["all_gather"]["bytes_sent"] + sent["reduce_scatter"]["bytes_sent"]
    assert flow == bucket_traffic_bytes(traffic, world.size)
    assert sent["reduce_scatter"]["calls"] == len(flats)
    assert sent["all_gather"]["calls"] == sum(bucket.num_gathers for bucket in traffic)
    # A byte a parameter, one a bucket, one for the order, one for frozen parameters that want a gradient, one
    # for a stop, 16 for what was gathered, however many ranks.
    num_params = sum(1 for _ in Odd().parameters())
    assert sent["control"]["bytes_sent"] <= num_params + len(flats) + 19


@pytest.mark.parametrize("size", WORLD_SIZES)
def test_the_grid_has_shards_with_and_without_padding_and_wholly_of_it(size: int) -> None:
    world = World(0, size, 3, torch.float32)
    block = next(flat for flat in flats_of(Odd(), world) if not flat.is_root)
    shard_numel = block.padded_numel // size
    assert sum(block.used_by_rank) == sum(param.numel() for param in Odd().blocks[0].parameters())
    assert shard_numel in block.used_by_rank and block.used_by_rank[size - 1] == 0
    assert any(0 < numel < shard_numel for numel in block.used_by_rank)


def flats_of(model: nn.Module, world: World) -> list[Flat]:
    """Recount the flat buffers: the root's and one per block at stage 3, a single one below."""
    blocks = [list(block.parameters()) for block in model.blocks] if world.stage == 3 else []
    inside = {id(param) for block in blocks for param in block}
    root = [param for param in model.parameters() if id(param) not in inside]
    return [_flat(root, world, is_root=True), *(_flat(block, world, is_root=False) for block in blocks)]


def _flat(params: list[nn.Parameter], world: World, *, is_root: bool) -> Flat:
    start_numel, end_numel = START_BYTES // world.dtype.itemsize, max(16, END_BYTES // world.dtype.itemsize)
    marks: list[Tensor] = []  # True where an element belongs to a parameter
    for param in params:
        marks.append(torch.ones(param.numel(), dtype=torch.bool))
        marks.append(torch.zeros(-param.numel() % start_numel, dtype=torch.bool))
    end = sum(mark.numel() for mark in marks)
    marks.append(torch.zeros(-end % (end_numel * world.size), dtype=torch.bool))
    used = torch.cat(marks).view(world.size, -1).sum(dim=1)
    return Flat(sum(mark.numel() for mark in marks), used.tolist(), is_root)


# -- a world without a backend for the model's device --------------------------------------------------------


@distributed(world_size=1, process_group=False)
def test_a_model_on_a_device_that_the_process_group_does_not_serve_is_refused() -> None:
    dist.init_process_group("cuda:fake", store=FakeStore(), rank=1, world_size=2)
    with expect_error(zs.ConfigError, ["on cpu", "(cuda:fake)", "device=", "cpu:gloo,cuda:fake"]):
        zs.ZeroEngine(Odd(), zs.ZeroConfig(stage=3))
    dist.destroy_process_group()
