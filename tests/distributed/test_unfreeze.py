"""Parameters that are frozen when the model is sharded and are trained later, some of them at a time.

Oracles: at two ranks DDP, built anew whenever parameters are unfrozen (it takes only those that require a
gradient when it is built); at three naive data parallelism; in bf16 an engine that had a place for everything
from the start. Tolerance 0 throughout: where parameters lie changes no order of additions.
"""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest, world_size
from tests.models import Awkward, Mlp, awkward_loss, sgd, square_loss
from tests.reference import Ddp, Naive, Plain, Recipe, Trace, Zero, assert_same_bits, grid
from zero_strategy import compat

STAGES = (0, 1, 2, 3)
STEPS = 3  # with each phase
# What each phase unfreezes, by the beginning of its name. First a tied weight of the root and a part of one
# unit's bucket, then all that is left.
PHASES: tuple[tuple[str, ...], ...] = ((), ("embed", "blocks.1.up.weight", "blocks.1.norm"), ("",))
SMALL = {"reduce_bucket_size": 200}  # elements: of what is unfrozen together, not all fits into one bucket


def frozen_backbone(_: str | None = None) -> nn.Module:
    """Return a model of which `shared`, and `unused`, begin as trainable."""
    model = Awkward()
    for fqn, param in model.named_parameters():
        param.requires_grad_(fqn.startswith(("shared", "unused")))
    return model


def unfreeze(way: Plain, prefixes: tuple[str, ...]) -> list[nn.Parameter]:
    """Unfreeze parameters and give them to the optimizer, in a group of its own with other settings."""
    named = way.model.named_parameters()
    params = [param for fqn, param in named if fqn.startswith(prefixes) and not param.requires_grad]
    for param in params:
        param.requires_grad_(True)
    way.optimizer.add_param_group({"params": params, "lr": 3e-3, "weight_decay": 0.2})
    if isinstance(way, Ddp):
        way.module = DistributedDataParallel(way.model, find_unused_parameters=True)
    return params


def train_phase(way: Plain, phase: int, trace: Trace) -> None:
    """Unfreeze what a phase unfreezes, and train."""
    if PHASES[phase]:
        unfreeze(way, PHASES[phase])
    for step in range(phase * STEPS, (phase + 1) * STEPS):
        loss = awkward_loss(way.module, step)
        way.backward(loss)
        trace.losses.append(loss.detach())
        trace.norms.append(way.clip_norm(float("inf")))
        trace.grads.append(way.grads())
        way.step()
        trace.weights.append(way.weights())


def train(way: Plain) -> Trace:
    trace = Trace()
    for phase in range(len(PHASES)):
        train_phase(way, phase, trace)
    way.close()
    return trace


@distributed(world_size=2, timeout=120)
def test_gradual_unfreezing_gives_the_bits_of_ddp_at_every_stage() -> None:
    require_ddps_bits([SMALL])


@pytest.mark.slow
@distributed(world_size=[2, 3], timeout=240)
def test_gradual_unfreezing_gives_the_bits_of_ddp_with_any_buckets_and_prefetch() -> None:
    alone = {**SMALL, "overlap_comm": False, "stage3_prefetch_bucket_size": 0}
    require_ddps_bits([{}, SMALL, alone, {"reduce_bucket_size": 20}])


