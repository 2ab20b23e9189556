"""16-bit training: the stages agree in every bit, masters and accumulators keep what 16 bits would lose.

Oracles: one stage for the others (tolerance 0), and arithmetic written out where the number is known.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, rank, subtest, world_size
from tests.models import Mlp, TinyGpt, adamw, awkward_loss, inputs, sgd, square_loss
from tests.reference import Naive, Recipe, Trace, Zero, assert_same_bits, compare, grid, train_zero

STAGES = (0, 1, 2, 3)


@distributed(world_size=1)
@grid(stage=STAGES)
def test_every_pair_of_model_and_accumulation_dtype_trains_or_is_refused_by_name(stage: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for accumulate in (None, "fp32", "fp16", "bf16"):
            with subtest(f"{dtype}, grad_accum_dtype={accumulate}"):
                recipe = Recipe(build=lambda _: Mlp(), dtype=dtype, optimizer=sgd)
                settings = {"stage": stage, "data_types": {"grad_accum_dtype": accumulate}}
                if accumulate in ("fp16", "bf16"):
                    with pytest.raises(zs.ConfigError, match=r"data_types\.grad_accum_dtype"):
                        Zero(recipe, **settings)
                    continue
                zero = Zero(recipe, **settings)
                before = zero.weights()
                zero.backward(zero.model(torch.ones(4, 15, dtype=dtype)).float().pow(2).mean())
                zero.step()
                after = zero.weights()
                assert all(value.dtype == dtype for value in after.values())
                assert any(not torch.equal(value, before[name]) for name, value in after.items())
                zero.close()


class Scale(nn.Module):
    """One parameter per element: the gradient of `weight` is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@distributed(world_size=1)
@grid(stage=STAGES, whole=[True, False], is_synced=[True, False])
def test_fp32_accumulation_of_bf16_gradients_loses_nothing(stage: int, whole: bool, is_synced: bool) -> None:
    """256 micro-steps of 1e-3, as bf16 rounds it, with and without a reduction each.

    In bf16 the sum would stop growing at 0.25, where half a unit in the last place is more than 1e-3 / 2.
    """
    zero = Zero(
        Recipe(build=lambda _: Scale(), optimizer=sgd),
        stage=stage,
        bf16=True,
        data_types={"grad_accum_dtype": "fp32"},
        accumulate_whole_gradients=whole,
    )
    small = torch.full((16,), 1e-3, dtype=torch.bfloat16)
    for micro in range(256):
        if is_synced or micro == 255:
            zero.backward(zero.model(small).sum())
        else:
            with zero.no_sync():
                zero.backward(zero.model(small).sum())
    grad = zero.grads()["weight"]
    assert grad is not None and grad.dtype == torch.float32
    torch.testing.assert_close(grad, torch.full((16,), 256 * float(small[0])), atol=1e-4, rtol=0)
    zero.close()


@distributed(world_size=[1, 2])
def test_gradient_norms_of_equal_steps_are_equal_in_bf16() -> None:
    """With lr=0 and one batch nothing may grow from step to step, or differ between stages."""
    norms = set()
    for stage in STAGES:
        zero = Zero(Recipe(optimizer=partial(adamw, lr=0.0)), stage=stage, bf16=True)
        for _ in range(5):
            zero.backward(awkward_loss(zero.model, 0))
            norms.add(float(zero.clip_norm(1.0)))
            zero.step()
        zero.close()
    assert len(norms) == 1, norms


@distributed(world_size=2)
def test_a_small_transformer_in_bf16_has_one_loss_curve_at_all_stages() -> None:
    recipe = Recipe(build=TinyGpt, num_steps=8, max_norm=1.0)
    first: Trace | None = None
    for stage in STAGES:
        with subtest(f"stage={stage}"):
            trace = train_zero(recipe, stage=stage, bf16=True, reduce_bucket_size=2_000)
            first = first or trace
            assert_same_bits(trace, first)
    assert first is not None and first.losses[-1] < first.losses[0]


