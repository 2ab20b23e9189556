"""Whole state to and from plain torch: `full_state_dict`, `load_full_state_dict`, optimizer state dicts.

Oracle: plain torch on the same model, DDP at two ranks where something was trained (its additions have the
same order there). Tolerance: none; every comparison is of bits.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.distributed.state_support import (
    Everything,
    adamw,
    assert_same,
    build,
    global_batches,
    sharded,
    train,
)
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import loss_of

STAGES = (0, 1, 2, 3)


def trained_by_ddp(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build()
    optimizer = adamw(model)
    train(DistributedDataParallel(model, find_unused_parameters=True), optimizer, steps)
    return model, optimizer


def trained_by_engine(steps: int = 3, **settings: Any) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
    engine = sharded(build(), **settings)
    optimizer = engine.shard_optimizer(adamw(engine.model))
    train(engine.model, optimizer, steps)
    return engine, optimizer


def without_empty(model: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leave out the state of the empty parameter, which has no elements anywhere."""
    numels = [param.numel() for group in adamw(model).param_groups for param in group["params"]]
    return {key: value for key, value in state_dict["state"].items() if numels[key]}


# -- weights -------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_full_state_dict_is_the_state_dict_of_the_ddp_twin() -> None:
    model, _ = trained_by_ddp()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine, _ = trained_by_engine(stage=stage, reduce_bucket_size=300)
            state = engine.full_state_dict()
            if rank() == 0:
                assert_same(state, dict(model.state_dict()))
                for name in ("head", "right"):
                    alias = "embed.weight" if name == "head" else "left.weight"
                    assert state[f"{name}.weight"].data_ptr() == state[alias].data_ptr()
                assert "scratch" not in state
            else:
                assert state == {}
            assert engine.model.counting.num_calls == 3
            engine.close()


@distributed(world_size=[1, 3])
def test_full_state_dict_before_training_is_what_was_given() -> None:
    expected = dict(build().state_dict())
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine = sharded(build(), stage=stage, reduce_bucket_size=100)
            state = engine.full_state_dict()
            if rank() == 0:
                assert_same(state, expected)
            engine.close()


@distributed(world_size=2)
def test_full_state_dict_is_a_copy_that_training_leaves_alone() -> None:
    for stage in (0, 2, 3):
        with subtest(f"stage {stage}"):
            engine, optimizer = trained_by_engine(steps=1, stage=stage)
            state = engine.full_state_dict()
            before = copy.deepcopy(state)
            train(engine.model, optimizer, 1)
            assert_same(state, before)
            engine.close()


