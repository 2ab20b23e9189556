"""Stages 0-3 give the numbers of data-parallel training, whatever the buckets, overlap or prefetch.

Oracles: torch's DDP at 2 ranks, tolerance 0, since both add the same two numbers in the same order (also
under `no_sync`, given `accumulate_whole_gradients` at stages 2-3). Where the order of additions differs,
1e-6 of a tensor's norm against DDP or against one process with the whole batch: at 3 and 4 ranks (a ring
adds in another order), with clipping (torch sums a norm per tensor, the engine per slice, in fp64), and
with a reduction per micro-batch. These train with lr=1e-3: AdamW amplifies rounding where a moment is near
zero, so that with 1e-2 DDP itself comes to differ from one process by 2e-6 in gradients after ten steps;
with 1e-3 both DDP and the engine stay within 5e-7. The stages equal one another in every bit at all of
these, and in bf16. World size 1 equals plain torch in every bit. All settings without recomputation are
compared with one another, at more ranks too, in test_hash_grid.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from tests.harness import distributed, subtest
from tests.models import Awkward, adamw
from tests.reference import (
    Plain,
    Recipe,
    Trace,
    assert_close,
    assert_same_bits,
    mean_over_ranks,
    train,
    train_ddp,
    train_whole_batch,
    train_zero,
)

Settings = dict[str, Any]
Trainer = Callable[[], Trace]
DEEP = Recipe(build=partial(Awkward, depth=3))  # 1,341 parameters: two buckets of 1,000 and more
RECIPES = {
    "one backward": DEEP,
    "one backward, recomputed": replace(DEEP, recompute="non-reentrant"),
    "no_sync": replace(DEEP, accumulation=2),
    "no_sync, recomputed": replace(DEEP, accumulation=2, recompute="non-reentrant"),
}
RECOMPUTED = [
    name for name, recipe in RECIPES.items() if recipe.recompute
]  # test_hash_grid.py has the others
LONG = {name: replace(recipe, num_steps=10) for name, recipe in RECIPES.items()}
CALM = {name: replace(recipe, optimizer=partial(adamw, lr=1e-3)) for name, recipe in LONG.items()}
# One of each stage, and every value of every setting next to every other at stage 3 once.
REDUCED: list[Settings] = [
    {"stage": 0, "reduce_bucket_size": 1_000},
    {"stage": 0, "reduce_bucket_size": 25_000_000, "overlap_comm": False},
    {"stage": 1, "reduce_bucket_size": 1_000, "overlap_comm": False},
    {"stage": 1, "reduce_bucket_size": 100},
    {"stage": 2, "reduce_bucket_size": 1_000},
    {"stage": 2, "reduce_bucket_size": 25_000_000, "overlap_comm": False},
    {"stage": 2, "reduce_bucket_size": 100},
    {"stage": 3, "reduce_bucket_size": 1_000, "stage3_prefetch_bucket_size": 0, "overlap_comm": False},
    {
        "stage": 3,
        "reduce_bucket_size": 25_000_000,
        "stage3_param_persistence_threshold": 50,
        "overlap_comm": False,
    },
    {
        "stage": 3,
        "reduce_bucket_size": 100,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 50,
    },
    {"stage": 3, "reduce_bucket_size": 25_000_000},
]
ONE_OF_EACH: list[Settings] = [
    {"stage": 0},
    {"stage": 1, "reduce_bucket_size": 100},
    {"stage": 2, "reduce_bucket_size": 1_000, "overlap_comm": False},
    {"stage": 3, "reduce_bucket_size": 100, "stage3_param_persistence_threshold": 50},
    {"stage": 3, "reduce_bucket_size": 25_000_000},
]
FULL: list[Settings] = [
    {
        "stage": stage,
        "reduce_bucket_size": size,
        "overlap_comm": overlap,
        "stage3_prefetch_bucket_size": prefetch,
        "stage3_param_persistence_threshold": threshold,
    }
    for stage, size, overlap, prefetch, threshold in itertools.product(
        (0, 1, 2, 3), (100, 1_000, 25_000_000), (True, False), (0, 50_000_000), (0, 50)
    )
    if stage == 3 or (prefetch == 0 and threshold == 0)
]


def cell(name: str, settings: Settings) -> str:
    """The name of a cell of a grid."""
    return ", ".join([name, *(f"{key}={value}" for key, value in settings.items())])


def each(name: str, recipe: Recipe, grid: Iterable[Settings], **common: Any) -> Iterator[tuple[str, Trainer]]:
    """Yield the name and the training of every cell of a grid."""
    for settings in grid:
        everything = {"accumulate_whole_gradients": True} | settings | common
        yield cell(name, settings), partial(train_zero, recipe, **everything)


# -- two ranks: DDP's very bits ------------------------------------------------------------------------------


@distributed(world_size=2)
@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_equals_ddp_in_every_bit(name: str) -> None:
    reference = train_ddp(RECIPES[name])
    for label, run in each(name, RECIPES[name], REDUCED if RECIPES[name].recompute is None else ONE_OF_EACH):
        with subtest(label):
            assert_same_bits(run(), reference)


@pytest.mark.slow
@distributed(world_size=2, timeout=600)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_every_stage_and_setting_equals_ddp_in_every_bit(name: str) -> None:
    reference = train_ddp(LONG[name])
    for label, run in each(name, LONG[name], FULL):
        with subtest(label):
            assert_same_bits(run(), reference)


# -- to rounding, and the stages among themselves in every bit -----------------------------------------------


@distributed(world_size=3)
def test_three_ranks_equal_the_whole_batch_in_one_process() -> None:
    compare_with_one_process("one backward", CALM["one backward"], ONE_OF_EACH[3:4])
    compare_with_one_process("no_sync, recomputed", CALM["no_sync, recomputed"], ONE_OF_EACH[4:])


@pytest.mark.slow
@distributed(world_size=[3, 4], timeout=1200)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_every_setting_equals_every_other_and_the_whole_batch(name: str) -> None:
    compare_with_one_process(name, CALM[name], FULL)


def compare_with_one_process(name: str, recipe: Recipe, grid: list[Settings]) -> None:
    """Hold the first cell against the whole batch in one process, the others against the first."""
    reference = train_whole_batch(recipe)
    first: Trace | None = None
    for label, run in each(name, recipe, grid):
        with subtest(label):
            trace = run()
            if first is None:
                first = trace
                assert_close(mean_over_ranks(trace), reference)
            assert_same_bits(trace, first)


@distributed(world_size=2)
def test_clipping_by_norm_equals_ddp_to_rounding() -> None:
    recipe = replace(CALM["one backward"], max_norm=0.3)
    compare_with_ddp("clipped", recipe, ONE_OF_EACH)
    with subtest("the bound bites"):
        assert all(norm > 0.3 for norm in train_ddp(recipe).norms)


@distributed(world_size=2)
def test_clipping_by_value_equals_ddp_in_every_bit() -> None:
    recipe = replace(DEEP, max_value=1e-3, num_steps=4)
    reference = train_ddp(recipe)
    for label, run in each("clipped by value", recipe, ONE_OF_EACH):
        with subtest(label):
            assert_same_bits(run(), reference)


@pytest.mark.slow
@distributed(world_size=2)
def test_a_reduction_per_micro_batch_equals_ddp_to_rounding() -> None:
    compare_with_ddp("reduced each", replace(CALM["no_sync"], reduces_each=True), ONE_OF_EACH)


@pytest.mark.slow
@distributed(world_size=2)
def test_sharded_accumulation_under_no_sync_equals_ddp_to_rounding() -> None:
    recipe = CALM["no_sync"]
    reference = train_ddp(recipe)
    sharded = [settings for settings in ONE_OF_EACH if settings["stage"] >= 2]
    first: Trace | None = None
    for settings in sharded:
        with subtest(cell("no_sync", settings)):
            trace = train_zero(recipe, **settings)
            first = first or trace
            assert_close(trace, reference)
            assert_same_bits(trace, first)


def compare_with_ddp(name: str, recipe: Recipe, grid: list[Settings]) -> None:
    """Hold the first cell against DDP, the others against the first."""
    reference = train_ddp(recipe)
    first: Trace | None = None
    for label, run in each(name, recipe, grid):
        with subtest(label):
            trace = run()
            if first is None:
                first = trace
                assert_close(trace, reference)
            assert_same_bits(trace, first)


BF16_RECIPES = {
    "no_sync": replace(DEEP, accumulation=3, num_steps=5),
    "reduced each": replace(DEEP, accumulation=3, num_steps=5, reduces_each=True),
}


@distributed(world_size=2)
def test_stages_equal_one_another_in_bf16_with_gradients_accumulated_in_fp32() -> None:
    for name, recipe in BF16_RECIPES.items():
        first: Trace | None = None
        for label, run in each(name, recipe, ONE_OF_EACH, bf16=True, data_types={"grad_accum_dtype": "fp32"}):
            with subtest(label):
                trace = run()
                first = first or trace
                assert_same_bits(trace, first)


@distributed(world_size=3)
def test_stages_equal_one_another_in_bf16_with_clipping_at_three_ranks() -> None:
    first: Trace | None = None
    for label, run in each("bf16, clipped", replace(DEEP, max_norm=0.3, num_steps=5), ONE_OF_EACH, bf16=True):
        with subtest(label):
            trace = run()
            first = first or trace
            assert_same_bits(trace, first)


# -- one rank ------------------------------------------------------------------------------------------------


@distributed(world_size=1)
def test_one_rank_equals_plain_torch_in_every_bit() -> None:
    compare_with_plain()


@distributed(world_size=1, process_group=False)
def test_no_process_group_equals_plain_torch_in_every_bit() -> None:
    compare_with_plain()


def compare_with_plain() -> None:
    """Hold every stage against plain torch."""
    for name, recipe in RECIPES.items():
        reference = train(Plain(recipe), recipe)
        for settings in ONE_OF_EACH:
            with subtest(cell(name, settings)):
                trace = train_zero(recipe, accumulate_whole_gradients=True, **settings)
                assert_same_bits(trace, reference)
