"""How much is whole at a time at stage 3, as the keys of `zero_optimization` say.

Oracles: sizes are those of the shapes through `BucketLayout`; what is whole or on its way is seen by a
tracker of storages, which asks nobody; events on the buckets are written out in order ("+a" the start of a
gather, "-a" resharding, "!a" dropping); weights are those of naive data parallelism. Tolerance 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy as zs
from tests.harness import distributed, rank, subtest, world_size
from tests.models import Routes, inputs, route_loss
from tests.recorder import Recorder, assert_nothing_whole, logged
from tests.reference import Naive, Recipe, Zero, compare, grid
from tests.storage_tracker import Alive, StorageTracker
from zero_strategy.layout import BucketLayout

WIDTH, DEPTH = 32, 8
UNIT_NUMEL = WIDTH * WIDTH  # of `Stack`; no padding at world size 2
ENDLESS = 10**9
ROUTES = Recipe(build=lambda _: Routes())


class Stack(nn.Module):
    """Equal blocks, nothing in the root: every block with a weight of 32 x 32."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(DEPTH)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute is None:
                x = x + block(x)
            else:
                x = x + checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
        return x


def stack_loss(model: Any, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank())
    return model(torch.randn(3, WIDTH, generator=generator, requires_grad=True)).square().mean()


def routes_sizes() -> tuple[int, int]:
    """The padded sizes of a unit of `Routes`, and of its root."""
    unit = BucketLayout.build([("weight", (15, 15)), ("bias", (15,))], world_size(), 4)
    root = BucketLayout.build([("weight", (3, 15)), ("bias", (3,))], world_size(), 4)
    return unit.padded_numel, root.padded_numel


class Peaks(NamedTuple):
    """The most elements that were whole or on their way."""

    forward: int
    backward: int
    evaluation: int


