"""Every precision of Lightning on shards: which dtype is where, and fp16 that skips on all ranks together.

Oracles: stock DDP with torch's own GradScaler for 16-mixed (at two ranks the same bits: scales are powers of
two, and additions have one order), the other stages for 16-true, for which Lightning has no master weights,
and the documented table of dtypes. On the CPU "16-mixed" by name is bf16-mixed (Lightning says so), so the
plugin is passed.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import HalfPrecision as FabricHalf
from lightning.fabric.plugins.precision import MixedPrecision as FabricMixed
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.fabric_support import Net, make_fabric
from tests.integrations.fabric_support import ddp as fabric_ddp
from tests.integrations.fabric_support import zero as fabric_zero
from tests.integrations.lightning_support import (
    HarnessEnvironment,
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    zero,
)

# A few overflows, then growth and overflows again: every rule of the scaler is seen in ten steps.
OVERFLOWING = {"init_scale": 2.0**22, "growth_interval": 2, "backoff_factor": 0.25}


def mixed(**settings: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", _grad_scaler(**settings))


def _grad_scaler(**settings: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**OVERFLOWING, **settings})


class Plain(TinyModule):
    """Without a scheduler, which stock Lightning advances on skipped steps too."""

    def configure_optimizers(self) -> Any:
        return super().configure_optimizers()["optimizer"]


class Recorder(Callback):
    """Notes, after every batch, whether the weights moved, the scale, the learning rate and the step."""

    def __init__(self) -> None:
        self.moved: list[bool] = []
        self.scales: list[float] = []
        self.lrs: list[float] = []
        self.global_steps: list[int] = []
        self._last: Tensor | None = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._last = _a_weight(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, batch_idx: int) -> None:
        self.moved.append(not torch.equal(_a_weight(trainer), self._last))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        engine = getattr(trainer.strategy, "_engine", None)
        self.scales.append(scaler.get_scale() if scaler is not None else engine.loss_scaler.scale)
        self.lrs.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.global_steps.append(trainer.global_step)


def _a_weight(trainer: Any) -> Tensor:
    engine = getattr(trainer.strategy, "_engine", None)
    param = trainer.lightning_module.head.weight
    if engine is None:
        return param.detach().clone()
    with engine.unsharded_params():
        return param.detach().clone()


@distributed(world_size=2)
def test_16_mixed_equals_ddp_with_the_stock_scaler_bit_for_bit_with_the_same_skipped_steps() -> None:
    grid: dict[str, dict[str, Any]] = {
        "plain": {},
        "accumulated": {"accumulate_grad_batches": 2},
        "clipped by value": {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
    }
    for name, settings in grid.items():
        with subtest(f"{name}, ddp"):
            watch = Recorder()
            expected = fit(ddp(), Plain, plugins=[mixed()], callbacks=[watch], **settings)
            assert True in watch.moved and len(set(watch.scales)) > 2
        for stage in {"plain": (1, 3), "accumulated": (2,), "clipped by value": (3,)}[name]:
            with subtest(f"{name}, stage {stage}"):
                seen = Recorder()
                found = fit(
                    zero(stage, accumulate_whole_gradients=True),
                    Plain,
                    plugins=[mixed()],
                    callbacks=[seen],
                    **settings,
                )
                assert (seen.moved, seen.scales, seen.global_steps) == (
                    watch.moved,
                    watch.scales,
                    watch.global_steps,
                )
                assert_same_losses(found.module, expected.module)
                assert_same_weights(found.weights, expected.weights)
    with subtest("clipped by norm"):
        expected = fit(ddp(), Plain, plugins=[mixed()], gradient_clip_val=0.05)
        found = fit(zero(3), Plain, plugins=[mixed()], gradient_clip_val=0.05)
        assert_same_weights(found.weights, expected.weights, tolerance=1e-4)


@pytest.mark.slow
@distributed(world_size=3)
def test_16_mixed_skips_on_all_ranks_at_three_ranks_and_the_stages_agree() -> None:
    outcomes = []
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            seen = Recorder()
            outcomes.append((fit(zero(stage), Plain, plugins=[mixed()], callbacks=[seen]), seen))
            assert False in seen.moved and True in seen.moved
            assert seen.moved == outcomes[0][1].moved
            assert_same_weights(outcomes[-1][0].weights, outcomes[0][0].weights)


class NanOnRank1(Plain):
    """The second batch's loss is NaN on rank 1 alone."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if rank() == 1 and batch_idx == 1 else loss


