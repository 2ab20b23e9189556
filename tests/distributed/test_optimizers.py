"""The user's optimizer and scheduler behave on slices as on whole parameters.

Oracle: the same optimizer under torch's DDP, 2 ranks, one backward per step: tolerance 0, also for the
fused forms, since slices are cut at multiples of a vector's length. The model has odd shapes, so slices end
within parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Awkward, batches, loss_of, param_groups
from tests.reference import (
    Ddp,
    Plain,
    Recipe,
    Trace,
    Zero,
    assert_same_bits,
    grid,
    train_ddp,
    train_zero,
)

OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "Nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "Adam": (torch.optim.Adam, {}),
    "AMSGrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {}),
    "AdamW, maximizing": (torch.optim.AdamW, {"maximize": True}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "NAdam": (torch.optim.NAdam, {}),
    "RAdam": (torch.optim.RAdam, {}),
    "Adamax": (torch.optim.Adamax, {}),
    "Adadelta": (torch.optim.Adadelta, {}),
    "Rprop": (torch.optim.Rprop, {}),
    "ASGD": (torch.optim.ASGD, {}),
}
FUSED = ("momentum", "Nesterov", "Adam", "AMSGrad", "AdamW", "Adagrad")


def build(model: nn.Module, name: str, **form: Any) -> Optimizer:
    """Make an optimizer by its name here, over two groups of other learning rates."""
    kind, settings = OPTIMIZERS[name]
    groups = [
        {"params": group["params"], "lr": 1e-2 / (i + 1)} for i, group in enumerate(param_groups(model))
    ]
    return kind(groups, **settings, **form)


@distributed(world_size=2, timeout=120)
def test_every_elementwise_optimizer_equals_ddp_in_every_bit() -> None:
    compare_optimizers({name: forms_of(name)[-1:] for name in OPTIMIZERS})


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_every_elementwise_optimizer_in_every_form_equals_ddp_in_every_bit() -> None:
    compare_optimizers({name: forms_of(name) for name in OPTIMIZERS})


def forms_of(name: str) -> list[dict[str, bool]]:
    """The ways in which an optimizer can be told to work, the fastest last."""
    return [{"foreach": False}, {"foreach": True}] + ([{"fused": True}] if name in FUSED else [])


def compare_optimizers(forms_by_name: dict[str, list[dict[str, bool]]]) -> None:
    for name, forms in forms_by_name.items():
        for form in forms:
            with subtest(f"{name}, {form}"):
                recipe = Recipe(num_steps=3, optimizer=partial(build, name=name, **form))
                assert_same_bits(train_zero(recipe, stage=3, reduce_bucket_size=200), train_ddp(recipe))


# -- schedulers ----------------------------------------------------------------------------------------------

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "step": partial(StepLR, step_size=2, gamma=0.3),
    "cosine": partial(CosineAnnealingLR, T_max=4),
    "lambda": partial(LambdaLR, lr_lambda=lambda step: 1.0 / (1 + step)),
    "one cycle": partial(OneCycleLR, max_lr=[1e-2, 5e-3], total_steps=10),  # writes betas as well
    "plateau": partial(ReduceLROnPlateau, factor=0.5, patience=0),
}


def train_scheduled(way: Plain, make: Callable[[Optimizer], Any], users: Optimizer | None = None) -> Trace:
    """Train with a scheduler on the way's optimizer, or on the one the user made."""
    scheduler, trace = make(users or way.optimizer), Trace()
    for step, (tokens, targets) in enumerate(batches(4, rank())):
        loss = loss_of(way.module(tokens), targets)
        way.backward(loss)
        trace.losses.append(loss.detach())
        trace.grads.append(way.grads())
        way.step()
        if isinstance(scheduler, LRScheduler) and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        else:
            scheduler.step(float(step))  # a metric that gets worse
        trace.weights.append(way.weights())
        trace.norms.append(torch.tensor([group["lr"] for group in way.optimizer.param_groups]))
    way.close()
    return trace


