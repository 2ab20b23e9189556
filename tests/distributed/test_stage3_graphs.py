"""Stage 3 and what autograd keeps: several forwards or backwards, gradients of gradients, experts.

Oracle: naive data parallelism in the same processes, tolerance 0 unless said. What torch refuses without
sharding must be refused with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Awkward, Mlp, MoeModel, Routes, adamw, inputs, route_loss
from tests.reference import (
    Naive,
    Plain,
    Recipe,
    Zero,
    assert_same_bits,
    compare,
    grid,
    train,
    train_ddp,
    train_with,
)

ROUTES = Recipe(build=lambda _: Routes())


# -- graphs --------------------------------------------------------------------------------------------------


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_several_forwards_before_one_backward_equal_naive_data_parallelism(stage: int) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        outs = [model(inputs(10 * step + i), route) for i, route in enumerate(("abc", "cb", "abc"))]
        return torch.stack([out.pow(2).mean() for out in outs]).sum()

    compare(ROUTES, loss, stage=stage, reduce_bucket_size=300)


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_retained_graph_can_be_walked_twice(stage: int) -> None:
    """Each walk adds its mean: to rounding. Nothing is written in between, which torch would refuse."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=stage)
    for step in range(2):
        for way in (naive, zero):
            loss = route_loss(way.model, step)
            loss.backward(retain_graph=True)
            way.backward(loss)
        for name, wanted in naive.grads().items():
            grad = zero.grads()[name]
            assert grad is not None and wanted is not None
            torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-8)
        for way in (naive, zero):
            way.step()
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_graph_kept_over_a_step_is_refused_as_by_torch(stage: int) -> None:
    """A backward through weights that a step has changed would be wrong: torch raises, so do all stages."""
    zero = Zero(ROUTES, stage=stage)
    loss = route_loss(zero.model, 0)
    loss.backward(retain_graph=True)
    zero.step()
    with expect_error(RuntimeError, "modified by an inplace operation"):
        loss.backward()
    zero.model.zero_grad()
    zero.close()


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_a_gradient_penalty_inside_unsharded_params_equals_naive_data_parallelism(stage: int) -> None:
    """No module's output is in the graph of a gradient, so the weights are kept whole around it."""
    naive, zero = Naive(ROUTES), Zero(ROUTES, stage=stage)
    for way in (naive, zero):
        x = inputs().requires_grad_()
        if isinstance(way, Zero):
            with way.engine.unsharded_params():
                penalized_backward(way, x)
        else:
            penalized_backward(way, x)
    for name, wanted in naive.grads().items():
        grad = zero.grads()[name]
        assert (grad is None) == (wanted is None)
        assert grad is None or torch.equal(grad, wanted), name
    zero.close()


