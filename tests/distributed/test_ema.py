"""An exponential moving average of the weights on shards, at every stage.

Oracles: torch's `AveragedModel` with `get_ema_avg_fn` in one process, fed with the whole masters after each
step, bit for bit (the same roundings element by element, wherever a shard begins); and one process that
trains on the batches of all ranks, to 1e-6 of a tensor's norm, since gradients are added in another order.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import zero_strategy as zs
from tests.distributed.state_support import (
    adamw,
    assert_same,
    build,
    engine_of,
    global_batches,
    sharded,
    train,
)
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.models import loss_of
from tests.reference import grid, relative_difference

DECAY = 0.9
LATE = "blocks.0.up.weight"  # a parameter that shares a bucket with others and is tied to none
BF16 = {"bf16": {"enabled": True}}


def averages_of_one_process(num_steps: int) -> dict[str, Tensor]:
    """Train on whole batches and average as torch does."""
    model = build()
    optimizer = adamw(model)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(DECAY))
    generator = torch.Generator().manual_seed(7)
    for _ in range(num_steps):
        tokens, targets = torch.randint(0, 11, (2, 12, 5), generator=generator)
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return dict(average.module.state_dict())


def train_and_average(
    engine: zs.ZeroEngine, optimizer: Any, ema: zs.ShardedEMA, num_steps: int, first: int = 0
) -> list[Any]:
    """Train, update after each step, and return the whole masters after each step (rank 0's)."""
    masters = []
    for step in range(first, first + num_steps):
        train(engine.model, optimizer, 1, first=step)
        before = copy.deepcopy(engine.ledger.comm)
        ema.update()
        assert engine.ledger.comm == before, "an update talked to other ranks"
        masters.append(engine.full_state_dict(dtype=torch.float32))
    return masters


def averaged(masters: list[dict[str, Tensor]], trainable: set[str]) -> dict[str, Tensor]:
    """Average whole weights with torch's function; what is not trained is its last value."""
    average_of = get_ema_avg_fn(DECAY)
    result = dict(masters[-1])
    for name in trainable:
        result[name] = masters[0][name]
        for weights in masters[1:]:
            result[name] = average_of(result[name], weights[name], 0)
    return result


def names_trained(model: nn.Module) -> set[str]:
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if param.requires_grad}


@distributed(world_size=3)
@grid(stage=[0, 1, 2, 3], settings=[{}, BF16])
def test_average_equals_torchs_in_every_bit_without_communication(
    stage: int, settings: dict[str, Any]
) -> None:
    engine, optimizer = engine_of({"stage": stage, "reduce_bucket_size": 300, **settings})
    trained = names_trained(engine.model)
    ema = zs.ShardedEMA(engine, decay=DECAY)
    masters = train_and_average(engine, optimizer, ema, 5)
    found = ema.full_state_dict(dtype=torch.float32)
    rounded = ema.full_state_dict()
    if rank() == 0:
        wanted = averaged(masters, trained)
        assert list(found) == list(wanted) and len(trained) > 10
        for name, value in wanted.items():
            assert_same(found[name], value)
            if name in trained:
                assert_same(rounded[name], value.to(rounded[name].dtype))
        if not settings:
            for name, value in averages_of_one_process(5).items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    assert relative_difference(found[name], value) <= 1e-6, name
    else:
        assert found == rounded == {}
    engine.close()


@distributed(world_size=2)
@grid(stage=[0, 1, 2, 3], settings=[{}, BF16])
def test_swapping_shows_the_average_and_gives_every_bit_back(stage: int, settings: dict[str, Any]) -> None:
    engine, optimizer = engine_of({"stage": stage, "reduce_bucket_size": 300, **settings})
    ema = zs.ShardedEMA(engine, decay=DECAY)
    tokens, _ = next(global_batches(1))
    with ema.swapped():  # there is none yet
        untrained = evaluate(engine, tokens)
    assert torch.equal(untrained, evaluate(engine, tokens))
    train_and_average(engine, optimizer, ema, 3)
    average, own = ema.full_state_dict(), evaluate(engine, tokens)
    weights, masters = weights_of(engine), weights_of(engine, torch.float32)
    unrounded = ema.state_dict()
    with ema.swapped():
        seen = evaluate(engine, tokens)
        with engine.unsharded_params():
            if rank() == 0:
                assert_same(
                    {name: p.detach().clone() for name, p in engine.model.named_parameters()},
                    {name: average[name] for name, _ in engine.model.named_parameters()},
                )
    assert not torch.equal(seen, own)
    assert torch.equal(evaluate(engine, tokens), own)
    assert_same(weights_of(engine), weights)
    assert_same(weights_of(engine, torch.float32), masters)
    assert_same(ema.state_dict(), unrounded)
    with torch.inference_mode(), ema.swapped():
        assert torch.equal(evaluate(engine, tokens), seen)
    train(engine.model, optimizer, 1, first=3)  # what inference mode touched still trains
    engine.close()


