"""fp16 training: one loss scale on all ranks, steps skipped together, every stage the same bits.

Oracles: `ByHand`, mixed-precision training as the papers write it (fp16 model, fp32 masters beside it, scaled
loss, mean over ranks in fp32 rounded once, update of the masters), whole on every rank, and the rules of
DeepSpeed's scaler played out in tests/unit/test_loss_scaler.py. Tolerance 0: the order of additions is the
same, and scales are powers of two.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest, world_size
from tests.models import Awkward, Mlp, adamw, awkward_loss, inputs, sgd
from tests.reference import Naive, Plain, Recipe, Trace, Zero, assert_same_bits, grid
from zero_strategy.config import Fp16
from zero_strategy.loss_scaler import LossScaler

STAGES = (0, 1, 2, 3)
FP16 = {"enabled": True, "initial_scale_power": 8}
# Far too much for these gradients: several steps are skipped until the scale fits, and later ones again.
HUGE = {"enabled": True, "initial_scale_power": 19, "hysteresis": 1, "loss_scale_window": 2}


class ByHand(Naive):
    """fp16 with fp32 masters, written out: no bucket, no shard."""

    def __init__(self, recipe: Recipe, settings: dict[str, Any], wide: bool = False) -> None:
        super().__init__(recipe)
        for param in self.model.parameters():
            param.data = param.data.half()
        self.wide = wide
        self.scaler = LossScaler(Fp16(**settings), is_active=True)
        stand_in = recipe.model()
        self.held = dict(stand_in.named_parameters())  # the masters
        self.optimizer = recipe.optimizer(stand_in)
        self.means: dict[str, Tensor] = {}
        self.skipped: list[bool] = []

    def backward(self, loss: Tensor) -> None:
        self.scaler.note_backward_end()
        super().backward(loss * self.scaler.scale)
        for name, param in self.model.named_parameters():
            used = torch.tensor([int(param.grad is not None)])
            dist.all_reduce(used)
            if not used.item():
                continue
            own = torch.zeros_like(param) if param.grad is None else param.grad
            everybody = [torch.empty_like(own) for _ in range(world_size())]
            dist.all_gather(everybody, own.contiguous())
            mean = sum(everybody[1:], everybody[0].float()) / world_size()
            mean = mean if self.wide else mean.half()
            before = self.means.get(name)
            self.means[name] = mean if before is None else before + mean
            param.grad = None

    def step(self) -> None:
        overflows = any(not mean.isfinite().all() for mean in self.means.values())
        if not overflows:
            for name, param in self.held.items():
                mean = self.means.get(name)
                param.grad = None if mean is None else mean.float() / self.scaler.scale
            self.optimizer.step()
            with torch.no_grad():
                for name, param in self.model.named_parameters():
                    param.copy_(self.held[name])
        self.scaler.update(overflows)
        self.skipped.append(overflows)
        self.means = {}

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


class ZeroFp16(Zero):
    """The engine, noting which steps it skipped, and at which scale."""

    def __init__(self, recipe: Recipe, **settings: Any) -> None:
        super().__init__(recipe, **settings)
        self.skipped: list[bool] = []
        self.scales: list[float] = []

    def backward(self, loss: Tensor) -> None:
        self.scales.append(self.engine.loss_scaler.scale)
        super().backward(loss)

    def step(self) -> None:
        self.optimizer.step()
        self.skipped.append(self.optimizer.step_was_skipped)
        self.optimizer.zero_grad()


def run(way: Plain, recipe: Recipe) -> Trace:
    """Train and keep all losses and the last weights."""
    trace = Trace()
    for step in range(recipe.num_steps):
        for micro in range(recipe.accumulation):
            is_last = micro == recipe.accumulation - 1
            with contextlib.nullcontext() if is_last or recipe.reduces_each else way.no_sync():
                loss = awkward_loss(way.model, step) / recipe.accumulation
                way.backward(loss)
            trace.losses.append(loss.detach())
        if recipe.max_norm is not None:
            way.clip_norm(recipe.max_norm)
        if recipe.max_value is not None:
            way.clip_value(recipe.max_value)
        way.step()
    trace.grads, trace.weights = [{}], [way.weights()]
    way.close()
    return trace


@distributed(world_size=2)
def test_every_stage_equals_mixed_precision_written_out_by_hand() -> None:
    compare_with_by_hand()


@pytest.mark.slow
@distributed(world_size=3)
def test_every_stage_equals_mixed_precision_written_out_by_hand_at_three_ranks() -> None:
    compare_with_by_hand()


def compare_with_by_hand() -> None:
    for name, data_types in (("fp16 gradients", {}), ("fp32 gradients", {"grad_accum_dtype": "fp32"})):
        recipe = Recipe(num_steps=9)
        with subtest(f"{name}, by hand"):
            by_hand = ByHand(recipe, HUGE, wide=bool(data_types))
            reference = run(by_hand, recipe)
            assert by_hand.skipped[0] and not all(by_hand.skipped)
        for stage in STAGES:
            with subtest(f"{name}, stage {stage}"):
                zero = ZeroFp16(recipe, stage=stage, fp16=HUGE, data_types=data_types, reduce_bucket_size=400)
                trace = run(zero, recipe)
                assert zero.skipped == by_hand.skipped
                assert_same_bits(trace, reference)


@distributed(world_size=2)
def test_stages_are_equal_in_fp16_with_clipping_accumulation_and_no_sync() -> None:
    for name, recipe, settings in (
        ("norm", Recipe(num_steps=8, max_norm=0.5), {}),
        ("value", Recipe(num_steps=8, max_value=0.01), {}),
        ("accumulated", Recipe(num_steps=8, accumulation=3), {"accumulate_whole_gradients": True}),
        ("reduced each", Recipe(num_steps=8, accumulation=3, reduces_each=True, max_norm=0.5), {}),
    ):
        first: Trace | None = None
        for stage in STAGES:
            with subtest(f"{name}, stage {stage}"):
                zero = ZeroFp16(recipe, stage=stage, fp16={**FP16, "initial_scale_power": 20}, **settings)
                trace = run(zero, recipe)
                assert zero.skipped[0] and not zero.skipped[-1] and len(set(zero.scales)) > 1
                first = first or trace
                assert_same_bits(trace, first)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_norm_and_clipping_act_on_unscaled_gradients(stage: int) -> None:
    """Oracle: one step of SGD, whose change of a weight is the gradient it was given."""
    for power in (0, 10):
        fp16 = {"enabled": True, "initial_scale_power": power}
        zero = Zero(Recipe(build=lambda _: Mlp(), optimizer=partial(sgd, lr=1.0)), stage=stage, fp16=fp16)
        zero.backward(zero.model(inputs().half()).float().pow(2).mean())
        grads = {name: grad for name, grad in zero.grads().items() if grad is not None}
        wanted = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
        norm = zero.clip_norm(0.125)
        assert float(norm) == pytest.approx(float(wanted), rel=1e-6) and float(norm) > 0.125
        assert zero.optimizer.clip_coefficient == pytest.approx(0.125 / float(wanted), rel=1e-4)
        clipped = zero.grads()
        for name, grad in grads.items():
            torch.testing.assert_close(clipped[name], grad * zero.optimizer.clip_coefficient)
        before = zero.engine.full_state_dict(dtype=torch.float32)
        zero.optimizer.step()
        after = zero.engine.full_state_dict(dtype=torch.float32)
        for name in before:
            torch.testing.assert_close(before[name] - after[name], clipped[name], rtol=1e-4, atol=1e-7)
        zero.optimizer.zero_grad()
        zero.backward(zero.model(inputs().half()).float().pow(2).mean())
        zero.clip_value(1e-3)
        assert max(float(grad.abs().max()) for grad in zero.grads().values() if grad is not None) < 1.001e-3
        zero.close()


@distributed(world_size=1)
@grid(stage=STAGES)
def test_clipping_after_every_micro_batch_is_clipping_at_the_boundary(stage: int) -> None:
    """Nothing is unscaled twice."""
    weights = []
    for clips_each in (True, False):
        zero = ZeroFp16(Recipe(), stage=stage, fp16=FP16)
        for step in range(2):
            for micro in range(4):
                with contextlib.nullcontext() if micro == 3 else zero.no_sync():
                    zero.backward(awkward_loss(zero.model, 4 * step + micro) / 4)
                    if clips_each or micro == 3:
                        zero.clip_norm(0.1)
            assert zero.optimizer.clip_coefficient < 1.0
            zero.step()
        assert not any(zero.skipped)
        weights.append(zero.weights())
        zero.close()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@distributed(world_size=2)
@grid(stage=STAGES)
def test_nan_in_the_loss_of_one_rank_skips_the_step_on_all(stage: int) -> None:
    zero = ZeroFp16(Recipe(), stage=stage, fp16=FP16)
    before = zero.weights()
    loss = awkward_loss(zero.model, 0)
    zero.backward(loss * (float("nan") if rank() == 1 else 1.0))
    zero.step()
    assert zero.optimizer.step_was_skipped
    for name, value in zero.weights().items():
        assert torch.equal(value, before[name])
    assert all(not entry for entry in zero.optimizer.state.values())
    zero.backward(awkward_loss(zero.model, 0))
    zero.step()
    assert not zero.optimizer.step_was_skipped, "zero_grad has cleared what overflowed"
    zero.close()


class Scale(nn.Module):
    """The gradient of each weight is its input: rank r's shard is that of the elements from 32 r on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(96))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@distributed(world_size=3)