def penalized_backward(way: Plain, x: Tensor) -> None:
    """Backward through the norm of the gradient with respect to the input."""
    out = way.model(x)
    (slope,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
    way.backward(out.mean() + slope.pow(2).mean())


@distributed(world_size=2)
@grid(stage=(0, 1, 2, 3))
def test_autograd_grad_of_the_input_does_not_touch_the_gradients(stage: int) -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = inputs(step + 20).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        return (model(inputs(step)) * slope.mean()).pow(2).mean()

    compare(ROUTES, loss, stage=stage)


# -- experts -------------------------------------------------------------------------------------------------


def moe_loss(choices: Callable[[], list[int]], model: nn.Module, step: int) -> Tensor:
    """A quadratic loss with the rows routed by hand."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank()))
    return model(x, torch.tensor(choices())).pow(2).mean()


CHOICES: dict[str, Callable[[], list[int]]] = {
    "experts 0 and 1 on rank 0, 2 on rank 1": lambda: [0, 1, 0, 1] if rank() == 0 else [2, 2, 2, 2],
    "no tokens on rank 1": lambda: [0, 1, 2, 1] if rank() == 0 else [-1, -1, -1, -1],
    "no tokens anywhere": lambda: [-1, -1, -1, -1],
}


@distributed(world_size=2, timeout=25)
@pytest.mark.parametrize("case", CHOICES)
def test_experts_without_tokens_hang_nobody_and_do_not_move(case: str) -> None:
    """AdamW with weight decay would show an expert that was given a gradient of zeros."""
    for recompute in (None, "non-reentrant"):
        with subtest(f"recompute={recompute}"):
            recipe = Recipe(build=partial(MoeModel, 15), recompute=recompute, optimizer=adamw)
            compare(recipe, partial(moe_loss, CHOICES[case]), num_steps=5, stage=3)
            before = recipe.model().state_dict()["moes.0.experts.3.weight"]
            trace = train_with(Zero(recipe, stage=3), partial(moe_loss, CHOICES[case]))
            assert rank() != 0 or torch.equal(trace.weights[-1]["moes.0.experts.3.weight"], before)


# -- with torch.compile --------------------------------------------------------------------------------------


def graphs_over_steps(stage: int, what: str, *, backend: str = "eager", num_steps: int = 6) -> list[int]:
    """Train four equal blocks, some of it compiled; return how many graphs there were after each step.

    What travels between graphs must leave no trace in the numbers: gradients are naive data parallelism's.
    """
    torch._dynamo.reset()
    compile_graph = torch._dynamo.lookup_backend(backend)
    num_graphs = [0]

    def counting(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        num_graphs[0] += 1
        return compile_graph(graph, examples)

    def build(_: str | None) -> nn.Module:
        model = Mlp(4)
        if what == "blocks before sharding":
            for place, layer in enumerate(model.layers):
                model.layers[place] = torch.compile(layer, backend=counting)
        return model

    naive, zero = Naive(Recipe(build=lambda _: Mlp(4))), Zero(Recipe(build=build), stage=stage)
    if what == "the model":
        zero.model.compile(backend=counting)
    elif what == "each block's forward":
        for layer in zero.model.layers:
            layer.forward = torch.compile(layer.forward, backend=counting)
    counts = []
    for step in range(num_steps):
        for way in (naive, zero):
            way.backward(way.model(inputs(step)).pow(2).mean())
        pairs = zip(naive.grads().values(), zero.grads().values(), strict=True)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        for way in (naive, zero):
            way.step()
        counts.append(num_graphs[0])
    zero.close()
    return counts


@distributed(world_size=2)
def test_blocks_compiled_at_stage_3_are_not_compiled_anew_in_every_step() -> None:
    """A block has as many graphs after the first step as ever, at most two: hooks stay outside of them."""
    counts = graphs_over_steps(3, "blocks before sharding", num_steps=3)
    assert 1 <= counts[0] <= 8 and len(set(counts)) == 1, counts


@pytest.mark.slow
@distributed(world_size=2, timeout=200)
@grid(
    stage=(1, 2, 3),
    what=("blocks before sharding", "each block's forward", "the model"),
    backend=("eager", "aot_eager"),
)
def test_compiled_blocks_and_models_equal_eager_ones(stage: int, what: str, backend: str) -> None:
    """A block is compiled at most twice, and nothing after the second step."""
    counts = graphs_over_steps(stage, what, backend=backend)
    assert 1 <= counts[1] <= 8 and len(set(counts[1:])) == 1, counts


@distributed(world_size=2)
def test_stage_3_of_the_awkward_model_equals_ddp_with_reentrant_checkpointing() -> None:
    """The oracle is DDP without checkpoints: with re-entrant ones it wants no unused parameters."""
    recipe = Recipe(num_steps=4, build=lambda recompute: Awkward(recompute))
    reference = train_ddp(recipe)
    reentrant = Recipe(num_steps=4, build=lambda _: Awkward("reentrant"))
    zero = Zero(reentrant, stage=3, reduce_bucket_size=200)
    assert_same_bits(train(zero, reentrant), reference)