@distributed(world_size=2)
def test_full_state_dict_casts_floats_and_leaves_out_what_is_not_trained() -> None:
    engine = sharded(build(), stage=3)
    whole = engine.full_state_dict()
    half = engine.full_state_dict(dtype=torch.bfloat16)
    trainable = engine.full_state_dict(trainable_only=True)
    if rank() == 0:
        assert list(half) == list(whole)
        params = {name for name, _ in engine.model.named_parameters(remove_duplicate=False)}
        for name, value in whole.items():
            if isinstance(value, Tensor):
                dtype = torch.bfloat16 if name in params else value.dtype
                assert_same(half[name], value.to(dtype), name)
        expected = {n for n, p in engine.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        assert set(trainable) == expected
        assert {"head.weight", "embed.weight"} <= expected
        assert not any("scale" in name for name in expected)
    else:
        assert half == {} and trainable == {}


@distributed(world_size=2)
def test_full_state_dict_shows_what_was_written_once_it_is_written_back() -> None:
    engine = sharded(build(), stage=3)
    before = engine.full_state_dict()
    with engine.unsharded_params(writeback=True):
        with torch.no_grad():
            engine.model.shared.bias.fill_(3.0)
        inside = engine.full_state_dict()
    after = engine.full_state_dict()
    if rank() == 0:
        assert_same(inside, before)
        assert_same(after, {**before, "shared.bias": torch.full((15,), 3.0)})


@distributed(world_size=[2, 3])
def test_load_full_state_dict_from_rank_0_is_what_comes_out_again() -> None:
    other = build(seed=5)
    other.num_batches.fill_(9)
    other.counting.num_calls = 4
    given = dict(other.state_dict()) if rank() == 0 else {}
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine, optimizer = trained_by_engine(steps=2, stage=stage, reduce_bucket_size=300)
            result = engine.load_full_state_dict(given)
            assert result.missing_keys == [] and result.unexpected_keys == []
            state = engine.full_state_dict()
            if rank() == 0:
                assert_same(state, given)
            assert int(engine.model.num_batches) == 9, "buffers are loaded on every rank"
            assert engine.model.counting.num_calls == 4, "extra state is loaded on every rank"
            train(engine.model, optimizer, 1)
            engine.close()


@distributed(world_size=2)
def test_training_goes_on_from_loaded_weights_as_plain_torch_would() -> None:
    other = build(seed=5)
    model = build()
    model.load_state_dict(other.state_dict())
    train(DistributedDataParallel(model, find_unused_parameters=True), adamw(model), 2)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine = sharded(build(), stage=stage)
            optimizer = engine.shard_optimizer(adamw(engine.model))
            engine.load_full_state_dict(other.state_dict() if rank() == 0 else {})
            train(engine.model, optimizer, 2)
            state = engine.full_state_dict()
            if rank() == 0:
                assert_same(state, dict(model.state_dict()))
            engine.close()


@distributed(world_size=2)
def test_loading_into_bf16_keeps_the_fp32_values_in_the_masters() -> None:
    """The step after a load starts from fp32 values, loaded before or after the optimizer was sharded."""
    other = build(seed=5)
    reference = sharded(build(seed=5), stage=1, bf16={"enabled": True})
    reference_optimizer = reference.shard_optimizer(adamw(reference.model))
    train(reference.model, reference_optimizer, 2)
    expected = reference.full_state_dict()
    for stage in STAGES:
        for loads_first in (True, False):
            with subtest(f"stage {stage}, loads first: {loads_first}"):
                engine = sharded(build(), stage=stage, bf16={"enabled": True})
                if not loads_first:
                    optimizer = engine.shard_optimizer(adamw(engine.model))
                engine.load_full_state_dict(other.state_dict())
                if loads_first:
                    optimizer = engine.shard_optimizer(adamw(engine.model))
                train(engine.model, optimizer, 2)
                state = engine.full_state_dict()
                if rank() == 0:
                    assert_same(state, expected)
                engine.close()


@distributed(world_size=2)
def test_names_that_do_not_match_are_returned_or_refused_on_all_ranks() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            engine = sharded(build(), stage=stage)
            given = dict(build(seed=5).state_dict())
            del given["shared.bias"], given["average"]
            given["stranger"] = torch.ones(2)
            given = given if rank() == 0 else {}
            before = engine.full_state_dict()
            texts = ["shared.bias", "average", "stranger", "strict=False", "Nothing was loaded"]
            with expect_error(zs.CheckpointError, texts):
                engine.load_full_state_dict(given)
            assert_same(engine.full_state_dict(), before)
            result = engine.load_full_state_dict(given, strict=False)
            assert sorted(result.missing_keys) == ["average", "shared.bias"]
            assert result.unexpected_keys == ["stranger"]
            engine.close()


@distributed(world_size=2)
def test_what_cannot_be_loaded_is_refused_on_all_ranks_and_changes_nothing() -> None:
    engine = sharded(build(), stage=3)
    before = engine.full_state_dict()
    good = dict(build(seed=5).state_dict())
    cases: list[tuple[Any, list[str]]] = [
        (
            {**good, "shared.bias": torch.ones(7)},
            ["'shared.bias' has shape (7,)", "(15,)", "Nothing was loaded"],
        ),
        ({**good, "average": torch.ones(3)}, ["'average' has shape (3,)"]),
        ({**good, "shared.bias": "x"}, ["'shared.bias' is a str, not a tensor"]),
        (["no dict"], ["a list instead of a state dict"]),
        ({**good, ("odd",): torch.ones(3)}, ["the key ('odd',) instead of a state dict"]),
    ]
    for given, texts in cases:
        with subtest(texts[0]), expect_error(zs.CheckpointError, ["[rank 0]", *texts]):
            engine.load_full_state_dict(given if rank() == 0 else {})
    assert_same(engine.full_state_dict(), before)


@distributed(world_size=2)
def test_model_load_state_dict_reaches_the_masters_below_stage_3() -> None:
    given = build(seed=5).state_dict()
    for settings in ({}, {"bf16": {"enabled": True}}):
        for stage in (0, 1, 2):
            with subtest(f"stage {stage} {settings}"):
                engine, optimizer = trained_by_engine(steps=1, stage=stage, **settings)
                engine.model.load_state_dict(given)
                for group in optimizer.param_groups:
                    group["lr"] = (
                        0.0  # a step then writes the masters into the parameters and changes nothing
                    )
                    group["weight_decay"] = 0.0
                train(engine.model, optimizer, 1)
                state = engine.full_state_dict()
                if rank() == 0:
                    names = [name for name, _ in engine.model.named_parameters(remove_duplicate=False)]
                    dtype = torch.bfloat16 if settings else torch.float32
                    assert_same({n: state[n] for n in names}, {n: given[n].to(dtype) for n in names})
                engine.close()


@distributed(world_size=2)
def test_model_state_dict_and_load_state_dict_at_stage_3_say_what_to_call() -> None:
    engine = sharded(build(), stage=3)
    before = engine.full_state_dict()
    with expect_error(zs.ShardingError, ["parameter 'unused'", "full_state_dict()", "save_checkpoint"]):
        engine.model.state_dict()
    with expect_error(RuntimeError, ["embed.weight", "engine.load_full_state_dict(sd)"]):
        engine.model.load_state_dict(build(seed=5).state_dict())
    after = engine.full_state_dict()
    names = [name for name, _ in engine.model.named_parameters()] if rank() == 0 else []
    assert_same({n: after[n] for n in names}, {n: before[n] for n in names})
    with engine.unsharded_params():
        assert list(engine.model.state_dict()) == list(build().state_dict())


# -- optimizer state -----------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_optimizer_state_dict_is_that_of_the_ddp_twin() -> None:
    model, plain = trained_by_ddp()
    expected = plain.state_dict()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine, optimizer = trained_by_engine(stage=stage, reduce_bucket_size=300)
            state = optimizer.state_dict()
            assert_same(state["param_groups"], expected["param_groups"])
            if rank() == 0:
                assert_same(dict(sorted(state["state"].items())), without_empty(model, expected))
            else:
                assert state["state"] == {}
            engine.close()


@distributed(world_size=2)
def test_optimizer_state_moves_to_plain_torch_and_back_and_training_goes_on() -> None:
    model, plain = trained_by_ddp()
    weights, plain_state = copy.deepcopy(model.state_dict()), copy.deepcopy(plain.state_dict())
    train(DistributedDataParallel(model, find_unused_parameters=True), plain, 2, first=3)
    for stage in STAGES:
        with subtest(f"from plain torch, stage {stage}"):
            engine = sharded(build(seed=5), stage=stage, reduce_bucket_size=300)
            optimizer = engine.shard_optimizer(adamw(engine.model))
            engine.load_full_state_dict(weights)
            optimizer.load_state_dict(plain_state if rank() == 0 else {})
            train(engine.model, optimizer, 2, first=3)
            state, optimizer_state = engine.full_state_dict(), optimizer.state_dict()
            if rank() == 0:
                assert_same(state, dict(model.state_dict()))
                found = dict(sorted(optimizer_state["state"].items()))
                assert_same(found, without_empty(model, plain.state_dict()))
            engine.close()
        with subtest(f"to plain torch, stage {stage}"):
            engine, optimizer = trained_by_engine(stage=stage)
            states = [engine.full_state_dict(), optimizer.state_dict()]
            torch.distributed.broadcast_object_list(states)
            twin = build(seed=5)
            twin.load_state_dict(states[0])
            twin_optimizer = adamw(twin)
            twin_optimizer.load_state_dict(states[1])
            train(DistributedDataParallel(twin, find_unused_parameters=True), twin_optimizer, 2, first=3)
            assert_same(dict(twin.state_dict()), dict(model.state_dict()))
            engine.close()


ELEMENTWISE = ["SGD", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD"]


@pytest.mark.slow
@distributed(world_size=3)
def test_every_elementwise_optimizer_gives_its_state_back_as_it_was() -> None:
    layouts: list[dict[str, Any]] = [{"stage": 3}, {"stage": 1, "bf16": {"enabled": True}}]
    for number, name in enumerate(ELEMENTWISE):
        options = {"SGD": {"momentum": 0.9}, "Adam": {"amsgrad": True}}.get(name, {})
        settings = layouts[number % 2]  # what an optimizer keeps does not depend on it
        with subtest(f"{name} {settings}"):
            states, weights = [], []
            for _ in range(2):
                engine = sharded(build(seed=len(states)), reduce_bucket_size=300, **settings)
                trainable = [p for p in engine.model.parameters() if p.requires_grad]
                optimizer = engine.shard_optimizer(getattr(torch.optim, name)(trainable, lr=1e-3, **options))
                if states:
                    engine.load_full_state_dict(weights[0])
                    optimizer.load_state_dict(states[0])
                else:
                    train(engine.model, optimizer, 2)
                states.append(optimizer.state_dict())
                weights.append(engine.full_state_dict())
                engine.close()
            assert_same(states[1], states[0])
            if rank() == 0:
                float_states = [v for s in states[0]["state"].values() for v in s.values() if v.dim()]
                assert float_states and all(v.dtype == torch.float32 for v in float_states)


@distributed(world_size=2)
def test_state_that_does_not_fit_is_refused_on_all_ranks() -> None:
    _, optimizer = trained_by_engine(steps=1, stage=2)
    good = optimizer.state_dict()
    if rank() == 0:
        wrong_shape, factored = copy.deepcopy(good), copy.deepcopy(good)
        first = next(iter(good["state"]))
        wrong_shape["state"][first]["exp_avg"] = torch.ones(3, 2)
        factored["state"][first]["opaque"] = object()
        fewer = {**good, "param_groups": good["param_groups"][:1]}
        odd_group = copy.deepcopy(good)
        odd_group["param_groups"][0]["callback"] = print
        no_state, no_ids, on_meta, sparse = (copy.deepcopy(good) for _ in range(4))
        no_state["state"] = 7
        no_ids["param_groups"][0]["params"] = [[] for _ in good["param_groups"][0]["params"]]
        last = max(good["state"])  # all others could have been taken by the time it is looked at
        on_meta["state"][last]["exp_avg_sq"] = good["state"][last]["exp_avg_sq"].to("meta")
        sparse["state"][last]["exp_avg_sq"] = good["state"][last]["exp_avg_sq"].to_sparse()
        for state in (on_meta, sparse):
            state["state"][first]["exp_avg"] += 1
    else:
        wrong_shape = factored = fewer = odd_group = no_state = no_ids = on_meta = sparse = {}
    cases: list[tuple[Any, list[str]]] = [
        (wrong_shape, ["'exp_avg' of 'embed.weight'", "(3, 2)"]),
        (factored, ["'opaque' of 'embed.weight'", "without pickle"]),
        (fewer, ["param groups of", "by their position"]),
        (odd_group, ["'callback'", "print"]),
        (on_meta, ["'exp_avg_sq'", "meta", "Nothing has been loaded"]),
        (sparse, ["'exp_avg_sq'", "parse", "Nothing has been loaded"]),
        (no_state, ["no optimizer state"]),
        (no_ids, ["no optimizer state"]),
        (7, ["no optimizer state"]),
        ({}, ["no optimizer state"]),
        (None, ["no optimizer state"]),
    ]
    for given, texts in cases:
        with subtest(texts[0]), expect_error(zs.CheckpointError, ["[rank 0]", *texts]):
            optimizer.load_state_dict(given)
    assert_same(optimizer.state_dict(), good)


@distributed(world_size=2)
def test_param_groups_carry_the_settings_that_a_scheduler_has_changed() -> None:
    _, optimizer = trained_by_engine(steps=1, stage=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scheduler.step()
    state = optimizer.state_dict()
    assert [group["lr"] for group in state["param_groups"]] == [5e-3, 2.5e-3]
    assert [group["betas"] for group in state["param_groups"]] == [(0.9, 0.999), (0.8, 0.95)]
    fresh = sharded(build(), stage=1)
    fresh_optimizer = fresh.shard_optimizer(adamw(fresh.model))
    fresh_optimizer.load_state_dict(state)
    assert_same(fresh_optimizer.state_dict()["param_groups"], state["param_groups"])
    assert fresh_optimizer.param_groups[1]["betas"] == (0.8, 0.95)


@distributed(world_size=1, process_group=False)
def test_without_a_process_group_everything_works_too() -> None:
    model = build()
    plain = adamw(model)
    train(model, plain, 2)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine, optimizer = trained_by_engine(steps=2, stage=stage)
            assert_same(engine.full_state_dict(), dict(model.state_dict()))
            found = dict(sorted(optimizer.state_dict()["state"].items()))
            assert_same(found, without_empty(model, plain.state_dict()))
            engine.load_full_state_dict(build(seed=5).state_dict())
            optimizer.load_state_dict(plain.state_dict())
            engine.close()


def test_the_model_of_these_tests_has_one_of_everything() -> None:
    model = build()
    assert isinstance(model, Everything)
    numels = {param.numel() for param in model.parameters()}
    assert {0, 1} <= numels
    assert model.temperature.dim() == 0
    names = list(model.state_dict())
    assert {"head.weight", "embed.weight", "left.weight", "right.weight", "counting._extra_state"} <= set(
        names
    )
    tokens, targets = next(global_batches(1))
    loss_of(model(tokens), targets).backward()
    assert model.unused.grad is None and model.temperature.grad is not None
