"""mixed_precision of ZeroAccelerator: no, bf16 and fp16, over fp32 parameters and over 16-bit ones.

Oracle: Accelerate's own Accelerator for autocast over fp32 parameters, with torch's own GradScaler for fp16
(Accelerate has none on CPUs). Of 16-bit parameters, which DDP has no masters for, the stages equal one
another. Tolerance 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.accelerate_support import (
    STAGES,
    accelerator_of,
    assert_same,
    assert_sharded,
    new_loader,
    new_model,
    train,
    whole,
)
from tests.models import Mlp, adamw, awkward_loss, inputs, loss_of
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin


@distributed(world_size=2)
def test_bf16_over_fp32_parameters_equals_ddp_bit_for_bit() -> None:
    with subtest("ddp"):
        expected = train(accelerator_of(None, mixed_precision="bf16"), num_steps=4)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage, mixed_precision="bf16")
            assert_same(train(accelerator, num_steps=4), expected)
            model = accelerator._models[0]
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            assert_sharded(accelerator, model, stage)


@distributed(world_size=2)
def test_bf16_parameters_have_fp32_masters_and_take_an_fp32_batch() -> None:
    traces = []
    for stage in STAGES:
        for config, precision in (({"bf16": {"enabled": "auto"}}, "bf16"), ({"bf16": True}, None)):
            with subtest(f"stage {stage}, {config}"):
                accelerator = accelerator_of(stage, config, mixed_precision=precision)
                traces.append(train(accelerator, num_steps=4))
                model = accelerator._models[0]
                assert accelerator.mixed_precision == "bf16"
                assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
                assert accelerator.engine_of(model).ledger.memory["master"] > 0
                assert_same(traces[-1], traces[0])
                net = accelerator.prepare(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
                assert net(torch.ones(2, 4)).dtype == torch.float32  # as Accelerate returns outputs


def scaled(accelerator: Any, poison: int, clip: bool) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Train under fp16; rank 1's loss is infinite in the step `poison`. Returns scales, weights, rates."""
    model = new_model()
    plain = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, plain, new_loader(6), scheduler)
    scales, rates = [], []
    for step, (tokens, targets) in enumerate(loader):
        loss = loss_of(model(tokens), targets)
        accelerator.backward(loss * (math.inf if step == poison and rank() == 1 else 1.0))
        if clip:
            accelerator.clip_grad_norm_(model.parameters(), 1e-1)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
        assert accelerator.optimizer_step_was_skipped == (step == poison), step
        optimizer.zero_grad()
        scale = (
            accelerator.scaler.get_scale()
            if accelerator.scaler is not None
            else accelerator._loss_scaler.scale
        )
        scales.append(scale)
    return scales, whole(accelerator, model), rates


