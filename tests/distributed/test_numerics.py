"""Sharding never shows in the numbers: clipping, accumulation, unused and tied parameters, overlap.

Oracle: naive data parallelism (whole gradients averaged in rank order after the backward) or plain torch in
one process; tolerance 0 where the order of additions is the same, else 1e-6 of a tensor's norm, with the
reason beside it. Many of these are faults that users of other implementations have reported.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import zero_strategy as zs
from tests.harness import distributed, rank, subtest, world_size
from tests.models import Awkward, Mlp, adamw, awkward_loss, batches, loss_of, sgd, square_loss
from tests.reference import (
    Naive,
    Recipe,
    Zero,
    assert_same_bits,
    compare,
    grid,
    relative_difference,
    train,
    train_whole_batch,
    train_with,
    train_zero,
)

STAGES = (0, 1, 2, 3)
SMALL = {"reduce_bucket_size": 100}  # many buckets even in a small model


# -- clipping ------------------------------------------------------------------------------------------------


@distributed(world_size=2)
@grid(stage=STAGES)
def test_clipping_returns_the_norm_before_and_bounds_the_update(stage: int) -> None:
    recipe = Recipe(optimizer=partial(sgd, lr=1.0))
    loud = lambda model, step: 1e3 * awkward_loss(model, step)  # noqa: E731
    naive, zero = Naive(recipe), Zero(recipe, stage=stage, **SMALL)
    for way in (naive, zero):
        way.backward(loud(way.model, 0))
    naive.average()
    before = zero.weights()
    norm, wanted = zero.clip_norm(1.0), naive.clip_norm(1.0)
    assert wanted > 100 and relative_difference(norm, wanted) < 1e-6
    assert zero.optimizer.clip_coefficient == pytest.approx(1.0 / float(wanted), rel=1e-5)
    zero.step()
    after = zero.weights()
    if rank() == 0:
        names = [name for name, _ in zero.model.named_parameters()]  # each tied parameter once
        change = torch.cat([(after[name] - before[name]).reshape(-1) for name in names])
        assert float(change.norm()) == pytest.approx(1.0, abs=1e-4)
    zero.close()


@distributed(world_size=2)
def test_clip_coefficient_is_one_if_the_norm_is_within_the_bound() -> None:
    zero = Zero(Recipe(), stage=3)
    zero.backward(awkward_loss(zero.model, 0))
    grads = zero.grads()
    norm = zero.clip_norm(1e6)
    assert zero.optimizer.clip_coefficient == 1.0 and float(norm) > 0
    for name, grad in zero.grads().items():
        wanted = grads[name]
        assert (grad is None and wanted is None) or torch.equal(grad, wanted)
    zero.close()


@distributed(world_size=[2, 3])
def test_the_norm_counts_every_element_once_wherever_it_lies() -> None:
    """The same gradients, cut among ranks in different ways, have one norm and one coefficient."""
    norms, coefficients = set(), set()
    for stage in STAGES:
        for size in (1, 100, 25_000_000):
            zero = Zero(Recipe(), stage=stage, reduce_bucket_size=size)
            zero.backward(awkward_loss(zero.model, 0))
            grads = [grad for grad in zero.grads().values() if grad is not None]
            wanted = torch.cat([grad.reshape(-1) for grad in grads]).double().norm()
            norms.add(float(zero.clip_norm(0.01)))
            coefficients.add(zero.optimizer.clip_coefficient)
            assert float(wanted) == pytest.approx(max(norms), rel=1e-6)
            zero.close()
    assert len(norms) == len(coefficients) == 1


@distributed(world_size=2)
@grid(norm_type=[1.0, 2.0, 3.0, float("inf")])
def test_norms_of_any_order_agree_with_torch(norm_type: float) -> None:
    naive, zero = Naive(Recipe()), Zero(Recipe(), stage=3, **SMALL)
    for way in (naive, zero):
        way.backward(awkward_loss(way.model, 0))
    naive.average()
    wanted = nn.utils.clip_grad_norm_(naive.model.parameters(), 0.1, norm_type)
    assert relative_difference(zero.optimizer.clip_grad_norm_(0.1, norm_type), wanted) < 1e-6
    for name, grad in zero.grads().items():
        expected = naive.grads()[name]
        assert (grad is None) == (expected is None)
        assert grad is None or relative_difference(grad, expected) < 1e-6
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_clipping_in_the_middle_of_an_accumulation_does_nothing(stage: int) -> None:
    """Clipping in every micro-step inside `no_sync` trains as clipping at the boundary."""
    recipe = Recipe(num_steps=3, accumulation=4)
    weights = []
    for clips_each in (False, True):
        zero = Zero(recipe, stage=stage)
        for step in range(recipe.num_steps):
            for micro in range(4):
                tokens, targets = batches(12, rank())[4 * step + micro]
                if micro < 3:
                    with zero.no_sync():
                        zero.backward(loss_of(zero.model(tokens), targets))
                        if clips_each:
                            zero.clip_norm(0.05)
                else:
                    zero.backward(loss_of(zero.model(tokens), targets))
                    zero.clip_norm(0.05)
            zero.step()
        weights.append(zero.weights())
        zero.close()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@distributed(world_size=2)
@grid(stage=STAGES)
def test_clipping_a_not_finite_gradient_spoils_it_on_all_ranks(stage: int) -> None:
    """A gradient that overflowed on rank 1 shows as a NaN or an infinity on both ranks."""
    zero = Zero(Recipe(), stage=stage, **SMALL)
    factor = float("inf") if rank() == 1 else 1.0
    zero.backward(awkward_loss(zero.model, 0) * factor)
    norm = zero.clip_norm(1.0)
    assert not torch.isfinite(norm)
    assert any(grad is not None and not torch.isfinite(grad).all() for grad in zero.grads().values())
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_gradients_zeroed_after_the_reduction_are_what_the_norm_and_the_step_use(stage: int) -> None:
    """As far as there is an interface: `clip_grad_value_` edits what was reduced."""
    zero = Zero(Recipe(optimizer=sgd), stage=stage, **SMALL)
    zero.backward(awkward_loss(zero.model, 0))
    assert float(zero.clip_norm(float("inf"))) > 0
    before = zero.weights()
    zero.clip_value(0.0)
    assert float(zero.clip_norm(float("inf"))) == 0.0
    assert all(grad is None or not grad.any() for grad in zero.grads().values())
    zero.step()
    assert all(torch.equal(value, before[name]) for name, value in zero.weights().items())
    zero.close()


# -- accumulation --------------------------------------------------------------------------------------------


def compare_accumulation(accumulation: int, name: str, num_steps: int) -> None:
    """Hold every stage against one process: every element within 1e-6 (absolute) after every step."""
    optimizer = partial(adamw, lr=1e-3) if name == "adamw" else partial(sgd, lr=0.05, momentum=0.9)
    recipe = Recipe(num_steps=num_steps, accumulation=accumulation, optimizer=optimizer)
    reference = train_whole_batch(recipe)
    for stage in STAGES:
        with subtest(f"stage={stage}"):
            trace = train_zero(recipe, stage=stage)
            for step in range(num_steps if rank() == 0 else 0):
                for key, value in trace.weights[step].items():
                    assert (value - reference.weights[step][key]).abs().max() < 1e-6, (step, key)


@distributed(world_size=2)
@grid(accumulation=[1, 4], name=["adamw", "momentum"])
def test_accumulation_equals_one_process_at_every_stage(accumulation: int, name: str) -> None:
    compare_accumulation(accumulation, name, num_steps=3)


@pytest.mark.slow
@distributed(world_size=[2, 4], timeout=600)
@grid(accumulation=[1, 3, 4], name=["adamw", "momentum"])
def test_accumulation_equals_one_process_for_ten_steps(accumulation: int, name: str) -> None:
    compare_accumulation(accumulation, name, num_steps=10)


@distributed(world_size=2)
@grid(stage=(1, 3))
def test_several_backwards_before_a_step_add_up(stage: int) -> None:
    """No configured accumulation is needed; each backward adds its mean, so to rounding."""

    def three_losses(way: Naive | Zero) -> None:
        for index in range(3):
            way.backward(awkward_loss(way.model, index))

    recipe = Recipe(optimizer=sgd)
    naive, zero = Naive(recipe), Zero(recipe, stage=stage, **SMALL)
    for _ in range(2):
        three_losses(naive)
        three_losses(zero)
        for name, wanted in naive.grads().items():
            grad = zero.grads()[name]
            assert (grad is None) == (wanted is None)
            assert grad is None or relative_difference(grad, wanted) < 1e-6
        naive.step()
        zero.step()
    weights = zero.weights()
    for name in weights:
        assert relative_difference(weights[name], naive.weights()[name]) < 1e-6
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_model_zero_grad_clears_what_was_reduced_and_what_was_kept_under_no_sync(stage: int) -> None:
    zero = Zero(Recipe(), stage=stage)
    for _ in range(2):
        with zero.no_sync():
            zero.backward(awkward_loss(zero.model, 3))
        zero.model.zero_grad()
        zero.backward(awkward_loss(zero.model, 3))
        zero.model.zero_grad()
    assert all(grad is None for grad in zero.grads().values())
    zero.backward(awkward_loss(zero.model, 0))
    naive = Naive(Recipe())
    naive.backward(awkward_loss(naive.model, 0))
    for name, wanted in naive.grads().items():
        grad = zero.grads()[name]
        assert (grad is None and wanted is None) or torch.equal(grad, wanted), name
    zero.close()


# -- buckets, overlap, unused, tied and twice-used parameters ------------------------------------------------


def compare_overlap(stage: int, num_steps: int) -> None:
    """Train forty layers of eighty buckets with and without overlap."""
    traces = []
    for overlap in (True, False):
        zero = Zero(Recipe(build=lambda _: Mlp(depth=40)), stage=stage, overlap_comm=overlap, **SMALL)
        assert len(zero.engine.buckets) == 80
        traces.append(train_with(zero, square_loss, num_steps))
        zero.close()
    assert_same_bits(traces[0], traces[1])


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
@grid(stage=(1, 3))
def test_overlap_changes_no_bit_in_eighty_buckets(stage: int) -> None:
    compare_overlap(stage, num_steps=3)


@pytest.mark.slow
@distributed(world_size=2, timeout=600)
@grid(stage=STAGES)
def test_overlap_changes_no_bit_in_thirty_steps_of_eighty_buckets(stage: int) -> None:
    compare_overlap(stage, num_steps=30)


@distributed(world_size=2)
@grid(stage=(1, 3), recompute=[None, "non-reentrant", "reentrant"])
def test_a_model_used_twice_in_a_loss_equals_naive_data_parallelism(
    stage: int, recompute: str | None
) -> None:
    """Re-entrant: gradients come in parts, so the order of additions differs: to rounding."""

    def siamese(model: nn.Module, step: int) -> Tensor:
        (left, targets), (right, _) = batches(2 * step + 2, rank())[2 * step :]
        return loss_of(model(left) + model(right), targets)

    recipe = Recipe(build=lambda _: Awkward(recompute))
    compare(
        recipe,
        siamese,
        tolerance=1e-6 if recompute == "reentrant" else 0.0,
        num_steps=4,
        stage=stage,
        **SMALL,
    )


class SharedTwice(nn.Module):
    """Re-entrant recomputation delivers the gradient of the first layer in three parts."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(3))
        self.is_reentrant = recompute == "reentrant"

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        for layer in (first, second, first, third, first):
            inner = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.is_reentrant)
            x = x + torch.tanh(inner)
        return x