def require_ddps_bits(layouts: list[dict[str, Any]]) -> None:
    recipe = Recipe(build=frozen_backbone)
    wanted = train(Ddp(recipe) if world_size() == 2 else Naive(recipe))
    wanted.norms.clear()  # torch rounds norms otherwise; the stages are compared below
    norms = []
    for stage in STAGES:
        for settings in layouts:
            with subtest(f"stage={stage}, {settings}"):
                trace = train(Zero(recipe, stage=stage, **settings))
                norms.append(torch.stack(trace.norms))
                trace.norms.clear()
                assert_same_bits(trace, wanted)
    assert all(torch.equal(one, norms[0]) for one in norms)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_gradual_unfreezing_in_bf16_gives_the_bits_of_masters_that_were_there_from_the_start() -> None:
    def place_for_all() -> Zero:
        zero = Zero(Recipe(dtype=torch.bfloat16, optimizer=shared_only), stage=1)
        for fqn, param in zero.model.named_parameters():
            param.requires_grad_(fqn.startswith(("shared", "unused")))
        zero.model.blocks[0].scale.requires_grad_(False)
        return zero

    def shared_only(model: nn.Module) -> torch.optim.Optimizer:
        chosen = [p for fqn, p in model.named_parameters() if fqn.startswith(("shared", "unused"))]
        return torch.optim.AdamW(chosen, lr=1e-2)

    # `scale` is frozen in `Awkward` itself; there all of it has a place.
    wanted = train(place_for_all())
    for stage in STAGES:
        with subtest(f"stage={stage}"):
            recipe = Recipe(build=frozen_backbone, dtype=torch.bfloat16, optimizer=shared_only)
            assert_same_bits(train(Zero(recipe, stage=stage, **SMALL)), wanted)


