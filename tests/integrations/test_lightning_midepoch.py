"""Resuming a Trainer inside an epoch and between epochs, with dropout.

Oracle: the run that wrote the checkpoints on its way and went on. Tolerance 0: the same bits on every rank.
Plain Lightning repeats neither the random numbers nor (with a loader that keeps no state) the batches.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from tests.harness import distributed, subtest
from tests.integrations.lightning_support import (
    BATCH_SIZE,
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    make_trainer,
    zero,
)
from tests.integrations.test_lightning_checkpoint import ddp
from tests.recorder import logged


class StatefulLoader:
    """Nine batches for each rank that go on where they were, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3 + dist.get_rank())
        self.x = torch.randn(9, BATCH_SIZE, 4, generator=generator)
        self.position = 0  # of the next batch

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[list[Tensor]]:
        start, self.position = self.position, 0
        torch.empty(()).random_()  # a DataLoader draws a seed for its workers
        for index in range(start, len(self.x)):
            self.position = (index + 1) % len(self.x)
            yield [self.x[index], self.x[index].sum(1, keepdim=True).sin()]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Random(TinyModule):
    """Draws from every generator there is, each rank its own numbers."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        noise = random.random() + numpy.random.rand()
        return super().training_step([nn.functional.dropout(batch[0] + noise, 0.3), batch[1]], batch_idx)


class SaveOnTheWay(Callback):
    """Saves after some batches of the first epoch, and after the epoch."""

    def __init__(self, folder: Path, batches: tuple[int, ...]) -> None:
        self.folder = folder
        self.batches = batches

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx + 1 in self.batches:
            trainer.save_checkpoint(self.folder / f"after-{batch_idx + 1}.ckpt")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.folder / "after-epoch.ckpt")


def run(strategy: Any, make_module: Any, seed: int, path: Any = None, **keywords: Any) -> tuple[Any, Any]:
    module = make_module()
    for seed_one in (torch.manual_seed, random.seed, numpy.random.seed):
        seed_one(seed + dist.get_rank())
    trainer = make_trainer(strategy, accumulate_grad_batches=2, **keywords)
    trainer.fit(module, StatefulLoader(), ckpt_path=path)
    return trainer, module


@distributed(world_size=2, timeout=120)
def test_resumed_inside_an_epoch_equals_uninterrupted_with_dropout(tmp_path: Path) -> None:
    for kind, stage in [("full", 1), ("sharded", 3)]:
        with subtest(f"{kind}, stage {stage}: uninterrupted"):
            folder = tmp_path / kind
            strategy = zero(stage, state_dict_type=kind)
            trainer, module = run(strategy, Random, 100, callbacks=[SaveOnTheWay(folder, (4,))])
            expected = trainer.strategy.engine.full_state_dict()
            assert len(module.losses) == 18 and trainer.global_step == 10
        # Stopped after 5 of 9 batches: the last checkpoint is that of the window's end, after 4.
        for name, num_left in {"after-4": 14, "after-epoch": 9}.items():
            with subtest(f"{kind}, stage {stage}: {name}"):
                trainer, resumed = run(zero(stage), Random, 999, folder / f"{name}.ckpt")
                assert trainer.global_step == 10
                assert torch.equal(torch.stack(resumed.losses), torch.stack(module.losses[-num_left:]))
                assert_same_weights(trainer.strategy.engine.full_state_dict(), expected)


@distributed(world_size=2)
def test_an_open_accumulation_window_is_dropped_as_by_ddp_and_said_so(tmp_path: Path) -> None:
    with subtest("five of nine, windows of two"), logged(logging.INFO) as notes:
        runs = []
        for name, strategy in {"ddp": ddp(), "zero": zero(1)}.items():
            run(strategy, TinyModule, 1, callbacks=[SaveOnTheWay(tmp_path / name, (5,))])
            again = ddp() if name == "ddp" else zero(1)
            runs.append(run(again, TinyModule, 1, tmp_path / name / "after-5.ckpt")[1])
        assert_same_losses(runs[1], runs[0])
        said = [note for note in notes if "accumulation window" in note]
        assert len(said) == (dist.get_rank() == 0) and (not said or "1 of 2 micro-batches" in said[0])


@distributed(world_size=2)
def test_random_numbers_of_another_number_of_ranks_are_left_alone(tmp_path: Path) -> None:
    with subtest("one rank more"):
        path = tmp_path / "file.ckpt"
        trainer, _ = run(zero(1), Random, 100, max_epochs=1)
        trainer.save_checkpoint(path)
        dist.barrier()
        if dist.get_rank() == 0:
            content = torch.load(path, weights_only=True)
            content["zero_strategy_rng"].append(content["zero_strategy_rng"][0])
            torch.save(content, path)
        dist.barrier()
        _, first = run(zero(1), Random, 100, path)
        _, second = run(zero(1), Random, 200, path)
        assert not torch.equal(torch.stack(first.losses), torch.stack(second.losses))


@distributed(world_size=2)
def test_a_resume_that_makes_no_step_leaves_the_next_run_its_own_random_numbers(tmp_path: Path) -> None:
    with subtest("stopped where it began"):
        run(zero(1), Random, 100, callbacks=[SaveOnTheWay(tmp_path, (4,))], max_epochs=1)
        losses = []
        for seed in (100, 200):
            trainer, module = run(zero(1), Random, seed, tmp_path / "after-4.ckpt", max_steps=2)
            assert trainer.global_step == 2 and not module.losses
            for seed_one in (torch.manual_seed, random.seed, numpy.random.seed):
                seed_one(seed)
            trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 3, -1
            trainer.fit(module, StatefulLoader())
            losses.append(torch.stack(module.losses))
        assert losses[0].shape == losses[1].shape and not torch.equal(losses[0][0], losses[1][0])
