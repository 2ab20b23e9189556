"""What a run of Lightning's Trainer can look like, 2 ranks over gloo: options, data, loops in any order.

Oracle: the same Trainer with Lightning's `DDPStrategy`. Tolerance 0, the same bits of the weights, of every
rank's losses and of the logged values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.lightning_support import (
    BATCH_SIZE,
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    strategies,
    whole_weights,
    zero,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "limits": {"limit_train_batches": 2, "limit_val_batches": 1},
    "max_steps": {"max_steps": 3, "max_epochs": -1, "val_check_interval": 2},
    "overfit_batches": {"overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": 2},
    "barebones": {"barebones": True, "num_sanity_val_steps": None},
    # Fills fresh memory with NaN, and so shows what is read before it was written.
    "deterministic": {"deterministic": True, "detect_anomaly": True, "profiler": "simple"},
}


@pytest.mark.slow
@distributed(world_size=2)
def test_options_of_the_trainer_act_as_under_ddp() -> None:
    steps = {"limits": 2, "max_steps": 3, "overfit_batches": 2, "fast_dev_run": 2}
    for name, options in OPTIONS.items():
        with subtest(f"{name}, ddp"):
            expected = fit(ddp(), num_batches=4, **{"max_epochs": 1, **options})
        for stage in (1, 2, 3):
            with subtest(f"{name}, stage {stage}"):
                found = fit(zero(stage), num_batches=4, **{"max_epochs": 1, **options})
                assert found.trainer.global_step == expected.trainer.global_step == steps.get(name, 4)
                assert_same_weights(found.weights, expected.weights)
                assert_same_losses(found.module, expected.module)
                assert found.trainer.callback_metrics == expected.trainer.callback_metrics


# -- loops in any order --------------------------------------------------------------------------------------


class CountsOptimizers(TinyModule):
    def __init__(self) -> None:
        super().__init__()
        self.optimizers_built = 0

    def configure_optimizers(self) -> Any:
        self.optimizers_built += 1
        return super().configure_optimizers()


@distributed(world_size=2)
def test_validate_before_fit_builds_no_optimizer_and_every_order_of_loops_equals_ddp() -> None:
    """One Trainer, one module, one engine; fit twice, the second going on."""
    expected: list[Any] = []
    for name, strategy in strategies().items():
        with subtest(name):
            module, trainer = CountsOptimizers(), make_trainer(strategy, max_epochs=1)
            outcome: list[Any] = [trainer.validate(module, loader(2), verbose=False)]
            assert module.optimizers_built == 0 and trainer.optimizers == []
            engine = getattr(trainer.strategy, "engine", None)
            trainer.fit(module, loader(3), loader(1))
            outcome += [
                trainer.validate(module, loader(2), verbose=False),
                trainer.test(module, loader(2), verbose=False),
            ]
            predicted = torch.cat(trainer.predict(module, loader(2)))
            trainer.fit_loop.max_epochs = 2
            trainer.fit(module, loader(3), loader(1))
            outcome.append(trainer.validate(module, loader(2), verbose=False))
            assert module.optimizers_built == 2 and trainer.global_step == 6
            assert getattr(trainer.strategy, "engine", None) is engine
            expected = expected or [outcome, predicted, module, whole_weights(trainer)]
            assert outcome == expected[0] and torch.equal(predicted, expected[1])
            assert_same_losses(module, expected[2])
            assert_same_weights(whole_weights(trainer), expected[3])


class TwoValidations(TinyModule):
    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)


@pytest.mark.slow
@distributed(world_size=2)
def test_two_validation_loaders_of_different_lengths_equal_ddp() -> None:
    expected: list[Any] = []
    for name, strategy in strategies().items():
        with subtest(name):
            module, trainer = TwoValidations(), make_trainer(strategy, max_epochs=2)
            trainer.fit(module, loader(2), [loader(3), loader(5)])
            outcome = [dict(trainer.callback_metrics), trainer.validate(module, [loader(3), loader(5)])]
            expected = expected or outcome
            assert outcome == expected
            assert set(outcome[0]) == {"train_loss", "val/dataloader_idx_0", "val/dataloader_idx_1"}


def uneven(least: int) -> DataLoader:
    """Return `least` batches for rank 0 and two more for rank 1."""
    return DataLoader(
        loader(20).dataset, batch_size=BATCH_SIZE, sampler=range((least + 2 * rank()) * BATCH_SIZE)
    )


class EndsApart(TinyModule):
    """Keeps what its steps have found instead of reducing it: the ranks end at different times."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.found.append(self(batch[0]).clone())