@distributed(world_size=2, timeout=120)
@grid(stage=STAGES, dtype=[torch.float32, torch.bfloat16])
def test_the_ledger_counts_what_is_trained_and_nothing_for_what_stays_frozen(
    stage: int, dtype: torch.dtype
) -> None:
    zero = Zero(Recipe(build=frozen_backbone, dtype=dtype), stage=stage, **SMALL)
    for phase in PHASES:
        if phase:
            unfreeze(zero, phase)
        for step in range(2):  # the second leaves its gradients to be counted
            zero.optimizer.step()
            zero.optimizer.zero_grad()
            zero.backward(awkward_loss(zero.model, step))
        held = zero.engine.ledger.memory
        model = list(zero.model.parameters())
        trained = sum(p.numel() for p in model if p.requires_grad and p is not zero.model.unused)
        trainable = [bucket for bucket in zero.engine.buckets if bucket.trainable]
        assert {id(p) for b in trainable for p in b.params} == {id(p) for p in model if p.requires_grad}
        padded = sum(bucket.layout.padded_numel for bucket in trainable)
        owned = padded // (world_size() if stage else 1)
        total = torch.tensor([held["optimizer"]])
        dist.all_reduce(total)
        # Two fp32 moments of every element that has had a gradient, on one rank or, at stage 0, on each.
        assert int(total) == 2 * 4 * trained * (1 if stage else world_size())
        assert held["master"] == (4 * owned if dtype == torch.bfloat16 else 0)
        assert held["grads"] <= dtype.itemsize * padded
        if stage >= 2:
            assert held["grads"] == dtype.itemsize * owned
        everything = sum(bucket.layout.padded_numel for bucket in zero.engine.buckets)
        assert held["params"] == dtype.itemsize * everything // (world_size() if stage == 3 else 1)
        assert held["unsharded"] == 0
        zero.optimizer.zero_grad()
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_buckets_that_were_exchanged_are_let_go_of(stage: int) -> None:
    zero = Zero(Recipe(build=frozen_backbone), stage=stage)
    square = awkward_loss(zero.model, 0)
    zero.backward(square)
    zero.step()
    before = [weakref.ref(bucket) for bucket in zero.engine.buckets if not bucket.trainable]
    flats = [weakref.ref(bucket().flat.untyped_storage()) for bucket in before]  # type: ignore[union-attr]
    unfreeze(zero, ("",))
    del square
    gc.collect()
    assert before and all(bucket() is None for bucket in before)
    assert all(flat() is None for flat in flats)
    assert all(bucket.trainable for bucket in zero.engine.buckets)
    assert [bucket.index for bucket in zero.engine.buckets] == list(range(len(zero.engine.buckets)))
    assert len({bucket.name for bucket in zero.engine.buckets}) == len(zero.engine.buckets)
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_an_exchange_sends_what_makes_the_bucket_whole_and_no_more(stage: int) -> None:
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 3))
    model[0].requires_grad_(False)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
    optimizer = engine.shard_optimizer(sgd(model))
    (frozen,) = (bucket for bucket in engine.buckets if not bucket.trainable)
    engine.ledger.reset()
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    sent = {kind: count["bytes_sent"] for kind, count in engine.ledger.comm.items()}
    assert sent["all_gather"] == (4 * frozen.layout.padded_numel // 2 if stage == 3 else 0)
    assert sent["reduce_scatter"] == sent["all_reduce"] == 0 and sent["control"] < 2_000  # names, agreed on
    engine.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_the_optimizer_may_take_parameters_at_any_moment_outside_of_a_backward(stage: int) -> None:
    def loss_at(way: Plain, step: int) -> torch.Tensor:
        if step == 1 and isinstance(way, Zero):
            with way.engine.forward_scope():  # as in Lightning's training_step
                unfreeze(way, ("blocks.1", "embed"))
                assert torch.isfinite(way.model.embed.weight.sum()), "the root is whole in its forward"
                return awkward_loss(way.model, step)
        if step == 1:
            unfreeze(way, ("blocks.1", "embed"))
        loss = awkward_loss(way.model, step)
        if step == 2:  # what the graph has saved of the bucket before is still needed
            unfreeze(way, ("blocks.0.norm", "blocks.0.scale"))
        return loss

    def run(way: Plain) -> Trace:
        trace = Trace()
        for step in range(5):
            if step == 3:  # in the middle of an accumulation window
                with way.no_sync():
                    way.backward(awkward_loss(way.model, 7))
                unfreeze(way, ("blocks.0.up",))
            way.backward(loss_at(way, step))
            trace.grads.append(way.grads())
            way.step()
            trace.weights.append(way.weights())
            if isinstance(way, Zero):
                assert way.engine.ledger.memory["unsharded"] == 0
        way.close()
        return trace

    recipe = Recipe(build=frozen_backbone)
    whole = {"accumulate_whole_gradients": True}  # one reduction per window, as in the reference
    assert_same_bits(run(Zero(recipe, stage=stage, **whole)), run(Naive(recipe)))


@distributed(world_size=2, timeout=30)
@grid(stage=STAGES, at_fault=[None, 0, 1])
def test_an_unfrozen_parameter_that_no_optimizer_has_taken_is_refused_on_all_ranks(
    stage: int, at_fault: int | None
) -> None:
    zero = Zero(Recipe(build=frozen_backbone), stage=stage)
    params = [zero.model.blocks[0].up.weight, zero.model.embed.weight]
    for param in params if at_fault in (None, rank()) else ():
        param.requires_grad_(True)
    with expect_error(zs.ShardingError, ["embed.weight", "(and 1 more)", "add_param_group", "frozen when"]):
        zero.backward(awkward_loss(zero.model, 0))
    assert all(param.grad is None for param in zero.model.parameters())
    for param in params:
        param.requires_grad_(True)
    zero.optimizer.add_param_group({"params": params})
    zero.backward(awkward_loss(zero.model, 0))
    zero.step()
    zero.close()


@distributed(world_size=2, timeout=30)
@grid(stage=STAGES)
def test_ranks_that_unfreeze_other_parameters_are_refused_together(stage: int) -> None:
    zero = Zero(Recipe(build=frozen_backbone), stage=stage)
    blocks = zero.model.blocks
    for param in (blocks[0].scale, blocks[1].scale):
        param.requires_grad_(True)
    num_groups = len(zero.optimizer.param_groups)
    with expect_error(zs.ConfigError, ["What an optimizer takes", "blocks.1.scale"]):
        zero.optimizer.add_param_group({"params": [blocks[rank()].scale]})
    assert len(zero.optimizer.param_groups) == num_groups
    zero.close()


class HalfFrozen(nn.Module):
    """A frozen fp16 layer below a trained fp32 one."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(15, 15).half().requires_grad_(False)
        self.high = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.low(x.half()).float())


@distributed(world_size=2)
@grid(stage=STAGES)
def test_losses_are_scaled_from_when_a_float16_parameter_is_unfrozen(stage: int) -> None:
    zero = Zero(Recipe(build=lambda _: HalfFrozen(), optimizer=sgd), stage=stage)
    zero.backward(square_loss(zero.model, 0))
    assert zero.engine.loss_scaler.scale == 1.0
    waiting = zero.engine.full_grad(zero.model.high.weight)
    zero.model.low.requires_grad_(True)
    zero.optimizer.add_param_group({"params": list(zero.model.low.parameters())})
    assert zero.engine.loss_scaler.scale == 2.0**16
    assert torch.equal(zero.engine.full_grad(zero.model.high.weight), waiting)
    zero.engine.zero_grad()
    before = zero.weights()
    zero.backward(square_loss(zero.model, 1))
    zero.step()
    after = zero.weights()
    assert not zero.optimizer.step_was_skipped
    assert all(not torch.equal(after[name], before[name]) for name in after)
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_a_new_optimizer_may_take_what_was_frozen(stage: int) -> None:
    def run(way: Plain) -> Trace:
        trace = Trace()
        for step in range(4):
            if step == 2:
                way.model.layers[0].requires_grad_(True)
                other: Any = torch.optim.AdamW(way.model.layers[0].parameters(), lr=1e-2)
                groups = other.param_groups
                other = way.engine.shard_optimizer(other) if isinstance(way, Zero) else other
                assert other.param_groups is groups
            way.backward(square_loss(way.model, step))
            if isinstance(way, Naive):
                way.average()
            if step >= 2:
                other.step()
            way.step()
            trace.weights.append(way.weights())
        way.close()
        return trace

    def build(_: str | None) -> nn.Module:
        model = Mlp()
        model.layers[0].requires_grad_(False)
        return model

    recipe = Recipe(build=build, optimizer=sgd)
    assert_same_bits(run(Zero(recipe, stage=stage)), run(Naive(recipe)))


@distributed(world_size=2)
@grid(stage=STAGES)
def test_freezing_within_an_accumulation_window_keeps_what_is_there_and_adds_no_more(stage: int) -> None:
    def run(way: Plain) -> Trace:
        trace = Trace()
        flips = list(way.model.layers[1].parameters())
        for step in range(3):
            for micro, is_frozen in enumerate((False, True, False)):
                for param in flips:
                    param.requires_grad_(not is_frozen)
                if micro < 2:
                    with way.no_sync():
                        way.backward(square_loss(way.model, 3 * step + micro))
                else:
                    way.backward(square_loss(way.model, 3 * step + micro))
            for param in flips:
                param.requires_grad_(step == 0)  # as toggle_optimizer leaves them for another's step
            if isinstance(way, Naive):
                way.average_all()
            trace.grads.append(way.grads())
            way.step()
            trace.weights.append(way.weights())
        way.close()
        return trace

    class Reference(Naive):
        def average_all(self) -> None:
            for param in self.model.parameters():
                param.requires_grad_(True)
            self.average()

    recipe = Recipe(build=lambda _: Mlp(), optimizer=sgd)
    settings = {"accumulate_whole_gradients": True}
    assert_same_bits(run(Zero(recipe, stage=stage, **settings)), run(Reference(recipe)))


class Adapters(nn.Module):
    """A frozen layer with two adapters, of which one is on."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(15, 15).requires_grad_(False)
        self.adapters = nn.ModuleDict(
            {name: nn.Sequential(nn.Linear(15, 3), nn.Linear(3, 15)) for name in ("a", "b")}
        )
        self.switch("a")

    def switch(self, name: str) -> None:
        self.on = name
        for other, adapter in self.adapters.items():
            adapter.requires_grad_(other == name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x)) + self.adapters[self.on](x)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_adapters_may_be_switched_as_peft_switches_them(stage: int) -> None:
    def run(way: Plain) -> Trace:
        trace = Trace()
        for step, name in enumerate("aabbab"):
            way.model.switch(name)
            if step == 2:
                way.optimizer.add_param_group({"params": list(way.model.adapters["b"].parameters())})
            way.backward(square_loss(way.model, step))
            trace.grads.append(way.grads())
            way.step()
            trace.weights.append(way.weights())
        way.close()
        return trace

    recipe = Recipe(build=lambda _: Adapters(), optimizer=partial(sgd, momentum=0.9))
    zero = Zero(recipe, stage=stage)
    assert_same_bits(run(zero), run(Naive(recipe)))
    assert not zero.engine.buckets[0].trainable, "the base has a place for gradients"