@distributed(world_size=2)
def test_schedulers_on_either_optimizer_equal_ddp_in_every_bit() -> None:
    warnings.simplefilter("error")  # torch warns if a scheduler is stepped before its optimizer
    for name, make in SCHEDULERS.items():
        reference = train_scheduled(Ddp(Recipe()), make)
        lrs = {tuple(norm.tolist()) for norm in reference.norms}
        assert len(lrs) > 1, "the schedule changes nothing"
        with subtest(f"{name} on the sharded optimizer"):
            assert_same_bits(train_scheduled(Zero(Recipe(), stage=3), make), reference)
        with subtest(f"{name} on the user's optimizer"):
            zero = Zero(Recipe(), stage=3)
            assert_same_bits(train_scheduled(zero, make, zero.users), reference)


# -- param groups, several optimizers, closures --------------------------------------------------------------


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3), size=(100, 25_000_000))
def test_two_optimizers_over_one_model_that_step_in_turn_equal_ddp_in_every_bit(
    stage: int, size: int
) -> None:
    """Matrices by AdamW in every step, vectors by SGD in every second: the two share buckets."""

    def optimizers(model: nn.Module) -> list[Optimizer]:
        matrices, vectors = (group["params"] for group in param_groups(model))
        return [torch.optim.AdamW(matrices, lr=1e-2), torch.optim.SGD(vectors, lr=0.1, momentum=0.9)]

    recipe = Recipe(optimizer=lambda model: optimizers(model)[0])
    ddp = Ddp(recipe)
    model = recipe.model()
    config = zs.ZeroConfig(stage=stage, reduce_bucket_size=size, stage3_param_persistence_threshold=0)
    engine = zs.ZeroEngine(model, config)
    ours = [engine.shard_optimizer(optimizer) for optimizer in optimizers(model)]
    theirs = optimizers(ddp.model)
    for step, (tokens, targets) in enumerate(batches(6, rank())):
        for module, chosen in ((ddp.module, theirs), (model, ours)):
            loss_of(module(tokens), targets).backward()
            for optimizer in chosen[: 2 if step % 2 else 1]:
                optimizer.step()
            for optimizer in chosen:
                optimizer.zero_grad()
        weights = engine.full_state_dict()
        for name, wanted in ddp.weights().items() if rank() == 0 else ():
            assert torch.equal(weights[name], wanted), f"step {step}: {name}"
    engine.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_an_optimizer_clears_and_clips_its_own_gradients_only(stage: int) -> None:
    recipe = Recipe()
    model = recipe.model()
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
    matrices, vectors = (group["params"] for group in param_groups(model))
    first = engine.shard_optimizer(torch.optim.AdamW(matrices, lr=1e-2))
    second = engine.shard_optimizer(torch.optim.SGD(vectors, lr=0.1))
    tokens, targets = batches(1, rank())[0]
    engine.backward(loss_of(model(tokens), targets))
    before = {name: engine.full_grad(param) for name, param in model.named_parameters()}
    second.clip_grad_norm_(1e-3)
    second.zero_grad()
    names = {param: name for name, param in model.named_parameters()}
    for param in matrices:
        grad, wanted = engine.full_grad(param), before[names[param]]
        assert (grad is None and wanted is None) or torch.equal(grad, wanted), names[param]
    assert all(engine.full_grad(param) is None for param in vectors)
    first.zero_grad()
    assert all(engine.full_grad(param) is None for param in matrices)
    engine.backward(loss_of(model(tokens), targets))
    for name, param in model.named_parameters():
        grad, wanted = engine.full_grad(param), before[name]
        assert (grad is None and wanted is None) or torch.equal(grad, wanted), name
    engine.close()