@grid(stage=STAGES, clips=[True, False])
def test_one_infinite_element_in_the_shard_of_one_rank_skips_the_step_on_all(stage: int, clips: bool) -> None:
    zero = ZeroFp16(Recipe(build=lambda _: Scale(), optimizer=sgd), stage=stage, fp16=FP16)
    for element in (0, 95, None):
        x = torch.full((96,), 0.5, dtype=torch.float16)
        if element is not None:
            x[element] = float("inf")
        zero.backward(zero.model(x).float().sum())
        if clips:
            assert zero.clip_norm(1.0).isfinite() == (element is None)
        zero.step()
    assert zero.skipped == [True, True, False]
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES, is_synced=[True, False])
def test_a_sum_of_micro_batches_too_large_for_fp16_is_an_overflow_and_none_in_fp32(
    stage: int, is_synced: bool
) -> None:
    for wide in (False, True):
        data_types = {"grad_accum_dtype": "fp32"} if wide else {}
        recipe = Recipe(build=lambda _: Scale(), optimizer=sgd)
        zero = ZeroFp16(recipe, stage=stage, fp16=FP16, data_types=data_types)
        x = torch.full((96,), 40_000.0 / 2**8, dtype=torch.float16)
        with contextlib.nullcontext() if is_synced else zero.no_sync():
            zero.backward(zero.model(x).float().sum())
        zero.backward(zero.model(x).float().sum())
        zero.step()
        assert zero.skipped == [not wide]
        zero.close()


