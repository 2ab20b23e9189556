"""Lightning's Trainer, 2 ranks over gloo: training with ZeroStrategy against Lightning's own DDPStrategy.

Oracle: the same Trainer with `DDPStrategy(find_unused_parameters=True)`. Tolerance 0 (the same bits, of
weights and of every rank's losses) wherever the order of additions is DDP's: 2 ranks, one backward a step or
whole gradients accumulated, clipping by value. Clipping by norm: 1e-6, since a norm is summed per slice here
and per tensor there. bf16-true: there is no oracle with fp32 masters in Lightning, so the stages are compared
with one another, bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelSummary
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    compare_with_ddp,
    ddp,
    fit,
    loader,
    make_trainer,
    whole_weights,
    zero,
)


@distributed(world_size=2)
def test_fit_equals_ddp_bit_for_bit() -> None:
    with subtest("ddp"):
        expected = fit(ddp())
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found = fit(zero(stage))
            assert_same_weights(found.weights, expected.weights)
            assert_same_losses(found.module, expected.module)
            lrs = [group["lr"] for group in found.trainer.optimizers[0].param_groups]
            assert lrs == [group["lr"] for group in expected.trainer.optimizers[0].param_groups]
            assert found.trainer.callback_metrics["val_loss"] == expected.trainer.callback_metrics["val_loss"]
            assert found.trainer.model is found.module  # nothing wraps the module


@distributed(world_size=2)
def test_accumulation_with_an_incomplete_last_window_equals_ddp_bit_for_bit() -> None:
    with subtest("ddp"):
        expected = fit(ddp(), accumulate_grad_batches=2)
        assert expected.trainer.global_step == 6  # 5 batches an epoch: 2 + 2 + 1
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found = fit(zero(stage, accumulate_whole_gradients=True), accumulate_grad_batches=2)
            assert found.trainer.global_step == 6
            assert_same_weights(found.weights, expected.weights)
            assert_same_losses(found.module, expected.module)
    with subtest("a window that changes from epoch to epoch"):
        changing = fit(ddp(), callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
        whole = zero(3, accumulate_whole_gradients=True)
        found = fit(whole, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
        assert found.trainer.global_step == changing.trainer.global_step == 7
        assert_same_weights(found.weights, changing.weights)
    with subtest("stages 2 and 3, a reduction per micro-batch"):
        stage2 = fit(zero(2), accumulate_grad_batches=2)
        stage3 = fit(zero(3), accumulate_grad_batches=2)
        assert_same_weights(stage3.weights, stage2.weights)
        # Rounding, through Adam: single elements with moments near zero move, norms hardly.
        assert_same_weights(stage3.weights, expected.weights, tolerance=1e-4)


class OwnClipping(TinyModule):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.003, gradient_clip_algorithm="value")


@distributed(world_size=2)
def test_clipping_equals_ddp() -> None:
    grid: dict[str, tuple[type[TinyModule], dict[str, Any], float]] = {
        "by norm": (TinyModule, {"gradient_clip_val": 0.05}, 1e-6),
        "by value": (TinyModule, {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"}, 0.0),
        "configure_gradient_clipping": (OwnClipping, {}, 0.0),
    }
    with subtest("without clipping"):
        unclipped = fit(zero(3))
    for name, (make_module, settings, tolerance) in grid.items():
        with subtest(f"{name}, ddp"):
            expected = fit(ddp(), make_module, **settings)
        for stage in (1, 3):
            with subtest(f"{name}, stage {stage}"):
                found = fit(zero(stage), make_module, **settings)
                assert_same_weights(found.weights, expected.weights, tolerance)
                assert any(
                    not torch.equal(found.weights[k], unclipped.weights[k]) for k in found.weights
                ) or (not found.weights)


@distributed(world_size=2)
def test_gradient_clipping_of_the_config_counts_where_the_trainer_has_none() -> None:
    with subtest("from the Trainer"):
        expected = fit(zero(2), gradient_clip_val=0.05)
    with subtest("from the config"):
        assert_same_weights(fit(zero(2, gradient_clipping=0.05)).weights, expected.weights)
    with subtest("from both, the same"):
        found = fit(zero(2, gradient_clipping=0.05), gradient_clip_val=0.05)
        assert_same_weights(found.weights, expected.weights)
    with (
        subtest("from both, different"),
        expect_error(zs.ConfigError, ["gradient_clipping", "gradient_clip_val"]),
    ):
        fit(zero(2, gradient_clipping=0.05), gradient_clip_val=0.1)


@distributed(world_size=2)
def test_each_precision_equals_ddp_or_the_other_stages() -> None:
    for precision in ("bf16-mixed", "64-true"):
        with subtest(f"{precision}, ddp"):
            expected = fit(ddp(), precision=precision)
        for stage in (1, 3):
            with subtest(f"{precision}, stage {stage}"):
                found = fit(zero(stage), precision=precision)
                assert_same_weights(found.weights, expected.weights)
                assert_same_losses(found.module, expected.module)
    outcomes = []
    for stage in (1, 2, 3):
        with subtest(f"bf16-true, stage {stage}"):
            outcomes.append(fit(zero(stage), precision="bf16-true"))
            assert outcomes[-1].module.first.weight.dtype == torch.bfloat16
            assert_same_weights(outcomes[-1].weights, outcomes[0].weights)
            assert_same_losses(outcomes[-1].module, outcomes[0].module)
            state = outcomes[-1].trainer.strategy.optimizer_state(outcomes[-1].trainer.optimizers[0])["state"]
            assert all(entry["exp_avg"].dtype == torch.float32 for entry in state.values())
    with subtest("bf16-true near 32-true"):
        reference = fit(zero(3))
        for name, value in reference.weights.items():
            # 8 bits of mantissa in weights and activations, 10 steps of at most lr = 1e-2.
            assert (outcomes[-1].weights[name].float() - value).norm() <= 0.05 * value.norm().clamp_min(
                1.0
            ), name


class Gan(LightningModule):
    """Two optimizers in one training_step, with a second forward after the first step, as GANs have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 5))
        self.critic = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 1))
        self.gain = nn.Parameter(
            torch.ones(5)
        )  # the root's own: used in the scope of the step, before and after one
        self.losses: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(batch[0]) * self.gain).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        first.step()
        self.untoggle_optimizer(first)
        self.losses.append(loss.detach())
        self.toggle_optimizer(second)
        loss = self.critic(self.generator(batch[0]) * self.gain).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.losses.append(loss.detach())

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("score", self.critic(self.generator(batch[0]) * self.gain).mean(), sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam([*self.generator.parameters(), self.gain], lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]


@distributed(world_size=2)
def test_manual_optimization_with_two_optimizers_equals_ddp_bit_for_bit() -> None:
    assert all(len(outcome.trainer.optimizers) == 2 for outcome in compare_with_ddp(Gan))


class EvaluationOnly(TinyModule):
    """Its steps use a parameter of the root itself, outside of any forward."""

    training_step = LightningModule.training_step
    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.full((15,), 0.3))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", (self(batch[0]) + self.offset.sum()).mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", (self(batch[0]) + self.offset.sum()).mean(), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]) + self.offset.sum()


