"""Lightning's ways to optimise, 2 ranks over gloo: schedulers, hooks, manual optimization, recomputation.

Oracle: the same Trainer with Lightning's `DDPStrategy`. Tolerance 0 throughout, the same bits of the weights
and of every rank's losses: 2 ranks, and one reduction per step (whole gradients are accumulated where a step
has several backwards).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy as zs
from tests.harness import distributed, rank, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    compare_with_ddp,
    ddp,
    fit,
    zero,
)

# -- schedulers ----------------------------------------------------------------------------------------------


class Scheduled(TinyModule):
    """Notes every learning rate that a step was made with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        kinds = torch.optim.lr_scheduler
        if self.kind == "every second step":
            settings = {"scheduler": kinds.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 2}
        elif self.kind == "every epoch":
            settings = {"scheduler": kinds.StepLR(optimizer, 1, gamma=0.5), "interval": "epoch"}
        elif self.kind == "plateau":  # an epoch whose loss is not lower by 1000 halves the rate
            plateau = kinds.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=1e3, threshold_mode="abs"
            )
            settings = {"scheduler": plateau, "monitor": "val_loss"}
        else:  # moves the momentum too
            settings = {"scheduler": kinds.OneCycleLR(optimizer, 0.02, total_steps=20), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": settings}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@distributed(world_size=2)
def test_schedulers_by_step_epoch_and_plateau_give_the_rates_of_ddp() -> None:
    analytic = {  # 3 epochs of 2 steps
        "every second step": [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3],
        "every epoch": [1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 2.5e-3],
        "plateau": [1e-2, 1e-2, 1e-2, 1e-2, 5e-3, 5e-3],
    }
    for kind in ("every second step", "every epoch", "plateau", "one cycle"):
        outcomes = compare_with_ddp(
            lambda kind=kind: Scheduled(kind), name=kind, num_batches=2, max_epochs=3, limit_val_batches=1
        )
        with subtest(kind):
            expected = analytic.get(kind, outcomes[0].module.rates)
            assert all(found.module.rates == expected for found in outcomes)
            assert len(set(expected)) > 1


@distributed(world_size=2)
def test_a_scheduler_moves_once_per_step_whatever_is_accumulated() -> None:
    """Neither per micro-batch nor once for each rank."""
    for accumulate in (1, 4):
        outcomes = compare_with_ddp(
            TinyModule, name=f"{accumulate}", accumulate_grad_batches=accumulate, num_batches=4
        )
        with subtest(f"{accumulate} micro-batches"):
            for found in outcomes:  # StepLR(step_size=2, gamma=0.5), in every step
                halvings = found.trainer.global_step // 2
                assert found.trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5**halvings
                assert found.trainer.global_step == 8 // accumulate


# -- overridden hooks ----------------------------------------------------------------------------------------


class Overridden(TinyModule):
    """Overrides what Lightning lets a module override around a step."""

    def __init__(self) -> None:
        super().__init__()
        self.backwards = 0
        self.cleared = 0
        self.scheduled = 0

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.backwards += 1
        (loss * 0.5).backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:  # the warm-up of Lightning's documentation
            group["lr"] = 1e-3 * min(1.0, (self.trainer.global_step + 1) / 6)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.cleared += 1
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.scheduled += 1


@distributed(world_size=2)
def test_overrides_of_backward_optimizer_step_zero_grad_and_scheduler_step_count_as_under_ddp() -> None:
    plain = fit(zero(1))
    outcomes = compare_with_ddp(Overridden)
    for found in outcomes:
        module = found.module
        assert module.backwards == module.cleared == module.scheduled == found.trainer.global_step == 10
        assert found.trainer.optimizers[0].param_groups[0]["lr"] == 1e-3
    if rank() == 0:  # they do change the result
        assert not torch.equal(outcomes[0].weights["head.weight"], plain.weights["head.weight"])


class Inspecting(TinyModule):
    """Looks at every whole gradient before the step, and halves the rate where one is large."""

    def __init__(self) -> None:
        super().__init__()
        self.grads: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        strategy = self.trainer.strategy
        grads = {}
        for name, param in self.named_parameters():
            if param.requires_grad:
                is_zero = isinstance(strategy, zs.ZeroStrategy)
                grad = strategy.engine.full_grad(param) if is_zero else param.grad
                assert grad is not None, name
                grads[name] = grad.clone()
        self.grads.append(grads)
        if max(float(grad.abs().max()) for grad in grads.values()) > 0.05:
            optimizer.param_groups[0]["lr"] *= 0.5


@distributed(world_size=2)
def test_gradients_seen_before_the_step_are_those_of_ddp_on_every_rank() -> None:
    outcomes = compare_with_ddp(Inspecting, num_batches=3, max_epochs=1)
    for found in outcomes[1:]:
        for seen, expected in zip(found.module.grads, outcomes[0].module.grads, strict=True):
            assert seen.keys() == expected.keys()
            for name, grad in expected.items():
                assert torch.equal(seen[name], grad), name
    assert outcomes[0].trainer.optimizers[0].param_groups[0]["lr"] < 5e-3


# -- manual optimization -------------------------------------------------------------------------------------


class Manual(TinyModule):
    """Accumulates by itself: windows of 2 micro-batches, synchronised by `toggle_model` in the last alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        ends_window = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=ends_window):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1]) / 2
            self.manual_backward(loss)
            self.losses.append(loss.detach().clone())
            if ends_window:
                self.clip_gradients(optimizer, gradient_clip_val=0.003, gradient_clip_algorithm="value")
                optimizer.step()
                optimizer.zero_grad()
                self.lr_schedulers().step()


@distributed(world_size=2)
def test_manual_accumulation_with_toggle_model_equals_ddp_bit_for_bit() -> None:
    for found in compare_with_ddp(Manual, num_batches=6):
        assert found.trainer.global_step == 6
        assert found.trainer.optimizers[0].param_groups[0]["lr"] == 1e-2 * 0.5**3


class ThreeOptimizers(TinyModule):
    """Three optimizers of three classes, each with a scheduler of its own, stepped at different rates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers = self.optimizers()
        schedulers = self.lr_schedulers()
        for number, (optimizer, scheduler) in enumerate(zip(optimizers, schedulers, strict=True)):
            if batch_idx % (number + 1):
                continue
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.AdamW([*self.first.parameters(), *self.blocks[0].parameters()], lr=1e-2),
            torch.optim.SGD(
                [*self.blocks[1].parameters(), *self.blocks[2].parameters()], lr=0.1, momentum=0.9
            ),
            torch.optim.RMSprop(self.head.parameters(), lr=1e-3),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in optimizers]


