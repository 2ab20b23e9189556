"""Fabric(strategy="zero1" ... "zero3") on two ranks.

Oracle: the same loop under Fabric's own DDPStrategy. Tolerance 0 where the order of additions is the same
(one reduction per step, or accumulation with `accumulate_whole_gradients`); a reduction per micro-batch and
clipping by norm agree to rounding.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from tests.integrations.fabric_support import (
    Net,
    adamw,
    assert_as_ddp,
    batches,
    ddp,
    make_fabric,
    new_net,
    train,
    whole,
    zero,
)
from tests.integrations.lightning_support import assert_same_weights

# -- set-up ------------------------------------------------------------------------------------------------


def set_up_together(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer, plain=True)  # fp32: loss.backward() is as good
    return whole(fabric, model)


def set_up_apart(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    model = fabric.setup_module(new_net())
    optimizer = fabric.setup_optimizers(adamw(model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    train(fabric, model, optimizer, scheduler)
    assert optimizer.param_groups[0]["lr"] == 2.5e-3
    return whole(fabric, model)


def set_up_with_scheduler(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer, found = fabric.setup(net, optimizer, scheduler=scheduler)
    assert found is scheduler
    train(fabric, model, optimizer, scheduler)
    return whole(fabric, model)


def set_up_two_models(strategy: Any) -> dict[str, Tensor]:
    """Two models, the first with two optimizers; the second learns from the first."""
    fabric = make_fabric(strategy)
    first, second = new_net(1), new_net(2)
    heads = torch.optim.SGD(first.head.parameters(), lr=0.1, momentum=0.9)
    rest = [p for n, p in first.named_parameters() if p.requires_grad and not n.startswith("head")]
    student = fabric.setup_module(second)
    teacher, heads, bodies = fabric.setup(first, heads, torch.optim.AdamW(rest, lr=1e-2))
    learning = fabric.setup_optimizers(adamw(student))
    for x, y in batches():
        fabric.backward(nn.functional.mse_loss(teacher(x), y))
        heads.step()
        bodies.step()
        teacher.zero_grad()
        target = teacher(x).detach()
        fabric.backward(nn.functional.mse_loss(student(x), target), model=student)
        learning.step()
        student.zero_grad()
    weights = {f"teacher.{k}": v for k, v in whole(fabric, teacher).items()}
    return weights | {f"student.{k}": v for k, v in whole(fabric, student).items()}


@distributed(world_size=2)
def test_every_kind_of_set_up_trains_as_under_ddp() -> None:
    for run in (set_up_together, set_up_apart, set_up_with_scheduler, set_up_two_models):
        assert_as_ddp(run)


def init_full(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    torch.manual_seed(7)
    with fabric.init_module(empty_init=False):
        net = Net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer)
    return whole(fabric, model)


def init_empty(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    with fabric.init_module(empty_init=True):
        net = Net()
    model = fabric.setup_module(net)
    fabric.strategy.load_module_state_dict(model._forward_module, new_net().state_dict())
    optimizer = fabric.setup_optimizers(adamw(model))
    train(fabric, model, optimizer)
    return whole(fabric, model)


@distributed(world_size=2)
def test_init_module_full_and_empty_train_as_under_ddp() -> None:
    for run in (init_full, init_empty):
        assert_as_ddp(run)


# -- the loop ----------------------------------------------------------------------------------------------


def accumulate(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    for number, (x, y) in enumerate(batches(6)):
        is_last = number % 3 == 2
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(nn.functional.mse_loss(model(x), y) / 3)
        if is_last:
            optimizer.step()
            model.zero_grad()
    return whole(fabric, model)


@distributed(world_size=2)
def test_no_backward_sync_accumulates_as_under_ddp() -> None:
    assert_as_ddp(accumulate, accumulate_whole_gradients=True)
    assert_as_ddp(accumulate, tolerance=1e-5)


def clip(strategy: Any, **how: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    norms = []
    for x, y in batches():
        fabric.backward(nn.functional.mse_loss(model(x), y))
        norms.append(fabric.clip_gradients(model, optimizer, **how))
        optimizer.step()
        optimizer.zero_grad()
    weights = whole(fabric, model)
    return weights | {"norms": torch.stack(norms)} if weights and "max_norm" in how else weights


def clip_by_value(strategy: Any) -> dict[str, Tensor]:
    return clip(strategy, clip_val=0.01)


def clip_by_norm(strategy: Any) -> dict[str, Tensor]:
    return clip(strategy, max_norm=0.05)


def clip_by_largest(strategy: Any) -> dict[str, Tensor]:
    return clip(strategy, max_norm=0.05, norm_type="inf")


@distributed(world_size=2)
def test_clipping_is_that_of_ddp() -> None:
    assert_as_ddp(clip_by_value)
    assert_as_ddp(clip_by_norm, tolerance=2e-5)
    assert_as_ddp(clip_by_largest, tolerance=1e-6)
    for stage in (1, 3):
        with subtest(f"a norm that is not finite, stage {stage}"):
            fabric = make_fabric(zero(stage))
            net = new_net()
            model, optimizer = fabric.setup(net, adamw(net))
            fabric.backward(model(torch.full((1, 4), 1.0)).sum() * float("inf"))
            with expect_error(zs.ShardingError, ["not clipped", "error_if_nonfinite"]):
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
            fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)


def mixed(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy, precision="bf16-mixed")
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    losses = train(fabric, model, optimizer)
    return {**whole(fabric, model), **({"losses": torch.stack(losses)} if fabric.is_global_zero else {})}


def true_16(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy, precision="bf16-true")
    with fabric.init_module():
        net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer)
    return whole(fabric, model)


@distributed(world_size=2)
def test_each_precision_is_that_of_ddp() -> None:
    assert_as_ddp(mixed)
    with subtest("bf16-true, without masters, ddp"):
        plain = true_16(ddp())
    found = []
    for stage in (1, 2, 3):
        with subtest(f"bf16-true, stage {stage}"):
            found.append(true_16(zero(stage)))
            assert_same_weights(found[-1], found[0])
            assert_same_weights(found[-1], plain, tolerance=0.1)  # 8 bits, and a bias of one element


def marked_methods(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy, precision="bf16-mixed")
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    model.mark_forward_method("loss")
    for x, y in batches():
        fabric.backward(model.loss(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return whole(fabric, model)


def unmarked_method(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    model = fabric.setup(new_net())
    with expect_error(RuntimeError, "mark_forward_method"):
        model.loss(*batches(1)[0])
    return whole(fabric, model)


@distributed(world_size=2)
def test_methods_marked_as_forward_run_as_under_ddp() -> None:
    assert_as_ddp(marked_methods)
    assert_as_ddp(unmarked_method)


def evaluate_and_train(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    judge = fabric.setup_module(new_net(3)).eval()
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    outputs = []
    for x, _ in batches():
        with torch.inference_mode():
            outputs.append(model(x))
        with torch.no_grad():
            target = judge(x)
        fabric.backward((model(x) - target).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    weights = whole(fabric, model)
    return weights | {"outputs": torch.stack(outputs)} if weights else {}


@distributed(world_size=2)
def test_models_without_optimizer_and_inference_mode_run_as_under_ddp() -> None:
    assert_as_ddp(evaluate_and_train)
    for stage in (1, 2, 3):
        with subtest(f"nothing to train, which DDP refuses, stage {stage}"):
            judge = make_fabric(zero(stage)).setup_module(new_net().requires_grad_(False))
            assert torch.equal(judge(torch.ones(2, 4)), new_net()(torch.ones(2, 4)))


# -- wrappers ----------------------------------------------------------------------------------------------


def compiled(strategy: Any) -> dict[str, Tensor]:
    fabric = make_fabric(strategy)
    net = new_net()
    model, optimizer = fabric.setup(torch.compile(net, backend="eager"), adamw(net))
    for x, y in batches(2):
        fabric.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        model.zero_grad()
    return whole(fabric, model)


@distributed(world_size=2)
def test_fabrics_wrappers_reach_what_the_engine_holds() -> None:
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            fabric = make_fabric(zero(stage))
            net = new_net()
            model, optimizer = fabric.setup(net, torch.optim.SGD(net.blocks.parameters(), lr=0.1))
            engine = fabric.strategy.engine_of(model)
            assert engine is fabric.strategy.engine_of(net) and model.module is net
            x, y = batches(1)[0]
            for clear in (optimizer.zero_grad, model.zero_grad, net.zero_grad):
                fabric.backward(nn.functional.mse_loss(model(x), y))
                assert engine.full_grad(net.blocks[1].linear.weight) is not None
                clear()
                assert engine.full_grad(net.blocks[1].linear.weight) is None
            # The wrapper runs the optimizer's methods with itself as `self`: nothing may land on it.
            before = set(vars(optimizer))
            optimizer.add_param_group({"params": list(net.head.parameters()), "lr": 0.5})
            fabric.backward(nn.functional.mse_loss(model(x), y))
            assert float(optimizer.clip_grad_norm_(1e9)) > 0 and optimizer.clip_coefficient == 1.0
            head = engine.full_state_dict()
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            assert set(vars(optimizer)) == before
            assert [group["lr"] for group in optimizer.optimizer.param_groups] == [0.1, 0.5]
            if fabric.is_global_zero:
                assert not torch.equal(head["head.bias"], engine.full_state_dict()["head.bias"])
            else:
                engine.full_state_dict()


@pytest.mark.slow
@distributed(world_size=2)
def test_a_compiled_model_is_set_up_as_under_ddp() -> None:
    assert_as_ddp(compiled)


@distributed(world_size=2)
def test_state_dict_of_the_model_is_answered_or_refused_as_by_the_engine() -> None:
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            model = make_fabric(zero(stage)).setup_module(new_net())
            if stage < 3:
                assert all(torch.equal(v, new_net().state_dict()[k]) for k, v in model.state_dict().items())
                model.load_state_dict(new_net(3).state_dict())
                assert torch.equal(model.first.weight, new_net(3).first.weight)
            else:
                with expect_error(zs.ShardingError, "full_state_dict"):
                    model.state_dict()


# -- bad input ---------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_bad_input_is_refused_by_name() -> None:
    with (
        subtest("unknown keyword"),
        expect_error(zs.ConfigError, ["reduce_bucket_sise", "reduce_bucket_size"]),
    ):
        zero(2, reduce_bucket_sise=1)
    for keyword, said in {"find_unused_parameters": "DDPStrategy", "sharding_strategy": "stage=3"}.items():
        for cls in (zs.FabricZeroStrategy, zs.ZeroStrategy):
            with subtest(f"{keyword} to {cls}"), expect_error(zs.ConfigError, [keyword, said]):
                cls(stage=2, overlap_comm=False, **{keyword: True})
    with subtest("spawn"), expect_error(zs.ConfigError, ["'spawn'", "stage 3", "popen"]):
        zero(3, start_method="spawn")
    with subtest("an optimizer first"), expect_error(zs.ConfigError, ["SGD", "setup_module"]):
        make_fabric(zero(2)).setup_optimizers(torch.optim.SGD(new_net().parameters()))
    with subtest("precision"), expect_error(zs.ConfigError, ["bf16.enabled", "32-true", "Fabric"]):
        make_fabric(zero(2, bf16={"enabled": True})).setup_module(new_net())
    with subtest("auto"), expect_error(zs.ConfigError, ["auto", "gradient_clipping"]):
        make_fabric(zero(2, gradient_clipping="auto")).setup_module(new_net())
    for stage in (1, 3):
        fabric = make_fabric(zero(stage))
        first, second = fabric.setup_module(new_net()), fabric.setup_module(new_net())
        foreign = torch.optim.SGD(new_net().parameters(), lr=0.1)
        with subtest(f"foreign parameters, stage {stage}"), expect_error(zs.ConfigError, "does not have"):
            fabric.setup_optimizers(foreign)
        both = torch.optim.SGD([*first.head.parameters(), *second.head.parameters()], lr=0.1)
        with (
            subtest(f"of two models, stage {stage}"),
            expect_error(zs.ConfigError, "one engine for each model"),
        ):
            fabric.setup_optimizers(both)
        with (
            subtest(f"not set up, stage {stage}"),
            expect_error(zs.ConfigError, ["not been set up", "fabric.setup"]),
        ):
            fabric.clip_gradients(first, foreign, max_norm=1.0)
        with subtest(f"no engine, stage {stage}"), expect_error(zs.ShardingError, "has no engine"):
            fabric.strategy.engine_of(new_net())