@distributed(world_size=2)
def test_nan_on_one_rank_skips_the_step_on_all_and_the_next_begins_clean() -> None:
    fp16 = {"initial_scale_power": 6}
    cases = {
        "16-mixed": lambda: {"plugins": [mixed(init_scale=64.0)]},
        "16-true": lambda: {"precision": "16-true"},
    }
    for name, settings in cases.items():
        for stage in (1, 3):
            with subtest(f"{name}, stage {stage}"):
                seen = Recorder()
                fit(zero(stage, fp16=fp16), NanOnRank1, callbacks=[seen], max_epochs=1, **settings())
                assert seen.moved == [True, False, True, True, True]


@pytest.mark.slow
@distributed(world_size=2)
def test_16_true_is_the_same_at_all_stages_and_near_fp32() -> None:
    fp16 = {"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 4}
    outcomes = []
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            seen = Recorder()
            found = fit(zero(stage, fp16=fp16), Plain, precision="16-true", callbacks=[seen], num_batches=6)
            assert False in seen.moved and True in seen.moved
            outcomes.append((found, seen))
            assert seen.moved == outcomes[0][1].moved and seen.scales == outcomes[0][1].scales
            assert_same_weights(found.weights, outcomes[0][0].weights)
            assert_same_losses(found.module, outcomes[0][0].module)
            assert found.trainer.global_step == 12, "Lightning counts skipped steps"
    with subtest("near fp32, with a scale that fits"):
        found = fit(zero(3, fp16={"initial_scale_power": 4}), Plain, precision="16-true")
        for name, value in fit(zero(3), Plain).weights.items():
            distance = (found.weights[name].float() - value).norm()
            assert distance <= 0.01 * value.norm().clamp_min(1.0), name


@distributed(world_size=2)
def test_a_scheduler_stepped_with_the_optimizer_waits_while_steps_are_skipped() -> None:
    """StepLR halves the rate after every second update; get_last_lr works before the first."""
    for name, settings in (
        ("16-mixed", {"plugins": [mixed(growth_interval=1000)]}),
        ("16-true", {"precision": "16-true"}),
    ):
        with subtest(name):
            seen = Recorder()
            fp16 = {"initial_scale_power": 20, "hysteresis": 1}
            found = fit(zero(2, fp16=fp16), TinyModule, callbacks=[seen], **settings)
            scheduler = found.trainer.lr_scheduler_configs[0].scheduler
            assert seen.moved[0] is False and True in seen.moved
            applied = 0
            for moved, lr in zip(seen.moved, seen.lrs, strict=True):
                applied += moved
                assert lr == pytest.approx(1e-2 * 0.5 ** (applied // 2))
            assert scheduler.get_last_lr()[0] == seen.lrs[-1]
            assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
            assert "step" not in scheduler.state_dict()


class Dtypes(LightningModule):
    """One linear layer, noting the dtype of all that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.seen: dict[str, torch.dtype] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        output = self.layer(batch[0])
        loss = nn.functional.mse_loss(output, batch[1])
        self.seen = {
            "weights": self.layer.weight.dtype,
            "inputs": batch[0].dtype,
            "outputs": output.dtype,
            "loss": loss.dtype,
        }
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


@distributed(world_size=2)
def test_each_precision_has_the_dtypes_of_the_table_and_takes_an_fp32_batch() -> None:
    """Weights, masters (Adam's state follows them), inputs, outputs, loss; the scale."""
    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    table: dict[str, tuple[torch.dtype, ...]] = {
        "32-true": (single, single, single, single, single),
        "16-mixed": (single, single, single, half, single),
        "bf16-mixed": (single, single, single, brain, single),
        "16-true": (half, single, half, half, half),
        "bf16-true": (brain, single, brain, brain, brain),
        "64-true": (double, double, double, double, double),
    }
    for precision, (weights, masters, inputs, outputs, loss) in table.items():
        for stage in (1, 3) if precision.startswith("16") else (2,):
            with subtest(f"{precision}, stage {stage}"):
                how: dict[str, Any] = {"precision": precision}
                if precision == "16-mixed":
                    how = {"plugins": [mixed(init_scale=8.0)]}
                found = fit(
                    zero(stage, fp16={"initial_scale_power": 3}),
                    Dtypes,
                    max_epochs=1,
                    num_sanity_val_steps=0,
                    limit_val_batches=0,
                    **how,
                )
                assert found.module.seen == {
                    "weights": weights,
                    "inputs": inputs,
                    "outputs": outputs,
                    "loss": loss,
                }
                engine = found.trainer.strategy.engine
                (optimizer,) = engine.optimizers
                for param in optimizer.params():
                    for _, master in optimizer.slices_of(param):
                        assert master.dtype == optimizer.state[master]["exp_avg"].dtype == masters
                assert engine.loss_scaler.scale == (8.0 if precision == "16-true" else 1.0)


class ManualMixed(Plain):
    """Manual optimization, stepping and clipping as users of a scaler do."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@distributed(world_size=2)
def test_manual_optimization_scales_and_skips_too() -> None:
    with subtest("16-mixed, ddp"):
        watch = Recorder()
        expected = fit(ddp(), ManualMixed, plugins=[mixed()], callbacks=[watch])
    with subtest("16-mixed, stage 3"):
        seen = Recorder()
        found = fit(zero(3), ManualMixed, plugins=[mixed()], callbacks=[seen])
        assert seen.moved == watch.moved and False in seen.moved
        assert_same_weights(found.weights, expected.weights)
    with subtest("16-true, stage 2"):
        seen = Recorder()
        fp16 = {"initial_scale_power": 20, "hysteresis": 1}
        fit(zero(2, fp16=fp16), ManualMixed, precision="16-true", callbacks=[seen])
        assert seen.moved[0] is False and seen.moved[-1] is True


@pytest.mark.slow
@distributed(world_size=2)
def test_the_state_of_the_scaler_crosses_from_ddp_to_zero_and_back(tmp_path: Path) -> None:
    def half(strategy: Any, path: Path | None, save: Path | None) -> Any:
        found = fit(strategy, Plain, plugins=[mixed()], max_epochs=1 if path is None else 2, ckpt_path=path)
        if save is not None:
            found.trainer.save_checkpoint(save)
        return found

    with subtest("ddp throughout"):
        half(ddp(), None, tmp_path / "ddp.ckpt")
        expected = half(ddp(), tmp_path / "ddp.ckpt", None)
        scale = expected.trainer.precision_plugin.scaler.get_scale()
    with subtest("ddp, then stage 3"):
        found = half(zero(3), tmp_path / "ddp.ckpt", None)
        assert_same_weights(found.weights, expected.weights)
        assert found.trainer.precision_plugin.scaler.get_scale() == scale
    with subtest("stage 2, then ddp"):
        half(zero(2), None, tmp_path / "zero.ckpt")
        content = torch.load(tmp_path / "zero.ckpt", weights_only=False)
        assert set(content["MixedPrecision"]) == set(torch.amp.GradScaler("cpu").state_dict())
        found = half(ddp(), tmp_path / "zero.ckpt", None)
        assert_same_losses(found.module, expected.module)
    with subtest("16-true goes on with its scale, also under another stage"):
        fp16 = {"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}
        straight = fit(zero(1, fp16=fp16), Plain, precision="16-true", max_epochs=2)
        first = fit(zero(1, fp16=fp16), Plain, precision="16-true", max_epochs=1)
        first.trainer.save_checkpoint(tmp_path / "half.ckpt")
        scaler = first.trainer.strategy.engine.loss_scaler
        content = torch.load(tmp_path / "half.ckpt", weights_only=False)
        assert content["HalfPrecision"] == scaler.state_dict() and scaler.scale < 2.0**20
        resumed = fit(
            zero(3, fp16=fp16), Plain, precision="16-true", max_epochs=2, ckpt_path=tmp_path / "half.ckpt"
        )
        assert_same_weights(resumed.weights, straight.weights)


@distributed(world_size=2)
def test_the_users_scaler_keeps_its_class_its_settings_and_its_state() -> None:
    class Watched(torch.amp.GradScaler):
        num_updates = 0

        def update(self, *args: Any) -> None:
            self.num_updates += 1
            super().update(*args)

    scaler = Watched("cpu", init_scale=32.0, growth_interval=3)
    found = fit(zero(2), Plain, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=1)
    assert isinstance(found.trainer.precision_plugin.scaler, Watched)
    assert isinstance(found.trainer.precision_plugin, MixedPrecision)
    assert scaler.num_updates == 5 and scaler.get_scale() == 64.0, "the user's object shows what happened"


@distributed(world_size=2)
def test_two_scalers_on_top_of_one_another_are_refused() -> None:
    class Half(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.half()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step([part.half() for part in batch], batch_idx)

    with expect_error(zs.ShardingError, ["on top of", "fp16"]):
        fit(zero(2), Half, plugins=[mixed()], num_sanity_val_steps=0, limit_val_batches=0)


@distributed(world_size=2)
def test_16_mixed_by_name_on_the_cpu_is_bf16_mixed_and_16_true_is_itself() -> None:
    with pytest.warns(UserWarning, match="bf16"):
        trainer = make_trainer(zero(2), precision="16-mixed")
    assert trainer.precision == "bf16-mixed" and trainer.precision_plugin.scaler is None
    trainer = make_trainer(zero(2), precision="16-true")
    assert isinstance(trainer.precision_plugin, HalfPrecision)
    assert len(loader(1)) == 2


def _fabric_run(strategy: Any, plugin: Any) -> tuple[list[bool], dict[str, Tensor]]:
    """Train with Fabric, clipping; returns which steps moved the head, and the weights (on rank 0)."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[HarnessEnvironment(), plugin])
    fabric.launch()
    torch.manual_seed(7)
    net = Net()
    trained = [param for param in net.parameters() if param.requires_grad]
    model, optimizer = fabric.setup(net, torch.optim.AdamW(trained, lr=1e-2))
    generator = torch.Generator().manual_seed(rank())
    history = []
    for _ in range(8):
        x = torch.randn(3, 4, generator=generator)
        loss = nn.functional.mse_loss(model(x).float(), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        weights = fabric.strategy.get_module_state_dict(model._forward_module)
        history.append({name: value.clone() for name, value in weights.items()})
    weight = "head.weight"
    moved = [not torch.equal(a[weight], b[weight]) for a, b in pairwise(history) if a]
    return moved, history[-1]


@distributed(world_size=2)
def test_fabric_scales_as_the_trainer_does() -> None:
    def fabric_mixed() -> Any:
        return FabricMixed("16-mixed", "cpu", _grad_scaler())

    with subtest("16-mixed, ddp"):
        moved, expected = _fabric_run(fabric_ddp(), fabric_mixed())
    for stage in (1, 3):
        with subtest(f"16-mixed, stage {stage}"):
            found = _fabric_run(fabric_zero(stage), fabric_mixed())
            assert_same_weights(found[1], expected)
            if rank() == 0:
                assert found[0] == moved and False in moved and True in moved
    outcomes = []
    for stage in (2, 3):
        with subtest(f"16-true, stage {stage}"):
            fp16 = {"initial_scale_power": 20, "hysteresis": 1}
            outcomes.append(_fabric_run(fabric_zero(stage, fp16=fp16), FabricHalf("16-true")))
            assert_same_weights(outcomes[-1][1], outcomes[0][1])
            if rank() == 0:
                assert outcomes[-1][0] == outcomes[0][0] and set(outcomes[0][0]) == {False, True}


@distributed(world_size=2)
def test_two_models_of_a_fabric_that_one_loss_reaches_share_its_scale() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            strategy = fabric_zero(stage, fp16={"initial_scale_power": 5})
            fabric = make_fabric(strategy, precision="16-true")
            below, above = (
                fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
                for layer in (nn.Linear(4, 15), nn.Linear(15, 1))
            )
            engines = [strategy.engine_of(model) for model, _ in (below, above)]
            assert engines[0].loss_scaler is engines[1].loss_scaler and engines[0].loss_scaler.scale == 32
            before = [engine.full_state_dict() for engine in engines]
            fabric.backward(above[0](below[0](torch.ones(3, 4))).float().pow(2).mean())
            for _, optimizer in (below, above):
                optimizer.step()
            for engine, weights in zip(engines, before, strict=True):
                assert not engine.optimizers[0].step_was_skipped
                for name, value in engine.full_state_dict().items():
                    assert not torch.equal(value, weights[name])
    with subtest("of another Fabric"):
        other = make_fabric(fabric_zero(3, fp16={"initial_scale_power": 5}), precision="16-true")
        other.setup_module(nn.Linear(4, 4))
        with expect_error(zs.ConfigError, ["Linear", "another Fabric"]):
            other.setup_module(engines[0].model)


@distributed(world_size=2)
def test_the_scale_is_in_a_fabric_checkpoint_if_the_plugin_is_in_its_state(tmp_path: Path) -> None:
    def set_up(plugin: Any, power: int) -> tuple[Any, dict[str, Any], list[torch.dtype]]:
        strategy, seen = fabric_zero(3, fp16={"initial_scale_power": power}), []
        fabric = Fabric(
            accelerator="cpu", devices=2, strategy=strategy, plugins=[HarnessEnvironment(), plugin]
        )
        fabric.launch()
        net = nn.Linear(4, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        net.register_forward_pre_hook(lambda _module, args: seen.append(args[0].dtype))
        fabric.backward(model(torch.ones(3, 4)).float().mean())
        optimizer.step()
        state = {"model": model, "optimizer": optimizer, "precision": fabric.strategy.precision}
        return fabric, state, seen

    with subtest("16-true"):
        fabric, state, seen = set_up(FabricHalf("16-true"), 7)
        assert seen == [torch.float16]
        fabric.save(tmp_path / "true.ckpt", state)
        fabric, state, _ = set_up(FabricHalf("16-true"), 3)
        fabric.load(tmp_path / "true.ckpt", state)
        assert fabric.strategy.engine_of(state["model"]).loss_scaler.scale == 2.0**7
    with subtest("16-mixed"):
        fabric, state, seen = set_up(FabricMixed("16-mixed", "cpu", _grad_scaler(init_scale=128.0)), 3)
        assert seen == [torch.float16], "autocast in Fabric casts what is passed in"
        fabric.save(tmp_path / "mixed.ckpt", state)
        fabric, state, _ = set_up(FabricMixed("16-mixed", "cpu", _grad_scaler(init_scale=8.0)), 3)
        fabric.load(tmp_path / "mixed.ckpt", state)
        assert fabric.strategy.precision.scaler.get_scale() == 128.0
