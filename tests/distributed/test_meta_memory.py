"""A model built on meta is never whole on a rank: not at construction, in the first step, or at a save.

Oracles: `StorageTracker`, which watches storages come and go and knows nothing of buckets, and the ledger,
which must say the same. Bounds are sums of whole buckets from the shapes (`Sizes`), with the slack of
test_memory.py. The large model is built at 64 ranks of torch's fake process group, of which one is real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.test_fake_world import World, fake_world
from tests.distributed.test_memory import (
    SLACK_BYTES,
    Chain,
    Sizes,
    Watch,
    check_step,
    config,
    settle,
)
from tests.harness import distributed, subtest, world_size
from tests.storage_tracker import Alive, StorageTracker
from zero_strategy.layout import BucketLayout


class Construction:
    """Looks at every operation of an engine's constructor: what is alive, and what the ledger says."""

    def __init__(self, model: nn.Module) -> None:
        self.engine = zs.ZeroEngine.__new__(zs.ZeroEngine)  # so that there is a ledger to look at
        self.watch = Watch(model)
        self.before: Alive = {}
        self.is_over = False
        self.most_unsharded = self.most_uncounted = 0
        self.watch.tracker.listen(self._look)

    def build(self, config: zs.ZeroConfig) -> list[Alive]:
        """Run the constructor, and return what was alive at each look."""
        with self.watch.tracker, self.watch.phase() as history:
            self.engine.__init__(self.watch.model, config)  # type: ignore[misc]
        self.is_over = True
        return history

    def _look(self, alive: Alive) -> None:
        if hasattr(self.engine, "buckets") and not self.is_over:
            held = self.engine.ledger.memory
            self.most_unsharded = max(self.most_unsharded, held["unsharded"])
            counted = sum(nbytes for kind, nbytes in held.items() if kind != "padding")
            # What came to life in this very operation has not been handed to its owner yet.
            settled = sum(nbytes for serial, nbytes in alive.items() if serial in self.before)
            self.most_uncounted = max(self.most_uncounted, settled - counted)
        self.before = alive


@distributed(world_size=[1, 2], timeout=120)
def test_the_root_and_one_unit_are_the_most_that_is_whole_while_a_meta_model_is_built(tmp_path: Path) -> None:
    # With two ranks gloo keeps the fp32 values that were sent a moment longer than anybody else.
    bf16 = world_size() == 1
    with torch.device("meta"):
        model = Chain()
    sizes, construction = Sizes(model, 2 if bf16 else 4), Construction(model)
    history = construction.build(config(3, bf16))
    watch, engine = construction.watch, construction.engine
    # Values are drawn in fp32 and rounded afterwards, into a buffer beside them.
    whole = (sizes.root + sizes.unit) * (2 if bf16 else 1)
    rounded = sizes.unit if bf16 else 0
    kept = sizes.shard + (2 * sizes.shard if bf16 else 0)
    most_whole, most_rest = watch.most(history)
    assert whole <= most_whole <= whole + rounded + SLACK_BYTES
    assert most_rest <= kept + rounded + SLACK_BYTES
    assert whole <= construction.most_unsharded <= whole + rounded, "the ledger says something else"
    allowed = SLACK_BYTES + (sizes.fp32_shard if bf16 else 0)  # masters on their way to their keeper
    assert construction.most_uncounted <= allowed, f"{construction.most_uncounted} bytes in no kind"
    settle(history, kept + SLACK_BYTES)
    assert watch.split(watch.tracker.alive())[0] <= SLACK_BYTES, "parameters are whole afterwards"

    with watch.tracker:
        optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
        for step in range(2):
            check_step(engine, optimizer, watch, sizes, gathers_ahead=step > 0)
        with watch.phase() as saving:
            engine.save_checkpoint(tmp_path)
            engine.load_checkpoint(tmp_path)
        most = max(sum(alive.values()) for alive in saving) - sum(saving[0].values())
        assert most <= 2 * sizes.unit + SLACK_BYTES, f"{most} bytes more in a save than before"
    engine.close()


@distributed(world_size=1, process_group=False)
def test_below_stage_3_a_meta_model_is_never_there_twice() -> None:
    for stage in (1, 2):
        for bf16 in (False, True):
            with subtest(f"stage {stage}, bf16={bf16}"):
                with torch.device("meta"):
                    model = Chain()
                sizes, construction = Sizes(model, 2 if bf16 else 4), Construction(model)
                history = construction.build(config(stage, bf16, reduce_bucket_size=33_000))
                most = max(sum(alive.values()) for alive in history)
                # Of a bucket that is being rounded: its fp32 values as well. Masters: 4 bytes, sharded.
                bound = sizes.whole + (2 * sizes.unit + 2 * sizes.shard if bf16 else 0)
                assert most <= bound + SLACK_BYTES, f"{most} bytes, {bound} allowed"
                assert most >= sizes.whole, "the tracker has seen nothing"
                construction.engine.close()


# -- 64 ranks, 100 million parameters ------------------------------------------------------------------------

LARGE_WIDTH, LARGE_DEPTH, NUM_RANKS = 1024, 12, 64


class Large(nn.Module):
    """101 million parameters in twelve equal units between an embedding and a head that are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, LARGE_WIDTH)
        self.units = nn.ModuleList(
            nn.Sequential(nn.Linear(LARGE_WIDTH, 4 * LARGE_WIDTH), nn.Linear(4 * LARGE_WIDTH, LARGE_WIDTH))
            for _ in range(LARGE_DEPTH)
        )
        self.head = nn.Linear(LARGE_WIDTH, 1000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for unit in self.units:
            x = x + unit(x)
        return self.head(x)


@distributed(world_size=1, process_group=False, timeout=120)
def test_a_rank_of_64_needs_its_shard_and_the_live_window_to_build_100_million_parameters() -> None:
    with fake_world(World(rank=5, size=NUM_RANKS, stage=3, dtype=torch.float32)):
        with torch.device("meta"):
            model = Large()
        num_params = sum(param.numel() for param in model.parameters())
        assert num_params > 100_000_000
        unit, root = padded_bytes(model.units[0]), padded_bytes(model.embed)
        settings: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        settings["reduce_bucket_size"] = 25_000_000  # one bucket a unit
        tracker = StorageTracker()
        with tracker:
            engine = zs.ZeroEngine(model, zs.ZeroConfig(**settings))
        shard = (LARGE_DEPTH * unit + root) // NUM_RANKS
        most = max(sum(alive.values()) for alive in tracker.history)
        # The tied head writes to a stand-in, and a chunk of a unit is compared; both less than a unit.
        assert root + unit <= most <= shard + root + unit + (1 << 20) + SLACK_BYTES
        assert most < 4 * num_params / 6, "more than a sixth of the model was there at once"
        held = engine.ledger.memory
        assert held["params"] == shard and held["unsharded"] == 0
        assert sum(tracker.alive().values()) <= shard + SLACK_BYTES


def padded_bytes(module: nn.Module) -> int:
    shapes = [(name, tuple(param.shape)) for name, param in module.named_parameters()]
    return BucketLayout.build(shapes, NUM_RANKS, 4).padded_numel * 4