@contextmanager
def peak_of(tracker: StorageTracker, engine: zs.ZeroEngine) -> Iterator[list[int]]:
    """Yield a list that has one number at the end: the most elements that sharded buckets had memory for."""
    serials = set(tracker.add(bucket.flat for bucket in engine.buckets if bucket.policy.shard_params))
    peak = [0]

    def look(alive: Alive) -> None:
        nbytes = sum(nbytes for serial, nbytes in alive.items() if serial in serials)
        peak[0] = max(peak[0], nbytes // 4)

    tracker.listen(look)
    yield peak
    tracker._on_look.remove(look)


def train_stack(
    recompute: str | None = None, num_steps: int = 2, **settings: Any
) -> tuple[Peaks, Tensor, int]:
    """Train; return the peaks of the last step, all weights, and the bytes gathered in the last step."""
    tracker = StorageTracker()
    with tracker:
        zero = Zero(Recipe(build=lambda _: Stack(recompute)), stage=3, **settings)
        for step in range(num_steps):
            with torch.no_grad(), peak_of(tracker, zero.engine) as evaluation:
                stack_loss(zero.model, step)
            zero.engine.ledger.reset()
            with peak_of(tracker, zero.engine) as forward:
                loss = stack_loss(zero.model, step)
            with peak_of(tracker, zero.engine) as backward:
                zero.backward(loss)
            assert_nothing_whole(zero.engine)
            gathered = zero.engine.ledger.comm["all_gather"]["bytes_sent"]
            zero.step()
    weights = torch.cat([value.flatten() for value in zero.weights().values()] or [torch.empty(0)])
    zero.close()
    return Peaks(forward[0], backward[0], evaluation[0]), weights, gathered


# -- stage3_max_live_parameters --


@distributed(world_size=2, timeout=120)
def test_no_more_than_max_live_parameters_are_whole_in_forward_backward_and_recomputation() -> None:
    """A hard cap, whatever is to be gathered ahead or kept."""
    unlimited = train_stack()[1]
    for recompute, cap, prefetch, reuse in (
        (None, 1, ENDLESS, ENDLESS),
        (None, 2, UNIT_NUMEL, 0),
        ("reentrant", 5, 0, ENDLESS),
        ("non-reentrant", 2, UNIT_NUMEL, 0),
        ("non-reentrant", 5, ENDLESS, ENDLESS),
    ):
        with subtest(f"{cap} blocks, recompute {recompute}, prefetch {prefetch}, reuse {reuse}"):
            peaks, weights, _ = train_stack(
                recompute,
                stage3_max_live_parameters=cap * UNIT_NUMEL,
                stage3_prefetch_bucket_size=prefetch,
                stage3_max_reuse_distance=reuse,
            )
            assert max(peaks) <= cap * UNIT_NUMEL
            # What may be used is used.
            reached = 2 if prefetch == UNIT_NUMEL else DEPTH
            assert peaks.backward == min(cap, reached) * UNIT_NUMEL
            assert torch.equal(weights, unlimited)


@distributed(world_size=2)
def test_a_gather_ahead_yields_to_max_live_parameters() -> None:
    unit, root = routes_sizes()
    for room, ahead in ((2 * unit, True), (2 * unit - 1, False)):
        with subtest(f"{room} elements beside the root"):
            zero = Zero(ROUTES, stage=3, stage3_max_live_parameters=root + room)
            recorder = Recorder(zero.engine)
            for step in range(2):
                recorder.take()
                zero.backward(route_loss(zero.model, step))
            assert (
                recorder.take()[:4] == ["+root", "+a", "+b", "-a"] if ahead else ["+root", "+a", "-a", "+b"]
            )
            zero.close()


@distributed(world_size=2)
def test_a_unit_that_alone_exceeds_the_cap_is_gathered_and_named_once_in_the_log() -> None:
    unit, root = routes_sizes()
    with logged() as seen:
        compare(ROUTES, route_loss, stage=3, stage3_max_live_parameters=root + unit - 1)
        (line,) = [text for text in seen if "stage3_max_live_parameters =" in text and "config" not in text]
        assert (
            f"{root + unit - 1:,} elements is less" in line and f"units.a.float32#0 ({root + unit:,})" in line
        )
        seen.clear()
        compare(ROUTES, route_loss, stage=3, stage3_max_live_parameters=root + unit)
        compare(ROUTES, route_loss, stage=2, stage3_max_live_parameters=1)
        assert not [text for text in seen if "is less than what has to be whole" in text]


# -- stage3_prefetch_bucket_size --


@distributed(world_size=2)
def test_a_larger_prefetch_bucket_gathers_as_many_units_ahead_as_it_has_room_for() -> None:
    unit, _ = routes_sizes()
    orders = {
        0: ["+root", "+a", "-a", "+b", "-b", "+c", "-c"],
        unit - 1: ["+root", "+a", "-a", "+b", "-b", "+c", "-c"],
        unit: ["+root", "+a", "+b", "-a", "+c", "-b", "-c"],
        2 * unit - 1: ["+root", "+a", "+b", "-a", "+c", "-b", "-c"],
        2 * unit: ["+root", "+a", "+b", "+c", "-a", "-b", "-c"],
    }
    for prefetch, forward in orders.items():
        with subtest(f"{prefetch} elements ahead, {unit} in a unit"):
            zero = Zero(ROUTES, stage=3, stage3_prefetch_bucket_size=prefetch)
            recorder = Recorder(zero.engine)
            for step in range(3):
                recorder.take()
                zero.backward(route_loss(zero.model, step))
            # The root is on its way ahead of use too, if there is room: the forward begins with it anyway.
            assert recorder.take()[:7] == forward
            zero.close()


@distributed(world_size=2)
def test_by_default_all_buckets_of_the_next_unit_are_gathered_ahead_and_none_beyond() -> None:
    zero = Zero(ROUTES, stage=3, reduce_bucket_size=15 * 15)  # weights and biases apart
    recorder = Recorder(zero.engine)
    for step in range(3):
        recorder.take()
        zero.backward(route_loss(zero.model, step))
    forward = ["+root", "+a", "+a", "+b", "+b", "-a", "-a", "+c", "+c", "-b", "-b", "-c", "-c"]
    backward = ["+c", "+c", "+b", "+b", "-c", "-c", "+a", "+a", "-b", "-b", "-a", "-a", "-root"]
    assert recorder.take() == forward + backward
    zero.close()


# -- stage3_max_reuse_distance --


@distributed(world_size=2)
def test_a_unit_stays_whole_if_its_next_use_is_within_the_reuse_distance() -> None:
    unit, root = routes_sizes()
    # Between the two uses of unit b two others run: c forward and c backward.
    orders = {
        1: (["+root", "+a", "-a", "+b", "-b", "+c"], ["+b", "+a"]),
        2 * unit: (["+root", "+a", "-a", "+b", "-b", "+c"], ["+b", "+a"]),
        2 * unit + 1: (["+root", "+a", "-a", "+b", "+c"], ["+a"]),
        4 * unit + 1: (["+root", "+a", "+b", "+c"], []),
    }
    for reuse, (forward, gathered_again) in orders.items():
        with subtest(f"{reuse} elements, {unit} in a unit"):
            zero = Zero(ROUTES, stage=3, stage3_max_reuse_distance=reuse, stage3_prefetch_bucket_size=0)
            recorder = Recorder(zero.engine)
            for step in range(3):
                recorder.take()
                zero.engine.ledger.reset()
                loss = route_loss(zero.model, step)
                events = recorder.take()
                zero.backward(loss)
                assert_nothing_whole(zero.engine)
            assert events == forward
            assert [event for event in recorder.take() if event[0] == "+"] == gathered_again
            num_gathered = root + unit * (3 + len(gathered_again))
            sent = zero.engine.ledger.comm["all_gather"]["bytes_sent"]
            assert sent == num_gathered * 4 * (world_size() - 1) // world_size()
            zero.close()


@distributed(world_size=2)
def test_without_a_reuse_distance_every_use_is_a_gather() -> None:
    _, _, gathered = train_stack()
    assert gathered == 2 * DEPTH * UNIT_NUMEL * 4 // 2
    peaks, _, gathered = train_stack(stage3_max_reuse_distance=ENDLESS)
    assert gathered == DEPTH * UNIT_NUMEL * 4 // 2, "from the second step on each is gathered once"
    assert peaks.backward == DEPTH * UNIT_NUMEL, "the memory of stage 2 is what it costs"


MIXED = [
    # max live, prefetch, reuse, bucket size
    (0, ENDLESS, ENDLESS, ENDLESS),
    (700, 500, 600, ENDLESS),
    (ENDLESS, ENDLESS, ENDLESS, 100),
    (ENDLESS, 0, 600, ENDLESS),
]


@distributed(world_size=2, timeout=120)
def test_changing_routes_and_evaluations_give_the_bits_of_naive_data_parallelism() -> None:
    for max_live, prefetch, reuse, size in MIXED:
        with subtest(f"max live {max_live}, prefetch {prefetch}, reuse {reuse}, buckets of {size}"):
            train_on_changing_routes(
                stage3_max_live_parameters=max_live,
                stage3_prefetch_bucket_size=prefetch,
                stage3_max_reuse_distance=reuse,
                reduce_bucket_size=size,
            )


@pytest.mark.slow
@distributed(world_size=[2, 3], timeout=120)
@grid(max_live=(0, 700, ENDLESS), prefetch=(0, 500, ENDLESS), reuse=(0, 600, ENDLESS), size=(100, ENDLESS))
def test_changing_routes_give_those_bits_in_every_combination(
    max_live: int, prefetch: int, reuse: int, size: int
) -> None:
    train_on_changing_routes(
        stage3_max_live_parameters=max_live,
        stage3_prefetch_bucket_size=prefetch,
        stage3_max_reuse_distance=reuse,
        reduce_bucket_size=size,
    )


def train_on_changing_routes(**settings: Any) -> None:
    routes = ["abc", "abc", "aab", "aab", "abc", "ca", "abc", "abc"]
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=3, **settings)
    for step, route in enumerate(routes):
        for way in (naive, zero):
            if step % 3 == 2:
                with torch.no_grad():
                    way.model(inputs(step), "cab")
            if step == 4:
                route_loss(way.model, step)  # a forward without a backward
            way.backward(route_loss(way.model, step, route))
            way.step()
        assert_nothing_whole(zero.engine)
    weights = zero.weights()
    for name, wanted in naive.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted), name
    zero.close()