@distributed(world_size=2)
def test_loaders_that_end_apart_work_or_are_refused_before_the_first_step() -> None:
    """No hang. Evaluation below stage 3 needs no other rank; the rest does, and says so."""
    plain = EndsApart().eval()
    for stage in (1, 2):
        with subtest(f"validation, stage {stage}"):
            module = EndsApart()
            make_trainer(zero(stage), use_distributed_sampler=False).validate(
                module, uneven(3), verbose=False
            )
            assert len(module.found) == 3 + 2 * rank()
            with torch.no_grad():
                assert all(torch.equal(f, plain(b[0])) for f, b in zip(module.found, uneven(3), strict=True))
    for kind in ("validate", "test", "predict"):
        with (
            subtest(f"{kind}, stage 3"),
            expect_error(zs.ShardingError, ["3 batches on rank 0", "5 on rank 1"]),
        ):
            getattr(make_trainer(zero(3), use_distributed_sampler=False), kind)(TinyModule(), uneven(3))
    for stage in (1, 2, 3):
        texts = ["training loader 0", "3 batches on rank 0", "5 on rank 1", "limit_train_batches=3"]
        with subtest(f"fit, stage {stage}"), expect_error(zs.ShardingError, texts):
            make_trainer(zero(stage), use_distributed_sampler=False).fit(TinyModule(), uneven(3))
    with subtest("limited as the message says"):
        trainer = make_trainer(zero(3), use_distributed_sampler=False, max_epochs=1, limit_train_batches=3)
        trainer.fit(TinyModule(), uneven(3))
        assert trainer.global_step == 3


# -- data ----------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Has no length, and splits itself over the ranks."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        for x, y in list(zip(*loader(4).dataset.tensors, strict=True))[rank() :: 2]:
            yield [x, y]


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader(3)

    def val_dataloader(self) -> list[DataLoader]:
        return [loader(1)]


@pytest.mark.slow
@distributed(world_size=2)
def test_streams_own_samplers_and_datamodules_equal_ddp() -> None:
    own = {"use_distributed_sampler": False}
    data = {
        "datamodule": ({}, lambda: {"datamodule": Data()}),
        "stream": ({}, lambda: {"train_dataloaders": DataLoader(Stream(), batch_size=BATCH_SIZE)}),
        "own sampler": (own, lambda: {"train_dataloaders": uneven(3) if rank() == 0 else uneven(1)}),
        "a last batch that is smaller": ({}, lambda: {"train_dataloaders": DataLoader(loader(3).dataset, 4)}),
    }
    for name, (settings, make) in data.items():
        reference = None
        for strategy_name, strategy in strategies().items():
            with subtest(f"{name}, {strategy_name}"):
                module, trainer = TinyModule(), make_trainer(strategy, max_epochs=2, **settings)
                trainer.fit(module, **make())
                reference = reference or (module, whole_weights(trainer))
                assert_same_losses(module, reference[0])
                assert_same_weights(whole_weights(trainer), reference[1])


# -- what a step may do --------------------------------------------------------------------------------------


class OtherMethods(TinyModule):
    """Calls its parts through methods that are not `forward`, and logs per step and per epoch."""

    def encode(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.first(x)))

    def score(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[2](x)) * self.scale

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.score(self.encode(batch[0])), batch[1])
        self.losses.append(loss.detach().clone())
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"least": loss, "norm": batch[0].norm()}, sync_dist=True, reduce_fx="min")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.score(self.encode(batch[0])).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("encoded", self.encode(torch.ones(2, 4)).mean(), sync_dist=True)


@distributed(world_size=2)
def test_methods_other_than_forward_and_synchronised_logs_equal_ddp() -> None:
    """Outside of any step too, `on_validation_epoch_end` runs the sharded parts."""
    expected = None
    for name, strategy in strategies().items():
        with subtest(name):
            found = fit(strategy, OtherMethods, num_batches=3)
            metrics = dict(found.trainer.callback_metrics)
            assert {"loss_step", "loss_epoch", "least", "norm", "val", "encoded"} <= metrics.keys()
            expected = expected or (found, metrics)
            assert metrics == expected[1]
            assert_same_losses(found.module, expected[0].module)
            assert_same_weights(found.weights, expected[0].weights)


class SkipsOne(TinyModule):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


@distributed(world_size=2)
def test_a_training_step_that_returns_none_is_refused_by_lightning_on_all_ranks() -> None:
    """With several ranks, whatever the strategy: the others would wait in the backward."""
    for name, strategy in strategies().items():
        with subtest(name), expect_error(RuntimeError, "Skipping the `training_step` by returning None"):
            fit(strategy, SkipsOne)