@distributed(world_size=2)
def test_evaluation_equals_ddp_and_builds_no_optimizer() -> None:
    results = {}
    for name, strategy in {"ddp": ddp(), **{f"stage {stage}": zero(stage) for stage in (1, 2, 3)}}.items():
        with subtest(name):
            module, trainer = EvaluationOnly(), make_trainer(strategy)
            validated = trainer.validate(module, loader(2), verbose=False)
            tested = trainer.test(module, loader(2), verbose=False)
            predicted = torch.cat(trainer.predict(module, loader(2)))
            assert trainer.optimizers == []
            results[name] = (validated, tested, predicted)
            assert results[name][:2] == results["ddp"][:2]
            assert torch.equal(predicted, results["ddp"][2])


@distributed(world_size=2)
def test_runs_follow_one_another_on_the_same_module() -> None:
    def run(strategies: list[Any]) -> tuple[TinyModule, dict[str, Tensor], Any]:
        module = TinyModule()
        first, second = (make_trainer(strategy, max_epochs=1) for strategy in strategies)
        first.validate(module, loader(2), verbose=False)
        first.fit(module, loader(2), loader(1))
        predicted = torch.cat(first.predict(module, loader(2)))
        second.fit(module, loader(2), loader(1))  # a new optimizer on the trained weights
        second.test(module, loader(2), verbose=False)
        return module, whole_weights(second), predicted

    with subtest("ddp"):
        module, weights, predicted = run([ddp(), ddp()])
    for stages in ((1, 1), (3, 3), (2, 3)):
        with subtest(f"stages {stages}"):
            found = run([zero(stage) for stage in stages])
            assert_same_losses(found[0], module)
            assert_same_weights(found[1], weights)
            assert torch.equal(found[2], predicted)
    with subtest("stages (3, 2)"), expect_error(zs.ConfigError, ["stage 3", "stage=2", "checkpoint"]):
        run([zero(3), zero(2)])
    with subtest("another module in the same Trainer"):
        expected = TinyModule()
        make_trainer(ddp(), max_epochs=1).fit(expected, loader(2), loader(1))
        trainer = make_trainer(zero(3), max_epochs=1)
        for _ in range(2):
            trainer.fit_loop.epoch_progress.reset()
            other = TinyModule()
            trainer.fit(other, loader(2), loader(1))
            assert trainer.strategy.engine.model is other
            assert_same_losses(other, expected)