# -- state ---------------------------------------------------------------------------------------------------


@distributed(world_size=2)
@grid(stage=STAGES)
def test_replaced_param_groups_are_those_that_are_stepped_and_seen(stage: int) -> None:
    """What a finetuning callback of Lightning does on resuming, the backbone still being frozen."""
    zero, naive = (way for way in (Zero(recipe(), stage=stage), Naive(recipe())))
    for way in (zero, naive):
        scheduler = torch.optim.lr_scheduler.LambdaLR(way.optimizer, lambda step: 0.5**step)
        group = way.optimizer.param_groups[0]
        late = [way.model.embed.weight, *way.model.blocks[1].parameters()]
        more = {**group, "params": late}
        way.optimizer.param_groups = [*({**old} for old in way.optimizer.param_groups), more]
        way.backward(awkward_loss(way.model, 0))
        way.step()
        for param in late:
            param.requires_grad_(True)
        scheduler.base_lrs.append(1e-3)
        scheduler.lr_lambdas.append(lambda step: 1.0)
        for step in range(1, 3):
            way.backward(awkward_loss(way.model, step))
            way.step()
            scheduler.step()
    assert isinstance(zero, Zero)
    assert zero.users.param_groups is zero.optimizer.param_groups
    assert [group["lr"] for group in zero.users.param_groups] == [2.5e-3, 1.25e-3, 1e-3]
    assert_same_bits(Trace(weights=[zero.weights()]), Trace(weights=[naive.weights()]))
    with expect_error(zs.ConfigError, "does not have"):
        zero.optimizer.param_groups = [{"params": [nn.Parameter(torch.ones(3))]}]
    zero.close()