# -- over many steps --


def births(tracker: StorageTracker, of_bytes: int) -> list[tuple[int, int]]:
    """Return a list to which every storage of so many bytes or more is added when it comes to life."""
    found: list[tuple[int, int]] = []  # serial number, bytes
    before = tracker.alive()

    def look(alive: Alive) -> None:
        nonlocal before
        found.extend((serial, n) for serial, n in alive.items() if serial not in before and n >= of_bytes)
        before = alive

    tracker.listen(look)
    return found


@distributed(world_size=2)
def test_gathers_take_the_same_memory_in_every_step_whatever_the_batch() -> None:
    """Memory of changing sizes would break an allocator's blocks up, until nothing fits any more.

    Activations here are smaller than a shard; what is as large or larger is the same in every step.
    """
    tracker = StorageTracker()
    with tracker:
        zero = Zero(Recipe(build=lambda _: Stack()), stage=3)
        shard_bytes = UNIT_NUMEL * 4 // world_size()
        flats = {tracker.add([bucket.flat])[0]: 2 * shard_bytes for bucket in zero.engine.buckets}
        found = births(tracker, shard_bytes)
        steps = []
        for step in range(6):
            found.clear()
            zero.backward(zero.model(torch.ones(1 + step, WIDTH, requires_grad=True)).square().mean())
            zero.step()
            gathered = [storage for storage in found if storage[0] in flats]
            assert len(gathered) == 2 * DEPTH and set(gathered) == set(flats.items())
            alive = Counter(nbytes for nbytes in tracker.alive().values() if nbytes >= shard_bytes)
            steps.append((Counter(nbytes for _, nbytes in found), alive))
    assert all(step == steps[2] for step in steps[2:]), steps
    zero.close()