@distributed(world_size=2)
def test_three_optimizers_with_their_own_schedulers_equal_ddp_bit_for_bit() -> None:
    for found in compare_with_ddp(ThreeOptimizers):
        assert len(found.trainer.optimizers) == 3
        rates = [optimizer.param_groups[0]["lr"] for optimizer in found.trainer.optimizers]
        assert rates == [1e-2 * 0.5**5, 0.1 * 0.5**3, 1e-3 * 0.5**2]


# -- recomputation and compile -------------------------------------------------------------------------------


class Recomputing(TinyModule):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        if use_reentrant:  # the gradient of a tied weight would come in two parts, and be reduced in two
            self.last.weight = nn.Parameter(self.last.weight.detach().clone())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(self.last(self.frozen(x))) * self.scale


@distributed(world_size=2)
def test_gradient_checkpointing_of_both_kinds_equals_ddp_without_it() -> None:
    """The oracle does not recompute, which changes no bit. Reentrant: of a model without the tied weight."""
    for use_reentrant in (False, True):
        with subtest(f"ddp, use_reentrant={use_reentrant}"):
            expected = fit(ddp(), lambda kind=use_reentrant: NotRecomputing(kind), max_epochs=1)
        for stage in (1, 2, 3):
            with subtest(f"stage {stage}, use_reentrant={use_reentrant}"):
                found = fit(zero(stage), lambda kind=use_reentrant: Recomputing(kind), max_epochs=1)
                assert_same_weights(found.weights, expected.weights)
                assert_same_losses(found.module, expected.module)


class NotRecomputing(Recomputing):
    forward = TinyModule.forward


class CompiledBlocks(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks[:2]:
            block.compile(backend="aot_eager")
        self.blocks[2] = torch.compile(self.blocks[2], backend="aot_eager")


@pytest.mark.slow
@distributed(world_size=2, timeout=200)
def test_compiled_blocks_equal_eager_ones_under_ddp() -> None:
    """Both ways to compile a block: hooks run between graphs."""
    with subtest("ddp"):
        expected = fit(ddp(), num_batches=3)
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            torch._dynamo.reset()
            found = fit(zero(stage), CompiledBlocks, num_batches=3)
            weights = {name.replace("_orig_mod.", ""): value for name, value in found.weights.items()}
            assert_same_weights(weights, expected.weights)
            assert_same_losses(found.module, expected.module)


class WithoutLog(TinyModule):
    """Lightning's own `log` inspects signatures, which the compiler of torch 2.13 cannot follow."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self(batch[0])


@pytest.mark.slow
@distributed(world_size=2, timeout=200)
def test_a_compiled_lightning_module_equals_ddp() -> None:
    with subtest("ddp"):
        expected = fit(ddp(), WithoutLog, num_batches=3)
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            torch._dynamo.reset()
            found = fit(zero(stage), lambda: torch.compile(WithoutLog(), backend="aot_eager"), num_batches=3)
            assert_same_weights(found.weights, expected.weights)