class Poisoned(nn.Module):
    """Two layers, of which the second one's gradient alone is NaN where `poison` is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(15, 15) for _ in range(2))
        self.poison = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        out = self.layers[1](x.detach())
        if out.requires_grad:
            out.register_hook(lambda grad: grad * self.poison)
        return x + out


@distributed(world_size=2)
@grid(stage=STAGES, spoils_the_loss=[True, False])
def test_an_overflow_at_the_smallest_scale_names_the_parameter_the_rank_the_step_and_the_history(
    stage: int, spoils_the_loss: bool
) -> None:
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 1}
    zero = Zero(Recipe(build=lambda _: Poisoned()), stage=stage, fp16=fp16)

    def backward(value: float) -> None:
        value = value if rank() == 1 else 1.0
        zero.model.poison = 1.0 if spoils_the_loss else value
        loss = zero.model(inputs().half()).float().pow(2).mean()
        zero.backward(loss * value if spoils_the_loss else loss)

    for value in (1.0, float("nan"), float("nan")):
        backward(value)
        zero.step()
    backward(float("nan"))
    first = "'layers.0.weight'" if spoils_the_loss else "'layers.1.weight'"
    texts = ["step 3", first, "nan", "shard of rank", "4 from step 0, 2 from step 2, 1 from step 3"]
    texts += ["nan on rank 1", "loss of rank 1"] if spoils_the_loss else ["learning rate", "bf16"]
    with expect_error(zs.ShardingError, texts):
        zero.step()
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_a_loss_that_was_not_scaled_is_refused_on_all_ranks(stage: int) -> None:
    zero = Zero(Recipe(), stage=stage, fp16=FP16)
    with expect_error(zs.ShardingError, ["not scaled", "engine.backward(loss)", "256"]):
        awkward_loss(zero.model, 0).backward()
    zero.model.zero_grad()
    with expect_error(zs.ShardingError, "not scaled"):  # by rank 1 alone
        loss = awkward_loss(zero.model, 0)
        (zero.engine.loss_scaler.scale_loss(loss) if rank() == 0 else loss).backward()
    zero.model.zero_grad()
    other = torch.nn.Linear(3, 3)
    engine = zs.ZeroEngine(other, zs.ZeroConfig(stage=stage, fp16=FP16), loss_scaler=zero.engine.loss_scaler)
    zero.engine.loss_scaler.scale_loss(awkward_loss(zero.model, 0)).backward()
    with expect_error(zs.ShardingError, "not scaled"):  # of the model that the scaled loss has not reached
        other(torch.ones(1, 3).half()).sum().backward()
    engine.close()
    zero.step()
    assert not zero.optimizer.step_was_skipped
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_fp16_sends_one_byte_more_a_step_and_nothing_more_where_a_norm_is_sent(stage: int) -> None:
    def control(**settings: Any) -> tuple[dict[str, int], dict[str, int]]:
        zero = Zero(Recipe(), stage=stage, broadcast_buffers=False, **settings)
        for _ in range(2):
            zero.backward(awkward_loss(zero.model, 0))
            zero.engine.ledger.reset()
            zero.step()
        comm = zero.engine.ledger.comm
        zero.close()
        return comm["control"], comm["all_reduce"]

    nothing = {"calls": 0, "bytes_sent": 0}
    assert control() == control(bf16=True) == (nothing, nothing)
    assert control(fp16=FP16) == ({"calls": 1, "bytes_sent": 1}, nothing)
    assert control(fp16=FP16, gradient_clipping=1.0) == control(bf16=True, gradient_clipping=1.0)


@distributed(world_size=1)
def test_a_scheduler_that_asks_does_not_advance_on_a_skipped_step() -> None:
    """The last learning rate can be asked for at any time, and is the initial one until a step."""
    zero = ZeroFp16(Recipe(), stage=2, fp16={"enabled": True, "initial_scale_power": 24})
    warm_up = torch.optim.lr_scheduler.LambdaLR(zero.optimizer, lambda step: (step + 1) / 10)
    assert warm_up.get_last_lr() == [0.1 * 1e-2, 0.1 * 5e-3]
    for step in range(12):
        zero.backward(awkward_loss(zero.model, step))
        zero.optimizer.step()
        if not zero.optimizer.step_was_skipped:
            warm_up.step()
        zero.skipped.append(zero.optimizer.step_was_skipped)
        zero.optimizer.zero_grad()
        applied = zero.skipped.count(False)
        assert warm_up.get_last_lr()[0] == pytest.approx((applied + 1) / 10 * 1e-2)
    assert zero.skipped[0] and 0 < applied < 12
    zero.close()


@distributed(world_size=2)
@grid(stage=STAGES)
def test_a_fixed_scale_stays_and_skips_what_overflows(stage: int) -> None:
    zero = ZeroFp16(Recipe(num_steps=3), stage=stage, fp16={"enabled": True, "loss_scale": 1000})
    run(zero, Recipe(num_steps=3))
    assert zero.scales == [1000.0] * 3 and not any(zero.skipped)
    zero = ZeroFp16(Recipe(num_steps=3), stage=stage, fp16={"enabled": True, "loss_scale": 2.0**60})
    run(zero, Recipe(num_steps=3))
    assert zero.scales == [2.0**60] * 3 and all(zero.skipped)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_gradients_of_another_optimizer_keep_their_value_when_the_scale_changes(stage: int) -> None:
    """Two optimizers on one loss: a step of the first doubles the scale while the second's gradients wait."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 1}
    zero = Zero(Recipe(build=lambda _: Mlp(), optimizer=_first_layer), stage=stage, fp16=fp16)
    rest = [param for name, param in zero.model.named_parameters() if not name.startswith("layers.0")]
    other = zero.engine.shard_optimizer(torch.optim.SGD(rest, lr=1.0))
    for _ in range(3):
        zero.backward(zero.model(inputs().half()).float().pow(2).mean())
        wanted = zero.grads()
        before = zero.engine.loss_scaler.scale
        zero.optimizer.step()
        for name, grad in zero.grads().items():
            assert grad is not None and torch.equal(grad, wanted[name]), name
        other.step()
        zero.engine.zero_grad()
    assert zero.engine.loss_scaler.scale == 2 * before == 64
    zero.close()