@distributed(world_size=2)
def test_model_summary_counts_whole_parameters_at_stage_3() -> None:
    plain = summarize(TinyModule(), max_depth=-1)
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            summary = RecordingSummary(max_depth=-1)
            fit(zero(stage), callbacks=[summary], max_epochs=1)
            for found in summary.seen:  # on every rank, in on_fit_start: after the model was sharded
                assert found.total_parameters == plain.total_parameters > 1000
                assert found.trainable_parameters == plain.trainable_parameters
                assert found.param_nums == plain.param_nums
            assert summary.seen


class RecordingSummary(ModelSummary):
    """Keeps what the stock callback is about to print."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.seen: list[Any] = []

    def _summary(self, trainer: Any, pl_module: Any) -> Any:
        self.seen.append(super()._summary(trainer, pl_module))
        return self.seen[-1]


class Configured(TinyModule):
    """Builds its layers in `configure_model`, under the strategy's and the precision's contexts."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-2})
        self.losses = []

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            built = TinyModule()
            for name, child in built.named_children():
                self.add_module(name, child)
            self.register_buffer("scale", built.scale)


class ConfiguredAnew(Configured):
    def configure_model(self) -> None:
        for name in [name for name, _ in self.named_children()]:
            delattr(self, name)
        self._buffers.clear()
        super().configure_model()


@distributed(world_size=2)
def test_a_model_built_in_configure_model_trains_as_under_ddp() -> None:
    with subtest("ddp"):
        expected = fit(ddp(), Configured)
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            assert_same_weights(fit(zero(stage), Configured).weights, expected.weights)
    with subtest("a module that is built anew for each run"):
        module, trainer = ConfiguredAnew(), make_trainer(zero(3), max_epochs=1)
        trainer.fit(module, loader(2), loader(1))
        trained = trainer.validate(module, loader(2), verbose=False)
        fresh = make_trainer(ddp()).validate(Configured(), loader(2), verbose=False)
        assert trained == fresh  # as with any strategy, the new layers know nothing of the training


@distributed(world_size=2)
def test_settings_that_contradict_one_another_are_refused_on_all_ranks() -> None:
    with (
        subtest("accumulation"),
        expect_error(zs.ConfigError, ["gradient_accumulation_steps", "accumulate_grad_batches"]),
    ):
        fit(zero(2, gradient_accumulation_steps=4), accumulate_grad_batches=2)
    with (
        subtest("bf16 in the config, fp32 in the Trainer"),
        expect_error(zs.ConfigError, ["bf16", "precision"]),
    ):
        fit(zero(2, bf16={"enabled": True}))
    with (
        subtest("fp16 in the config, autocast in the Trainer"),
        expect_error(zs.ConfigError, ["fp16.enabled = true (from keyword)", "'bf16-mixed'", "'16-true'"]),
    ):
        fit(zero(2, fp16={"enabled": True}), precision="bf16-mixed")
    with subtest("no engine yet"), expect_error(zs.ShardingError, "no engine yet"):
        _ = zero(2).engine
    with subtest("LBFGS"), expect_error(zs.ConfigError, "LBFGS"):
        fit(zero(3), WithLbfgs)
    with subtest("the same accumulation"):
        assert fit(zero(2, gradient_accumulation_steps=2), accumulate_grad_batches=2).trainer.global_step == 6


class WithLbfgs(TinyModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@distributed(world_size=2)
def test_pytorch_lightning_has_a_strategy_of_its_own() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    with subtest("fit"):
        module = _in_namespace(pl)
        cls = zs.lightning.strategy_class("pytorch_lightning")
        assert issubclass(cls, pl.strategies.DDPStrategy) and not issubclass(cls, DDPStrategy)
        environments = pytest.importorskip("lightning_fabric.plugins.environments")
        environment = type("Environment", (environments.LightningEnvironment,), _environment_methods())
        trainer = make_trainer("zero3", trainer_class=pl.Trainer, environment=environment)
        assert type(trainer.strategy) is cls
        trainer.fit(module, loader(), loader(2))
        assert_same_weights(whole_weights(trainer), fit(ddp()).weights)


def _in_namespace(pl: Any) -> Any:
    """Return TinyModule's twin on another package's LightningModule."""
    names = {k: v for k, v in vars(TinyModule).items() if k not in ("__init__", "__dict__", "__weakref__")}

    def __init__(self: Any) -> None:
        pl.LightningModule.__init__(self)
        self.save_hyperparameters({"lr": 1e-2})
        built = TinyModule()
        for name, child in built.named_children():
            self.add_module(name, child)
        self.register_buffer("scale", built.scale)
        self.losses = []

    return type("Twin", (pl.LightningModule,), {**names, "__init__": __init__})()


def _environment_methods() -> dict[str, Any]:
    from tests.integrations.lightning_support import HarnessEnvironment

    names = ("creates_processes_externally", "world_size", "global_rank", "local_rank")
    return {name: vars(HarnessEnvironment)[name] for name in names}
