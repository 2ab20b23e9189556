"""Lightning's finetuning callbacks with the real Trainer: a backbone that is frozen first and trained later.

Oracle: `DDPStrategy` at two ranks, its DDP built anew at the beginning of every epoch. (By itself it keeps
the DDP of the start, which never reduces what was frozen then, so that the ranks drift apart.) Tolerance 0.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.lightning_support import (
    Block,
    Outcome,
    assert_same_losses,
    assert_same_weights,
    fit,
    zero,
)
from tests.recorder import logged

STAGES = (1, 2, 3)
WIDTH = 15


class Transfer(LightningModule):
    """A backbone of equal blocks with batch norms between them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.backbone = nn.ModuleDict(
            {
                "stem": nn.Linear(4, WIDTH),
                "bn": nn.BatchNorm1d(WIDTH),
                "blocks": nn.ModuleList(Block(WIDTH) for _ in range(2)),
            }
        )
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.losses: list[Tensor] = []
        self.rates: list[list[float]] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.backbone["bn"](self.backbone["stem"](x))
        for block in self.backbone["blocks"]:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0].to(self.head[0].weight.dtype)).float(), batch[1])
        self.losses.append(loss.detach().clone())
        self.rates.append([group["lr"] for group in self.optimizers().param_groups])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rewrap(Callback):
    """Builds DDP anew, so that it reduces what is trained by now."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if isinstance(trainer.strategy.model, DistributedDataParallel):
            trainer.strategy.model = trainer.strategy._setup_model(pl_module)


class Gradual(BaseFinetuning):
    """Unfreezes one more block with each epoch, the last first, then the rest."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        backbone = pl_module.backbone
        turns = [None, backbone["blocks"][1], backbone["blocks"][0], [backbone["stem"], backbone["bn"]]]
        if turns[epoch] is not None:
            self.unfreeze_and_add_param_group(turns[epoch], optimizer, lr=10.0 ** -(2 + epoch))


def backbone_finetuning(**settings: Any) -> BackboneFinetuning:
    return BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, **settings)


def tune(strategy: Any, callback: Callback, **keywords: Any) -> Outcome:
    settings = {"max_epochs": 4, "callbacks": [callback, Rewrap()], **keywords}
    return fit(strategy, Transfer, num_batches=3, **settings)


def assert_same(found: Outcome, wanted: Outcome) -> None:
    assert_same_losses(found.module, wanted.module)
    assert found.module.rates == wanted.module.rates
    assert_same_weights(found.weights, wanted.weights)


@distributed(world_size=2, timeout=240)
def test_backbone_finetuning_trains_as_under_ddp() -> None:
    callbacks: dict[str, Callable[[], Callback]] = {
        "backbone": backbone_finetuning,
        "backbone without its batch norms": lambda: backbone_finetuning(train_bn=False),
        "gradual": Gradual,
    }
    for name, make in callbacks.items():
        wanted = tune(DDPStrategy(), make())
        for stage in STAGES:
            with subtest(f"{name}, stage={stage}"):
                assert_same(tune(zero(stage), make()), wanted)


def is_equal_on_all_ranks(tensor: Tensor) -> bool:
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor.detach())
    return all(torch.equal(other, tensor) for other in others)


@distributed(world_size=2)
def test_stock_ddp_leaves_weights_that_are_unfrozen_late_apart_on_the_ranks_and_zero_does_not() -> None:
    for name, strategy in {"ddp": DDPStrategy(), "stage 1": zero(1), "stage 2": zero(2)}.items():
        with subtest(name):
            outcome = fit(strategy, Transfer, num_batches=3, max_epochs=4, callbacks=[backbone_finetuning()])
            stem = outcome.module.backbone["stem"].weight
            assert is_equal_on_all_ranks(stem) == (name != "ddp")
            assert is_equal_on_all_ranks(outcome.module.head[0].weight)