def _first_layer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.layers[0].parameters(), lr=1.0)


@distributed(world_size=2)
@grid(stage=STAGES)
def test_a_checkpoint_restores_the_scale_and_the_run_goes_on_in_the_same_bits(
    stage: int, tmp_path: Path
) -> None:
    recipe = Recipe(num_steps=4)
    fp16 = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 3}
    straight = ZeroFp16(recipe, stage=stage, fp16=fp16)
    for step in range(12):
        straight.backward(awkward_loss(straight.model, step % 4))
        straight.step()
        if step == 5:
            straight.engine.save_checkpoint(tmp_path / f"{stage}")
    expected = straight.weights()
    resumed = ZeroFp16(recipe, stage=3 - stage, fp16={**fp16, "initial_scale_power": 3})
    resumed.engine.load_checkpoint(tmp_path / f"{stage}")
    for step in range(6, 12):
        resumed.backward(awkward_loss(resumed.model, step % 4))
        resumed.step()
    assert resumed.scales == straight.scales[6:] and resumed.skipped == straight.skipped[6:]
    assert any(straight.skipped) and len(set(straight.scales)) > 1
    for name, value in resumed.weights().items():
        assert torch.equal(value, expected[name]), name
    for way in (straight, resumed):
        way.close()


@distributed(world_size=2)
def test_a_model_that_is_fp16_itself_is_scaled_and_its_frozen_part_needs_no_scale() -> None:
    class Half(Awkward):
        pass

    for stage in STAGES:
        with subtest(f"stage {stage}"):
            recipe = Recipe(build=lambda _: Half(), dtype=torch.float16, optimizer=adamw)
            zero = Zero(recipe, stage=stage, fp16={"initial_scale_power": 5})
            assert zero.engine.loss_scaler.is_active and zero.engine.loss_scaler.scale == 32
            zero.backward(awkward_loss(zero.model, 0))
            zero.step()
            assert all(p.dtype == torch.float16 for p in zero.model.parameters())
            zero.close()
            frozen = nn.Sequential(nn.Linear(15, 15).half().requires_grad_(False), nn.Linear(15, 15))
            engine = zs.ZeroEngine(frozen, zs.ZeroConfig(stage=stage))
            assert not engine.loss_scaler.is_active and engine.loss_scaler.scale == 1.0
            engine.close()