def ddp_with_a_scaler(accelerator: Any) -> Any:
    """Give Accelerate's own what it has on GPUs only: a GradScaler, and autocast under fp16."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", **accelerator.scaler_handler.to_kwargs())
    return accelerator


@distributed(world_size=2)
def test_fp16_over_fp32_parameters_equals_ddp_with_torchs_scaler_also_where_a_step_overflows() -> None:
    handler = GradScalerKwargs(init_scale=1024.0, growth_interval=2)
    for clip in (False, True):
        with subtest(f"ddp, clip {clip}"):
            # An infinite loss reaches all ranks of DDP by the mean, so its ranks skip together.
            expected = scaled(
                ddp_with_a_scaler(accelerator_of(None, mixed_precision="fp16", kwargs_handlers=[handler])),
                2,
                clip,
            )
        for stage in (1, 3):
            with subtest(f"stage {stage}, clip {clip}"):
                accelerator = accelerator_of(stage, mixed_precision="fp16", kwargs_handlers=[handler])
                scales, weights, rates = scaled(accelerator, 2, clip)
                assert scales == expected[0] and rates == expected[2]
                for name, value in expected[1].items():
                    torch.testing.assert_close(weights[name], value, rtol=1e-5 * clip, atol=1e-6 * clip)
                assert_sharded(accelerator, accelerator._models[0], stage)


@distributed(world_size=2)
def test_fp16_parameters_share_the_engines_loss_scale_and_skip_together() -> None:
    fp16 = {"enabled": "auto", "initial_scale_power": 8, "hysteresis": 1}
    for clip in (False, True):
        found = []
        for stage in STAGES:
            with subtest(f"stage {stage}, clip {clip}"):
                accelerator = accelerator_of(stage, {"fp16": fp16}, mixed_precision="fp16")
                assert accelerator.scaler is None
                found.append(scaled(accelerator, 2, clip))
                assert found[-1][0] == [256.0, 256.0, 128.0, 128.0, 128.0, 128.0]
                assert found[-1][2][3] == found[-1][2][2]  # the scheduler has waited
                assert all(torch.equal(found[-1][1][name], value) for name, value in found[0][1].items())
                assert {p.dtype for p in accelerator._models[0].parameters()} == {torch.float16}


@distributed(world_size=2)
def test_one_fp16_loss_of_two_models_is_scaled_once_and_two_optimizers_are_unscaled_once() -> None:
    def run(accelerator: Any, clip: bool) -> dict[str, Tensor]:
        torch.manual_seed(4)
        first, second = Mlp(), Mlp()
        first, second, one, two = accelerator.prepare(
            first, second, torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
        )
        for step in range(3):
            accelerator.backward(second(first(inputs(step))).square().mean())
            if clip:
                accelerator.unscale_gradients()
                accelerator.clip_grad_norm_([*first.parameters(), *second.parameters()], 1e3)
            for optimizer in (one, two):
                optimizer.step()
                optimizer.zero_grad()
        return {
            **whole(accelerator, first),
            **{f"second.{k}": v for k, v in whole(accelerator, second).items()},
        }

    handler = [GradScalerKwargs(init_scale=1024.0)]
    plain = run(accelerator_of(2, mixed_precision="no"), clip=False)
    for stage in (1, 3):
        with subtest(f"stage {stage}, GradScaler"):
            for clip in (False, True):
                found = run(accelerator_of(stage, mixed_precision="fp16", kwargs_handlers=handler), clip)
                for name, value in plain.items():  # twice unscaled, they would be a thousandth
                    torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.01)
        with subtest(f"stage {stage}, fp16 parameters"):
            accelerator = accelerator_of(stage, {"fp16": {"enabled": True}})
            found = run(accelerator, clip=True)
            assert len({id(engine.loss_scaler) for engine in accelerator.living_engines()}) == 1
            for name, value in plain.items():
                torch.testing.assert_close(found[name].float(), value, rtol=0.02, atol=0.01)


@distributed(world_size=2)
def test_clipping_some_of_the_fp16_parameters_leaves_the_others_alone() -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage, {"fp16": {"enabled": True, "loss_scale": 64}})
            model = new_model()
            model, _ = accelerator.prepare(model, adamw(model))
            accelerator.backward(awkward_loss(model, 0))
            engine, head = accelerator.engine_of(model), model.blocks[0].up.weight
            before, other = engine.full_grad(head), engine.full_grad(model.shared.weight)
            norm = accelerator.clip_grad_norm_([head], 1e-3)
            torch.testing.assert_close(norm, before.norm(), rtol=1e-3, atol=0.0)
            torch.testing.assert_close(engine.full_grad(head).norm(), torch.tensor(1e-3), rtol=1e-2, atol=0.0)
            assert torch.equal(engine.full_grad(model.shared.weight), other)


@distributed(world_size=2)
def test_precisions_that_contradict_one_another_are_refused_with_everything_else_at_once() -> None:
    accelerator_of(2)  # the environment of a rank
    plugin = ZeroPlugin(2, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 4})
    with expect_error(
        zs.ConfigError, ["2 faults", "mixed_precision = 'fp16'", "gradient_accumulation_steps = 2"]
    ):
        ZeroAccelerator(mixed_precision="fp16", gradient_accumulation_steps=2, zero_plugin=plugin)
    with expect_error(zs.ConfigError, "mixed_precision = 'fp8'"):
        ZeroAccelerator(mixed_precision="fp8", zero_plugin=ZeroPlugin(2))