@distributed(world_size=2)
@grid(stage=[0, 1, 2, 3], settings=[{}, BF16])
def test_what_is_unfrozen_late_begins_at_its_frozen_values(stage: int, settings: dict[str, Any]) -> None:
    """Until then it is its own average; its bucket is exchanged for another, those of the rest are not."""
    model = build()
    late = model.get_parameter(LATE).requires_grad_(False)
    engine = sharded(model, stage=stage, reduce_bucket_size=300, **settings)
    optimizer = engine.shard_optimizer(adamw(model))
    ema = zs.ShardedEMA(engine, decay=DECAY)
    masters = train_and_average(engine, optimizer, ema, 2)
    late.requires_grad_(True)
    optimizer.add_param_group({"params": [late]})
    unfrozen = ema.full_state_dict(torch.float32)
    if rank() == 0:
        assert_same(unfrozen, averaged(masters, names_trained(model) - {LATE}))
    masters += train_and_average(engine, optimizer, ema, 2, first=2)
    found = ema.full_state_dict(dtype=torch.float32)
    if rank() == 0:
        wanted = averaged(masters, names_trained(model))
        wanted[LATE] = averaged(masters[1:], {LATE})[LATE]
        assert not torch.equal(masters[-1][LATE], masters[0][LATE])
        assert_same(found, wanted)
    weights = weights_of(engine)
    with ema.swapped():
        pass
    assert_same(weights_of(engine), weights)
    engine.close()


def weights_of(engine: zs.ZeroEngine, dtype: torch.dtype | None = None) -> dict[str, Any]:
    return engine.full_state_dict(dtype, trainable_only=True)


def evaluate(engine: zs.ZeroEngine, tokens: Tensor) -> Tensor:
    engine.model.eval()
    with torch.no_grad():
        logits: Tensor = engine.model(tokens)
    engine.model.train()
    return logits


def save_some(folder: Path) -> None:
    for stage in (0, 1, 3):
        engine, optimizer = engine_of({"stage": stage, "reduce_bucket_size": 300})
        ema = zs.ShardedEMA(engine, decay=DECAY)
        train_and_average(engine, optimizer, ema, 4)
        engine.save_checkpoint(folder / str(stage))
        whole = ema.state_dict()
        if rank() == 0:
            torch.save(whole, folder / f"{stage}.pt")
        engine.close()


def load_some(folder: Path) -> None:
    for saved, stage in ((0, 3), (1, 0), (3, 2)):
        with subtest(f"saved at stage {saved}, loaded at stage {stage}"):
            engine, optimizer = engine_of({"stage": stage, "reduce_bucket_size": 1_000}, seed=5)
            ema, other = (zs.ShardedEMA(engine, decay=decay) for decay in (DECAY, 0.5))
            train_and_average(engine, optimizer, ema, 1)  # what loading must replace
            engine.load_checkpoint(folder / str(saved))
            wanted = torch.load(folder / f"{saved}.pt")
            assert ema.num_updates == 4 and other.num_updates == 0
            found = ema.state_dict()
            assert_same(found["weights"], wanted["weights"] if rank() == 0 else {})
            ema.update()
            ema.load_state_dict(wanted if rank() == 0 else {})
            assert ema.num_updates == 4
            assert_same(ema.state_dict()["weights"], found["weights"])
            engine.close()
    with subtest("no average in the checkpoint"):
        engine, optimizer = engine_of({"stage": 2})
        engine.save_checkpoint(folder / "without")
        ema = zs.ShardedEMA(engine)
        train_and_average(engine, optimizer, ema, 1)
        engine.load_checkpoint(folder / "without")
        assert ema.num_updates == 0 and engine.ledger.memory["averages"] == 0
        engine.close()


def test_an_average_saved_at_3_ranks_loads_at_2_and_at_other_stages(tmp_path: Path) -> None:
    run_ranks(save_some, 3, {"folder": tmp_path})
    run_ranks(load_some, 2, {"folder": tmp_path})