@distributed(world_size=2)
@grid(stage=(0, 3))
def test_a_closure_is_called_once_and_its_loss_returned(stage: int) -> None:
    recipe, calls = Recipe(), []
    ddp, zero = Ddp(recipe), Zero(recipe, stage=stage)
    for tokens, targets in batches(3, rank()):
        for way in (ddp, zero):

            def closure(way: Plain = way, tokens: Tensor = tokens, targets: Tensor = targets) -> Tensor:
                calls.append(way)
                way.optimizer.zero_grad()
                loss = loss_of(way.module(tokens), targets)
                way.backward(loss)
                return loss

            returned = way.optimizer.step(closure)
            assert isinstance(returned, Tensor) and returned.requires_grad
    assert calls == [ddp, zero] * 3
    weights = zero.weights()
    for name, wanted in ddp.weights().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted), name
    zero.close()


@distributed(world_size=2)
@grid(stage=(1, 3))
def test_a_group_added_later_and_state_from_before_sharding_equal_ddp_in_every_bit(stage: int) -> None:
    """The optimizer steps twice over whole parameters, is sharded, and gets the vectors as a second group."""

    def begin() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = Awkward()
        optimizer = torch.optim.AdamW([param_groups(model)[0]], lr=1e-2)
        for tokens, targets in batches(2, 0):  # the same on both ranks
            loss_of(model(tokens), targets).backward()
            optimizer.step()
            model.zero_grad()
        return model, optimizer

    plain, theirs = begin()
    model, users = begin()
    ddp = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
    ours = engine.shard_optimizer(users)
    theirs.add_param_group(param_groups(plain)[1])
    ours.add_param_group(param_groups(model)[1])
    for tokens, targets in batches(3, rank()):
        for module, optimizer in ((ddp, theirs), (model, ours)):
            loss_of(module(tokens), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = engine.full_state_dict()
    for name, wanted in plain.state_dict().items() if rank() == 0 else ():
        assert torch.equal(weights[name], wanted), name
    engine.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_parameter_frozen_after_sharding_stops_moving_and_one_thawed_is_refused(stage: int) -> None:
    zero = Zero(Recipe(), stage=stage)
    before = zero.weights()
    frozen = zero.model.blocks[0].up.weight
    frozen.requires_grad_(False)
    tokens, targets = batches(1, rank())[0]
    zero.backward(loss_of(zero.model(tokens), targets))
    zero.step()
    after = zero.weights()
    if rank() == 0:
        assert torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])
        assert not torch.equal(after["blocks.1.up.weight"], before["blocks.1.up.weight"])
    zero.model.blocks[0].scale.requires_grad_(True)
    with expect_error(zs.ShardingError, "blocks.0.scale"):
        zero.backward(loss_of(zero.model(tokens), targets))
    zero.close()


class CountsItsSteps(torch.optim.Optimizer):
    """Element-wise, with one step count per param group, as many third-party classes have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"] / group["step"])


@distributed(world_size=2)
def test_an_optimizer_that_counts_its_steps_is_stepped_once() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    engine = zs.ZeroEngine(
        model, zs.ZeroConfig(stage=3, stage3_param_persistence_threshold=0, sub_group_size=1)
    )
    optimizer = engine.shard_optimizer(CountsItsSteps(model.parameters()))
    fired: list[int] = []
    optimizer.register_step_post_hook(lambda *_: fired.append(1))
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["step"] == 3
    assert len(fired) == 3


@distributed(world_size=2)
def test_a_late_param_group_takes_what_torch_takes_and_no_parameter_twice() -> None:
    model = torch.nn.Linear(4, 4)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=2))
    optimizer = engine.shard_optimizer(torch.optim.SGD([model.weight], lr=0.1))
    with expect_error(zs.ConfigError, contains="weight"):
        engine.shard_optimizer(torch.optim.SGD([model.bias], lr=0.1)).add_param_group(
            {"params": model.weight}
        )
    other = engine.optimizers[1]
    assert [len(group["params"]) for group in other.param_groups] == [1]
    engine.optimizers.remove(other)
    optimizer.add_param_group({"params": model.bias, "lr": 0.5})
    assert optimizer.param_groups[1]["params"][0] is model.bias
