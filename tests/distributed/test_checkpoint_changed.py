"""Weights that are changed on their way into an engine: their masters, their memory, whose errors they are.

Oracle: the values before the save, masters included, bit for bit; what tensors are alive. Tolerance: none.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zero_strategy as zs
from tests.distributed.state_support import LAYOUTS, assert_same, engine_of, sharded, train, whole_state
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Mlp
from tests.storage_tracker import StorageTracker
from zero_strategy.checkpoint.full_weights import MorePreciseWeights
from zero_strategy.comm.together import agreed


@distributed(world_size=2)
def test_changed_weights_keep_their_masters_and_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    engine, optimizer = engine_of(LAYOUTS[4])
    train(engine.model, optimizer, 2)
    engine.save_checkpoint(tmp_path / "c")
    masters = engine.full_state_dict(dtype=torch.float32)
    train(engine.model, optimizer, 1, first=2)
    later = whole_state(engine)
    wrong = {"temperature": torch.zeros(3), "average": "x", "counting._extra_state": lambda: None}
    for name, value in wrong.items():
        with subtest(name), engine.open_checkpoint(tmp_path / "c") as opened:
            weights = opened.weights()
            weights[name] = value
            with expect_error(zs.CheckpointError, [name, "Nothing was loaded"]):
                opened.load_weights(weights)
            assert_same(whole_state(engine), later)
    with subtest("a look at a tied alias"), engine.open_checkpoint(tmp_path / "c") as opened:
        weights = opened.weights()
        assert weights["head.weight"].dtype == torch.bfloat16
        weights["head.weight"][0] = 3.0
        opened.load_weights(weights)
        found = engine.full_state_dict(dtype=torch.float32)
        if rank() == 0:
            masters["head.weight"][0] = 3.0
            assert_same(found, masters)


@distributed(world_size=2)
def test_masters_are_merged_with_weights_one_by_one_and_an_error_is_everybodys() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            model = Mlp(width=64, depth=16).to(torch.bfloat16)
            engine = sharded(model, stage=stage, reduce_bucket_size=10_000)
            engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            weights = engine.full_state_dict()
            masters = {name: value.float() * (1 + 2**-12) for name, value in weights.items()}
            tracker = StorageTracker()
            tracker.add(value for value in gc.get_objects() if isinstance(value, Tensor))
            before = sum(tracker.alive().values())
            with tracker:
                engine.load_full_state_dict(MorePreciseWeights(weights, masters.get))
            peak = max(sum(alive.values()) for alive in tracker.history) - before
            largest = 4 * max(param.numel() for param in model.parameters())
            # A merged one and what it is made of; what is sent, of which gloo lets go a little later.
            assert peak < 7 * largest, (peak, largest)
            assert 4 * sum(param.numel() for param in model.parameters()) > 14 * largest
            assert_same(engine.full_state_dict(dtype=torch.float32), masters)

            for num_good in (0, len(masters) + 2):  # also while weights are sent, after all were looked at
                looks: list[str] = []

                def broken(name: str, num_good: int = num_good, looks: list[str] = looks) -> Tensor | None:
                    looks.append(name)
                    if len(looks) > num_good:
                        raise ValueError(f"no {name}")
                    return None

                with expect_error(zs.CheckpointError, ["rank 0", "no layers."]):
                    engine.load_full_state_dict(MorePreciseWeights(weights, broken))


@distributed(world_size=2)
def test_an_agreed_error_keeps_its_cause_on_the_rank_that_had_it() -> None:
    engine, _ = engine_of(LAYOUTS[1])

    def work() -> None:
        if rank() == 0:
            try:
                int("x")
            except ValueError as error:
                raise zs.CheckpointError(what="No number.", why="w", fix="f") from error

    with pytest.raises(zs.CheckpointError, match="No number") as caught:
        agreed(engine.collectives, work)
    cause = caught.value.__cause__
    assert (isinstance(cause, zs.CheckpointError) and isinstance(cause.__cause__, ValueError)) == (
        rank() == 0
    )
