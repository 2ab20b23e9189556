"""README's "In Lightning write this instead", line by line, with the real Trainer.

Oracle: the usual way under `DDPStrategy`. Tolerance: 0, but for norms, whose additions are in another order.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

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

SHORT: dict[str, Any] = {"num_batches": 3, "max_epochs": 1}
NORM_TOLERANCE = {"rel": 1e-5}


def is_ddp(module: TinyModule) -> bool:
    return not hasattr(module.trainer.strategy, "engine")


class Measures(TinyModule):
    """Takes norms before each step: the usual way under DDP, ours elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []
        self.of_weight: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.blocks[1].linear.weight
        found = grad_norm(self, norm_type=2)
        if is_ddp(self):
            norm, grad = found["grad_2.0_norm_total"], weight.grad
        else:
            assert found == {} and weight.grad is None
            assert nn.utils.clip_grad_norm_(self.parameters(), 1e-6) == 0.0  # sees nothing, does nothing
            norm = optimizer.clip_grad_norm_(float("inf"))
            grad = self.trainer.strategy.engine.full_grad(weight)
        assert grad is not None
        self.norms.append(float(norm))
        self.of_weight.append(float(grad.norm()))


@distributed(world_size=2)
def test_norms_and_gradients_by_the_optimizer_and_the_engine_are_those_of_ddp() -> None:
    wanted, *others = compare_with_ddp(Measures, **SHORT)
    for found in others:
        assert found.module.norms == pytest.approx(wanted.module.norms, **NORM_TOLERANCE)
        assert found.module.of_weight == pytest.approx(wanted.module.of_weight, **NORM_TOLERANCE)
        assert len(found.module.norms) == 3


@distributed(world_size=2)
def test_measuring_a_norm_leaves_the_clipping_that_the_config_asks_for() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            wanted = fit(zero(stage, gradient_clipping=0.05), TinyModule, **SHORT)
            found = fit(zero(stage, gradient_clipping=0.05), Measures, **SHORT)
            unclipped = fit(zero(stage), TinyModule, **SHORT)
            assert_same_weights(found.weights, wanted.weights)
            if rank() == 0:
                name = "head.weight"
                assert not torch.equal(wanted.weights[name], unclipped.weights[name])


class ClipsByHand(TinyModule):
    """Manual optimization; half of the time the whole model's gradients are cleared by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        optimizer = self.optimizers()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
        optimizer.step()
        (optimizer if batch_idx % 2 else self).zero_grad()


@distributed(world_size=2)
def test_clip_gradients_of_the_module_and_its_zero_grad_act_as_under_ddp() -> None:
    compare_with_ddp(ClipsByHand, **SHORT)


class Keeps(TinyModule):
    """Takes its whole weights at the end of training, as a test or a callback would."""

    def on_train_end(self) -> None:
        self.kept = (
            {name: value.clone() for name, value in self.state_dict().items()}
            if is_ddp(self)
            else self.trainer.strategy.engine.full_state_dict()
        )


@distributed(world_size=2)
def test_the_engines_full_state_dict_is_the_modules_state_dict_under_ddp() -> None:
    wanted = fit(ddp(), Keeps, **SHORT)
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found = fit(zero(stage), Keeps, **SHORT)
            assert_same_losses(found.module, wanted.module)
            assert_same_weights(found.module.kept, wanted.module.kept)
            assert rank() == 0 or found.module.kept == {}