class Resumable(BackboneFinetuning):
    """Goes on training the backbone after a resume; Lightning's own leaves it frozen then."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        was_unfrozen = self._restarting and self.previous_backbone_lr is not None
        super().on_fit_start(trainer, pl_module)
        if was_unfrozen:
            self.make_trainable(pl_module.backbone)


def resumable() -> BackboneFinetuning:
    return Resumable(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5)


def save(strategy: Any, path: Path, callback: Callback, num_epochs: int = 2, **keywords: Any) -> Outcome:
    outcome = tune(strategy, callback, max_epochs=num_epochs, **keywords)
    outcome.trainer.save_checkpoint(path)
    return outcome


def state_of(outcome: Outcome) -> dict[str, Any]:
    return outcome.trainer.strategy.optimizer_state(outcome.trainer.optimizers[0])


def assert_same_state(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare on rank 0, which has all of it."""
    assert found["param_groups"] == wanted["param_groups"]
    if rank() == 0:
        assert found["state"].keys() == wanted["state"].keys() and len(found["state"]) > 6
        for number, entries in wanted["state"].items():
            for key, value in entries.items():
                assert torch.equal(found["state"][number][key], value), (number, key)


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_a_run_resumed_after_the_unfreezing_goes_on_as_under_ddp(tmp_path: Path) -> None:
    """From DDP's file and from our own; Lightning's callback leaves the backbone frozen, in its group."""
    save(DDPStrategy(), tmp_path / "ddp", backbone_finetuning())
    wanted = tune(DDPStrategy(), backbone_finetuning(), ckpt_path=tmp_path / "ddp")
    wanted_state = state_of(wanted)
    for stage in STAGES:
        save(zero(stage), tmp_path / str(stage), backbone_finetuning())
        for source in ("ddp", str(stage)):
            with subtest(f"stage={stage}, from {source}"):
                found = tune(zero(stage), backbone_finetuning(), ckpt_path=tmp_path / source)
                assert_same(found, wanted)
                assert_same_state(state_of(found), wanted_state)


def masters_of(outcome: Outcome) -> dict[str, Tensor]:
    return outcome.trainer.strategy.engine.full_state_dict(dtype=torch.float32)


@distributed(world_size=2, timeout=120)
def test_a_resumed_run_does_not_say_that_what_stays_frozen_is_trained_or_unused(tmp_path: Path) -> None:
    save(zero(2), tmp_path / "late", backbone_finetuning())
    with logged() as lines:
        tune(zero(2), backbone_finetuning(), ckpt_path=tmp_path / "late")
        told = [line for line in lines if "that were frozen can be trained from now on" in line]
        assert len(told) == 1 and "require no gradient at this moment" in told[0], lines
        assert not any("used on no rank" in line for line in lines), lines


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_a_callback_that_unfreezes_again_on_resume_continues_the_uninterrupted_run(tmp_path: Path) -> None:
    settings = {"precision": "bf16-true"}
    for stage in STAGES:
        wanted = tune(zero(stage), resumable(), **settings)
        for kind in ("full", "sharded"):
            with subtest(f"stage={stage}, {kind}"):
                path = tmp_path / f"{stage}-{kind}"
                save(zero(stage, state_dict_type=kind), path, resumable(), **settings)
                found = tune(zero(stage, state_dict_type=kind), resumable(), ckpt_path=path, **settings)
                assert torch.equal(torch.stack(found.module.losses), torch.stack(wanted.module.losses[6:]))
                assert found.module.rates == wanted.module.rates[6:]
                assert_same_weights(masters_of(found), masters_of(wanted))


@distributed(world_size=2, timeout=120)
def test_groups_that_a_checkpoint_lacks_or_has_too_many_of_are_named(tmp_path: Path) -> None:
    save(zero(2), tmp_path / "late", backbone_finetuning())
    with expect_error(zs.CheckpointError, ["param groups of", "add_param_group"]):
        fit(zero(2), Transfer, num_batches=3, max_epochs=3, ckpt_path=tmp_path / "late")


class Forgetful(BaseFinetuning):
    """Unfreezes, and gives nothing to the optimizer."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.make_trainable(pl_module.backbone)


@distributed(world_size=2, timeout=120)
def test_a_callback_that_unfreezes_for_no_optimizer_is_refused_by_name() -> None:
    for stage in STAGES:
        with (
            subtest(f"stage={stage}"),
            expect_error(zs.ShardingError, ["backbone.stem.weight", "add_param_group"]),
        ):
            tune(zero(stage), Forgetful())
