"""Models whose computation depends on the data, and several models in a process, at stages 1, 2 and 3.

Oracle: naive data parallelism, which averages whole gradients after the backward and so follows any control
flow. Tolerance 0: at two ranks all additions have one order. What stage 3 cannot follow must be an error that
names the parameter, never a wrong number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank
from tests.models import Mlp, MoeModel, Routes, adamw, inputs, route_loss, sgd
from tests.recorder import assert_nothing_whole
from tests.reference import Naive, Recipe, Trace, Zero, assert_same_bits, compare, grid, train_with

STAGES = (1, 2, 3)
ROUTES = Recipe(build=lambda _: Routes())


@distributed(world_size=2, timeout=30)
@grid(stage=STAGES)
def test_experts_that_only_some_ranks_use_equal_naive_data_parallelism(stage: int) -> None:
    """Which expert gets a row changes from step to step and differs between the ranks."""

    def routed(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank())
        return model(torch.randn(4, 7, generator=generator), _choice(step)).pow(2).mean()

    def _choice(step: int) -> Tensor:
        return torch.tensor([[0, 1, 0, 1], [2, 2, 2, 2], [-1, -1, 0, 2]][(step + rank()) % 3])

    recipe = Recipe(build=partial(MoeModel, 15), optimizer=adamw)
    compare(recipe, routed, num_steps=4, stage=stage)


@distributed(world_size=2)
@grid(stage=STAGES, prefetch=(0, 50_000_000))
def test_modules_in_another_order_in_each_step_equal_naive_data_parallelism(
    stage: int, prefetch: int
) -> None:
    routes = ["abc", "abc", "cab", "ba", "c", "abc"]
    compare(
        ROUTES,
        lambda model, step: route_loss(model, step, routes[step]),
        num_steps=len(routes),
        stage=stage,
        stage3_prefetch_bucket_size=prefetch,
    )


@distributed(world_size=2)
@grid(stage=STAGES)
def test_modules_called_several_times_in_a_forward_equal_naive_data_parallelism(stage: int) -> None:
    routes = ["aabab", "cc", "aabab"]
    loss = lambda model, step: route_loss(model, step, routes[step])  # noqa: E731
    compare(ROUTES, loss, stage=stage, reduce_bucket_size=100)


class Borrowing(nn.Module):
    """Uses weights outside of their own modules: an embedding as the head, and a unit's own."""

    def __init__(self, reaches_into_a_unit: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 15)
        self.units = nn.ModuleList(nn.Linear(15, 15) for _ in range(2))
        self.reaches_into_a_unit = reaches_into_a_unit

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for unit in self.units:
            x = torch.tanh(unit(x))
        if self.reaches_into_a_unit:
            x = nn.functional.linear(x, self.units[0].weight)
        return nn.functional.linear(x, self.embed.weight)


@distributed(world_size=2)
@grid(stage=STAGES, reaches_into_a_unit=[False, True])
def test_a_weight_used_outside_its_own_module_counts_or_is_refused_by_name(
    stage: int, reaches_into_a_unit: bool
) -> None:
    """What belongs to the root is whole in its forward and backward at stage 3 too."""

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank())
        return model(torch.randint(0, 11, (3, 5), generator=generator)).pow(2).mean()

    recipe = Recipe(build=lambda _: Borrowing(reaches_into_a_unit))
    if stage == 3 and reaches_into_a_unit:
        with expect_error(zs.ShardingError, "units.0.weight"):
            compare(recipe, loss, stage=stage)
    else:
        compare(recipe, loss, stage=stage)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_two_models_that_train_against_one_another_equal_naive_data_parallelism(stage: int) -> None:
    """Two engines in a process; the second loss goes back through both models."""

    def play(make: Callable[[Recipe], Naive | Zero]) -> Trace:
        trace, maker, judge = (
            Trace(),
            make(Recipe(build=lambda _: Mlp())),
            make(Recipe(optimizer=sgd, build=lambda _: Mlp(2))),
        )
        for step in range(4):
            made = maker.model(inputs(step))
            judge.backward(
                judge.model(made.detach()).pow(2).mean() + (judge.model(inputs(step + 50)) - 1).pow(2).mean()
            )
            judge.step()
            loss = (judge.model(maker.model(inputs(step))) - 1).pow(2).mean()
            maker.backward(loss)
            maker.step()
            judge.model.zero_grad()
            trace.losses.append(loss.detach())
            trace.grads.append({})
            trace.weights.append(
                {
                    f"{name}.{key}": value
                    for name, way in (("maker", maker), ("judge", judge))
                    for key, value in way.weights().items()
                }
            )
        for way in (maker, judge):
            way.close()
        return trace

    assert_same_bits(play(partial(Zero, stage=stage)), play(Naive))


@distributed(world_size=2)
@grid(stage=STAGES)
def test_a_frozen_teacher_in_an_engine_of_its_own_answers_and_stays_as_it_was(stage: int) -> None:
    """An engine without an optimizer, for a model that only answers."""
    recipe = Recipe(build=lambda _: Mlp())
    plain = recipe.model().requires_grad_(False)
    taught = recipe.model().requires_grad_(False)
    teacher = zs.ZeroEngine(taught, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))

    def learn(teach: nn.Module) -> Trace:
        def loss(model: nn.Module, step: int) -> Tensor:
            with torch.no_grad():
                answer = teach(inputs(step))
            return (model(inputs(step)) - 2 * answer).pow(2).mean()

        student = Zero(recipe, stage=stage)
        trace = train_with(student, loss)
        student.close()
        return trace

    assert_same_bits(learn(taught), learn(plain))
    assert_nothing_whole(teacher)
    for name, value in teacher.full_state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    teacher.close()


@distributed(world_size=2)
@grid(stage=STAGES, whole=[True, False])
def test_evaluations_between_micro_batches_change_no_bit(stage: int, whole: bool) -> None:
    """Of an accumulation window, with the model in `eval` mode and by another route."""

    def run(evaluates: bool) -> Trace:
        zero, trace = Zero(ROUTES, stage=stage, accumulate_whole_gradients=whole), Trace()
        for step in range(3):
            for micro in range(3):
                with zero.no_sync() if micro < 2 else contextlib.nullcontext():
                    zero.backward(route_loss(zero.model, 3 * step + micro) / 3)
                if evaluates:
                    zero.model.eval()
                    for mode in (torch.no_grad, torch.inference_mode):
                        with mode():
                            zero.model(inputs(step), "cab")
                    zero.model.train()
                    assert_nothing_whole(zero.engine)
            trace.losses.append(torch.zeros(()))
            trace.grads.append(zero.grads())
            zero.step()
            trace.weights.append(zero.weights())
        zero.close()
        return trace

    assert_same_bits(run(True), run(False))