@distributed(world_size=2)
@grid(stage=[0, 1, 2, 3], settings=[{}, BF16])
def test_the_ledger_counts_four_bytes_for_each_averaged_element_of_the_shard(
    stage: int, settings: dict[str, Any]
) -> None:
    engine, optimizer = engine_of({"stage": stage, "reduce_bucket_size": 300, **settings})
    ema = zs.ShardedEMA(engine, decay=DECAY)
    before = engine.ledger.memory
    assert before["averages"] == 0
    train_and_average(engine, optimizer, ema, 2)
    trained = [bucket for bucket in engine.buckets if bucket.trainable]
    held = engine.ledger.memory
    assert held["averages"] == 4 * sum(bucket.owned_numel for bucket in trained) > 0
    with ema.swapped():  # 16-bit shards are kept aside
        kept = 2 * sum(bucket.owned_numel for bucket in trained) if settings else 0
        assert engine.ledger.memory["averages"] == held["averages"] + kept
    assert engine.ledger.memory["averages"] == held["averages"]
    train(engine.model, optimizer, 2)  # the report shows what is held at the steps 1, 2, 4
    assert "averages of weights" in engine.ledger.report()
    engine.close()


@distributed(world_size=2)
@grid(stage=[1, 3])
def test_what_would_mix_up_weights_and_average_is_refused_on_all_ranks(stage: int) -> None:
    engine, optimizer = engine_of({"stage": stage})
    with expect_error(zs.ConfigError, ["decay=1.5"]):
        zs.ShardedEMA(engine, decay=1.5)
    with expect_error(zs.ConfigError, ["average of the weights", "decay=0.9"]):
        zs.ShardedEMA(engine, decay=DECAY if rank() == 0 else 0.5)
    ema, other = zs.ShardedEMA(engine, decay=DECAY), zs.ShardedEMA(engine, decay=0.5)
    with expect_error(zs.ShardingError, "never been updated"):
        ema.swap_in()
    train_and_average(engine, optimizer, ema, 2)
    other.update()
    weights = engine.full_state_dict()
    with pytest.raises(KeyboardInterrupt), ema.swapped():
        raise KeyboardInterrupt
    for call in (
        optimizer.step,
        engine.full_state_dict,
        lambda: engine.save_checkpoint("never"),
        lambda: engine.load_checkpoint("never"),
        lambda: engine.load_full_state_dict(weights),
        other.swap_in,
        ema.update,
        ema.state_dict,
    ):
        with expect_error(zs.ShardingError, ["swap_out()"]):
            call()
    ema.swap_out()
    assert_same(engine.full_state_dict(), weights)
    with expect_error(zs.CheckpointError, ["'head.weight'", "shape"]):
        ema.load_state_dict({"num_updates": 1, "weights": {"head.weight": torch.zeros(2)}})
    with expect_error(zs.CheckpointError, ["'tail.weight'", "by name"]):
        ema.load_state_dict({"num_updates": 1, "weights": {"tail.weight": torch.zeros(2)}})
    no_averages: list[tuple[Any, str]] = [
        ([], "a list"),
        ({"weights": 7}, "its 'weights' is of type int"),
        ({"num_updates": "x"}, "its 'num_updates' is 'x'"),
        ({"num_updates": -1}, "its 'num_updates' is -1"),
    ]
    averages = ema.state_dict()
    for given, found in no_averages:
        texts = [f"[rank 0] This is no state of an average: {found}.", "'num_updates', a number", "on rank 0"]
        with expect_error(zs.CheckpointError, texts):
            ema.load_state_dict(given if rank() == 0 else {})
    assert_same(ema.state_dict(), averages)
    train(engine.model, optimizer, 1)
    engine.close()


@distributed(world_size=1)
def test_warmup_lets_the_decay_rise() -> None:
    engine, optimizer = engine_of({"stage": 3})
    ema = zs.ShardedEMA(engine, decay=0.3, warmup=True)
    masters = train_and_average(engine, optimizer, ema, 4)
    wanted = masters[0]["head.weight"]
    for decay, weights in zip((2 / 11, 3 / 12, 0.3), masters[1:], strict=True):
        wanted = wanted * decay + weights["head.weight"] * (1 - decay)
    assert_same(ema.full_state_dict()["head.weight"], wanted)
    engine.close()


@distributed(world_size=2)
@grid(settings=[{}, BF16])
def test_an_average_can_be_loaded_and_evaluated_without_an_optimizer(settings: dict[str, Any]) -> None:
    engine, optimizer = engine_of({"stage": 3, "reduce_bucket_size": 300, **settings})
    ema = zs.ShardedEMA(engine, decay=DECAY)
    train_and_average(engine, optimizer, ema, 2)
    state, tokens = ema.state_dict(), next(global_batches(1))[0]
    with ema.swapped():
        wanted = evaluate(engine, tokens)
    engine.close()
    other = sharded(build(seed=5), stage=3, **settings)
    loaded = zs.ShardedEMA(other)
    loaded.load_state_dict(state)
    other.load_full_state_dict(engine_buffers(engine), strict=False)
    with loaded.swapped():
        assert torch.equal(evaluate(other, tokens), wanted)
    other.close()


def engine_buffers(engine: zs.ZeroEngine) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in engine.model.named_buffers() if name != "scratch"}