@distributed(world_size=2)
@grid(overlap=[True, False], recompute=["non-reentrant", "reentrant"])
def test_a_module_recomputed_several_times_in_one_backward_loses_no_gradient(
    recompute: str, overlap: bool
) -> None:
    """The bucket of the shared module is reduced before the last part is there."""

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank())
        return model(torch.randn(4, 15, generator=generator, requires_grad=True)).pow(2).mean()

    recipe = Recipe(build=lambda _: SharedTwice(recompute), optimizer=sgd)
    for stage in STAGES:
        with subtest(f"stage={stage}"):
            compare(recipe, loss, tolerance=1e-6, num_steps=3, stage=stage, overlap_comm=overlap, **SMALL)


class Sometimes(nn.Module):
    """A parameter that nobody uses, and one that only rank 0 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(15, 15)
        self.never = nn.Parameter(torch.randn(7, 15))
        self.sometimes = nn.Parameter(torch.randn(15))

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x)
        return x * self.sometimes if rank() == 0 else x


@distributed(world_size=2, timeout=30)
@grid(stage=STAGES, overlap=[True, False])
def test_a_parameter_used_on_one_rank_gets_half_its_gradient_and_an_unused_one_none(
    stage: int, overlap: bool
) -> None:
    """AdamW would decay an unused parameter that was given a gradient of zeros."""
    recipe = Recipe(build=lambda _: Sometimes(), optimizer=adamw)
    never = recipe.model().never.detach().clone()
    zero = Zero(recipe, stage=stage, overlap_comm=overlap, reduce_bucket_size=10)
    loss = square_loss(zero.model, 0)
    zero.backward(loss)
    assert zero.engine.full_grad(zero.model.never) is None
    zero.optimizer.zero_grad()
    compare(recipe, square_loss, num_steps=4, stage=stage, overlap_comm=overlap, reduce_bucket_size=10)
    trace = train_with(zero, square_loss)
    if rank() == 0:
        assert torch.equal(trace.weights[-1]["never"], never)
    zero.close()


@distributed(world_size=3, timeout=30)
@grid(stage=STAGES[:3])
def test_a_loss_without_parameters_on_one_rank_hangs_nobody(stage: int) -> None:
    """One rank has an empty batch and a constant loss; `engine.backward` takes part all the same."""

    def loss(model: nn.Module, step: int) -> Tensor:
        return torch.zeros((), requires_grad=True) if rank() == step % 3 else square_loss(model, step)

    compare(Recipe(build=lambda _: Mlp()), loss, tolerance=1e-6, stage=stage, **SMALL)


@distributed(world_size=2)
@grid(stage=(1, 3))
def test_a_tied_weight_at_both_ends_of_forty_layers_equals_naive_data_parallelism(stage: int) -> None:
    recipe = Recipe(build=lambda _: Mlp(depth=40, tied=True))
    compare(recipe, square_loss, stage=stage, overlap_comm=True, **SMALL)


@distributed(world_size=2)
@grid(stage=STAGES[:3])
def test_the_order_of_use_may_change_from_step_to_step_and_differ_between_ranks(stage: int) -> None:
    """Ranks apply layers in their own order, and change it; below stage 3, where nothing is gathered."""

    def shuffled(model: Mlp, step: int) -> Tensor:
        x = torch.randn(4, 15, generator=torch.Generator().manual_seed(step))
        order = torch.randperm(6, generator=torch.Generator().manual_seed(10 * step + rank()))
        for index in order[: 6 - step % 3].tolist():
            x = x + torch.tanh(nn.functional.linear(x, model.layers[index].weight, model.layers[index].bias))
        return x.pow(2).mean()

    compare(Recipe(build=lambda _: Mlp(depth=6)), shuffled, num_steps=6, stage=stage, **SMALL)


@distributed(world_size=1, process_group=False)
def test_a_tiny_sub_group_steps_every_parameter_once() -> None:
    """Step counts and moments are right with many sub-groups and three param groups."""

    def three_groups(model: nn.Module) -> Optimizer:
        trainable = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trainable[i::3], "lr": 10.0 ** -(i + 1)} for i in range(3)]
        return torch.optim.AdamW(groups, weight_decay=0.1)

    recipe = Recipe(num_steps=5, optimizer=three_groups)
    reference = train_whole_batch(recipe)
    for stage in STAGES:
        with subtest(f"stage={stage}"):
            zero = Zero(recipe, stage=stage, sub_group_size=1, **SMALL)
            assert len(zero.engine.buckets) >= 10
            trace = train(zero, recipe)
            assert_same_bits(trace, reference)
            state = zero.optimizer.state_dict()["state"]
            assert {float(entry["step"]) for entry in state.values()} == {5.0}


# -- ranks that start apart ----------------------------------------------------------------------------------


@distributed(world_size=[2, 3])
@grid(stage=STAGES)
def test_ranks_that_start_with_other_weights_and_buffers_get_those_of_rank_0(stage: int) -> None:
    torch.manual_seed(rank())
    model = Awkward()
    own = model.bias_table.clone()
    torch.manual_seed(0)
    wanted = Awkward().state_dict()
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0))
    assert rank() == 0 or not torch.equal(own, model.bias_table)
    assert torch.equal(model.bias_table, wanted["bias_table"])
    with engine.unsharded_params():
        for name, param in model.named_parameters():
            assert torch.equal(param, wanted[name]), name
    engine.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_float_buffers_follow_rank_0_in_training_forwards(stage: int) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(15)
            self.out = nn.Linear(15, 15)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(x))

    zero = Zero(Recipe(build=lambda _: Counting(), optimizer=sgd), stage=stage)
    train_with(zero, square_loss, num_steps=3)
    zero.model(torch.ones(4, 15))  # broadcasts rank 0's, then every rank updates it with the same batch
    means = [torch.empty(15) for _ in range(world_size())]
    dist.all_gather(means, zero.model.norm.running_mean)
    assert torch.equal(means[0], means[1])
    zero.close()


@distributed(world_size=2)
@grid(stage=(1, 2))
def test_a_rank_that_evaluates_alone_waits_for_nobody_and_has_rank_0s_statistics(stage: int) -> None:
    zero = Zero(Recipe(build=lambda _: nn.Sequential(nn.BatchNorm1d(15)), optimizer=sgd), stage=stage)
    train_with(zero, square_loss, num_steps=3)
    zero.model.eval()
    with torch.no_grad():
        outputs = [zero.model(torch.ones(4, 15)) for _ in range(1 + rank())]
    found = [torch.empty(4, 15) for _ in range(world_size())]
    dist.all_gather(found, outputs[0])
    assert torch.equal(found[0], found[1])
    zero.close()