def recipe() -> Recipe:
    return Recipe(build=frozen_backbone)


@distributed(world_size=2, timeout=120)
@grid(stage=(1, 3))  # each is loaded at the other
def test_a_checkpoint_from_before_or_after_an_unfreezing_resumes_after_the_same(
    stage: int, tmp_path: Path
) -> None:
    folders = [tmp_path / f"{stage}-{phase}" for phase in range(2)]
    other = {**SMALL, "stage": 4 - stage}
    wanted, zero = Trace(), Zero(recipe(), stage=stage)
    states = []
    for phase in range(3):
        train_phase(zero, phase, wanted)
        if phase < 2:
            zero.engine.save_checkpoint(folders[phase])
            states.append(copy.deepcopy(zero.optimizer.state_dict()))
    zero.close()
    for phase, folder in enumerate(folders):
        with subtest(f"saved after phase {phase}"):
            resumed, found = Zero(recipe(), **other), Trace()
            if phase == 1:
                with expect_error(zs.CheckpointError, ["param groups", "add_param_group"]):
                    resumed.engine.load_checkpoint(folder)
                with expect_error(zs.CheckpointError, ["param groups", "add_param_group"]):
                    resumed.optimizer.load_state_dict(states[phase])
                unfreeze(resumed, PHASES[1])
            resumed.engine.load_checkpoint(folder)
            resumed.optimizer.load_state_dict(states[phase])
            for number in range(phase + 1, 3):
                train_phase(resumed, number, found)
            resumed.close()
            skipped = (phase + 1) * STEPS
            rest = (wanted.losses, wanted.norms, wanted.grads, wanted.weights)
            assert_same_bits(found, Trace(*(values[skipped:] for values in rest)))


@distributed(world_size=2)
@grid(stage=STAGES)
def test_close_takes_off_what_an_exchange_has_put_on(stage: int) -> None:
    zero = Zero(recipe(), stage=stage)
    unfreeze(zero, PHASES[1])
    zero.backward(awkward_loss(zero.model, 0))
    zero.step()
    zero.close()
    for param in zero.model.parameters():
        assert not compat.post_accumulate_hooks(param)
    for module in zero.model.modules():
        assert not (module._forward_pre_hooks or module._forward_hooks)
