"""Running statistics under Lightning's Trainer: what an evaluation finds in a module's buffers; 2 ranks.

Oracle: the same Trainer with Lightning's `DDPStrategy`, each rank on its own data. Tolerance 0, the same bits
of every rank's outputs, of the logged values and of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness import distributed, rank, subtest
from tests.integrations.lightning_support import (
    BATCH_SIZE,
    Outcome,
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    whole_weights,
    zero,
)


class Normed(TinyModule):
    """With batch norm before the last layer; keeps what every evaluation has given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(15), nn.Linear(15, 1))
        self.found: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.found.append(self(batch[0]).clone())


class Alternating(Normed):
    """Steps twice in each training step: the steps are within the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.losses.append(loss.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Uneven(Normed):
    """Logs nothing, so that ranks may end apart."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.found.append(self(batch[0]).clone())


def evaluate_and_fit(
    make_strategy: Callable[[], Any], make_module: type[Normed], val: DataLoader, **keywords: Any
) -> tuple[Outcome, dict[str, Any]]:
    module = make_module()
    trainer = make_trainer(make_strategy(), **keywords)
    trainer.fit(module, loader(4), val)
    metrics = dict(trainer.callback_metrics)
    # A run of its own, with another strategy of the same kind, evaluates the trained module.
    make_trainer(make_strategy(), **keywords).validate(module, val, verbose=False)
    return Outcome(trainer, module, whole_weights(trainer)), metrics


def uneven() -> DataLoader:
    """Return three batches for rank 0 and five for rank 1."""
    numbers = range((3 + 2 * rank()) * BATCH_SIZE)
    return DataLoader(loader(20).dataset, batch_size=BATCH_SIZE, sampler=numbers)


def compare(name: str, make_module: type[Normed], val: DataLoader, stages: Any, **keywords: Any) -> None:
    with subtest(f"{name}, ddp"):
        expected, metrics = evaluate_and_fit(ddp, make_module, val, **keywords)
        assert expected.module.found
    for stage in stages:
        with subtest(f"{name}, stage {stage}"):
            found, found_metrics = evaluate_and_fit(partial(zero, stage), make_module, val, **keywords)
            assert found_metrics == metrics
            assert len(found.module.found) == len(expected.module.found)
            for batch, (mine, theirs) in enumerate(
                zip(found.module.found, expected.module.found, strict=True)
            ):
                assert torch.equal(mine, theirs), f"evaluated batch {batch}"
            assert_same_losses(found.module, expected.module)
            assert_same_weights(found.weights, expected.weights)


@distributed(world_size=2)
def test_evaluation_finds_the_running_statistics_it_finds_under_ddp() -> None:
    compare("a step per batch", Normed, loader(2), (1, 2, 3))


@distributed(world_size=2)
def test_evaluation_after_manual_steps_finds_rank_0s_running_statistics_on_every_rank() -> None:
    """Lightning keeps its DDP from broadcasting there, and every rank evaluates with its own."""
    outcomes = {}
    for name, strategy in {"ddp": ddp(), "stage 1": zero(1), "stage 3": zero(3)}.items():
        with subtest(name):
            found = outcomes[name] = fit(strategy, Alternating)  # ends with a validation
            means = [torch.empty(15) for _ in range(2)]
            dist.all_gather(means, found.module.head[0].running_mean)
            assert torch.equal(means[0], means[1]) == (name != "ddp")
            assert_same_losses(found.module, outcomes["ddp"].module)
            assert_same_weights(found.weights, outcomes["ddp"].weights)


@distributed(world_size=2)
def test_evaluation_after_accumulation_finds_the_running_statistics_of_ddp() -> None:
    compare("two batches a step", Normed, loader(2), (1,), accumulate_grad_batches=2)


@distributed(world_size=2)
def test_ranks_with_other_numbers_of_batches_evaluate_with_the_same_statistics() -> None:
    compare("uneven", Uneven, uneven(), (1, 2), use_distributed_sampler=False, num_sanity_val_steps=0)