@distributed(world_size=2)
@grid(stage=STAGES)
def test_bf16_training_moves_fp32_masters_by_less_than_bf16_can_show(stage: int) -> None:
    """A hundred steps of 1e-4 at weights of 1.0, where neighbouring bf16 numbers are 4e-3 to 8e-3 apart."""
    zero = Zero(Recipe(build=lambda _: Scale(), optimizer=partial(sgd, lr=1e-4)), stage=stage, bf16=True)
    for _ in range(100):
        zero.backward(zero.model(torch.ones(16, dtype=torch.bfloat16)).sum())
        zero.step()
    weights = zero.weights()
    if rank() == 0:
        torch.testing.assert_close(weights["weight"].float(), torch.full((16,), 0.99), atol=2e-3, rtol=0)
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_mixed_dtypes_keep_their_own_and_equal_naive_data_parallelism(stage: int) -> None:
    """bf16 beside fp32. The reference has no masters, so bf16 weights agree to their rounding."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(15, 15).to(torch.bfloat16)
            self.high = nn.Linear(15, 15)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.to(torch.bfloat16)).float())

    recipe = Recipe(build=lambda _: Mixed(), optimizer=partial(sgd, lr=0.5))
    zero, naive = Zero(recipe, stage=stage), Naive(recipe)
    for way in (zero, naive):
        way.backward(square_loss(way.model, 0))
    for name, wanted in naive.grads().items():
        grad = zero.grads()[name]
        assert grad is not None and wanted is not None and grad.dtype == wanted.dtype
        assert torch.equal(grad, wanted), name
    zero.step()
    naive.step()
    for name, value in zero.weights().items():
        assert value.dtype == naive.weights()[name].dtype
        torch.testing.assert_close(
            value, naive.weights()[name], rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-7, atol=0
        )
    zero.close()


# -- what modules write into their own weights ---------------------------------------------------------------


class Writes(nn.Module):
    """Renormalises, clamps and sets weights of its own in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 15, max_norm=0.5)
        self.clamped = nn.Linear(15, 15)
        self.table = nn.Parameter(torch.zeros(7, 15))

    def forward(self, step: int) -> Tensor:
        with torch.no_grad():
            self.clamped.weight.clamp_(-0.1, 0.1)
            self.table[step] = 0.25
        tokens = torch.arange(step, step + 3) % 7
        return self.clamped(self.embedding(tokens)) * self.table[:3]


def written_loss(model: nn.Module, step: int) -> Tensor:
    return (model(step).float() - 1.0).square().mean()


class HandMade:
    """The loop one would write: fp32 masters, bf16 parameters; of what was written the master begins anew."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = [param.detach().float() for param in model.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=1e-3, momentum=0.9)

    def step(self) -> None:
        for param, master in zip(self.model.parameters(), self.masters, strict=True):
            is_written = master.bfloat16() != param.detach()
            master[is_written] = param.detach()[is_written].float()
            assert param.grad is not None
            master.grad = param.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self.masters, strict=True):
                param.copy_(master)
                param.grad = None


@distributed(world_size=[1, 2])
@grid(stage=STAGES)
def test_what_a_module_writes_into_its_bf16_weights_reaches_the_masters_and_only_that(
    stage: int,
) -> None:
    """Every rank has the same data, so that the mean of the gradients is each of them."""
    recipe = Recipe(
        build=lambda _: Writes(),
        dtype=torch.bfloat16,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    )
    zero, plain = Zero(recipe, stage=stage), HandMade(recipe.model())
    for step in range(5):
        wanted = written_loss(plain.model, step)
        loss = written_loss(zero.model, step)
        assert torch.equal(loss, wanted), f"step {step}"
        wanted.backward()
        zero.backward(loss)
        if step == 3:  # what was written shows before the step, too
            kept = zero.engine.full_state_dict(dtype=torch.float32)
            assert not kept or float(kept["table"][3, 0]) == 0.25
        plain.step()
        zero.step()
        whole = zero.engine.full_state_dict(dtype=torch.float32)
        for name, master in zip(whole, plain.masters, strict=rank() == 0):
            assert torch.equal(whole[name], master), f"step {step}: {name}"


@distributed(world_size=1, process_group=False)
@grid(stage=STAGES, mode=["bf16", "fp16"])
def test_buffers_keep_their_dtype_and_every_bit_in_16_bit_modes(stage: int, mode: str) -> None:
    """Frequencies of rotary positions, rounded to 16 bits, are other positions."""
    model = Mlp()
    frequencies = 10_000.0 ** -(torch.arange(8) / 8)
    model.register_buffer("frequencies", frequencies.clone())
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, **{mode: {"enabled": True}}))
    assert all(param.element_size() == 2 for param in model.parameters())
    assert model.frequencies.dtype == torch.float32 and torch.equal(model.frequencies, frequencies)
    assert engine.full_state_dict()["frequencies"].dtype == torch.float32
    engine.close()


class Quantised(nn.Module):
    """A frozen weight of bytes and its scale, as in a quantised base model, below an adapter that trains."""

    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (64, 15), dtype=torch.uint8)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(torch.rand(64, 1) / 256, requires_grad=False)
        self.adapter = nn.Linear(15, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, (self.codes.float() - 128) * self.scale) + self.adapter(x)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_frozen_bytes_of_a_quantised_weight_are_sharded_and_used_as_they_are(stage: int) -> None:
    build = lambda _: nn.ModuleDict({"a": Quantised(), "b": Quantised()})  # noqa: E731
    loss = lambda model, step: (model["a"](inputs(step)) * model["b"](inputs(step))).mean()  # noqa: E731
    compare(Recipe(build=build), loss, stage=stage)
    zero = Zero(Recipe(build=build), stage=stage)
    held = [bucket for bucket in zero.engine.buckets if bucket.flat.dtype == torch.uint8]
    assert sum(bucket.layout.numel for bucket in held) == 2 * 64 * 15
    padded = sum(bucket.layout.padded_numel for bucket in held)
    nbytes = sum(bucket.param_shard.numel() if stage == 3 else bucket.flat.numel() for bucket in held)
    assert nbytes == padded // (world_size() if stage == 3 else 1) and padded <= 1.1 * 2 * 64 * 15
    zero.close()
