"""Asynchronous saves of the Trainer and of Fabric: `async_save=True`.

Oracles: the same run with synchronous saves, name for name and bit for bit; the file system while a save is
held back. That is done by stopping its writer process (SIGSTOP), never by a time; a timer only lets go of one
that something waits for. Tolerance 0.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.fabric_support import zero as fabric_zero
from tests.integrations.lightning_support import TinyModule, assert_same_weights, loader, make_trainer, zero
from tests.integrations.test_fabric_checkpoint import go_on, new_state
from zero_strategy.checkpoint.own_files import MANIFEST_NAME


def sharded(stage: int = 3, **keywords: Any) -> Any:
    return zero(stage, state_dict_type="sharded", **keywords)


class HoldBack(Callback):
    """Stops the writer processes before the save of an epoch, and looks two steps later.

    Args:
        epoch: The first is 0, whose save starts the writer process.
        look: What to do at that step, with the trainer; afterwards the writers go on.
    """

    def __init__(self, epoch: int, look: Callable[[Any], None]) -> None:
        self.epoch = epoch
        self.look = look

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == self.epoch:
            trainer.strategy.engine.wait_for_checkpoint()
            os.kill(writer_pid(trainer), signal.SIGSTOP)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == self.epoch + 1 and batch_idx == 2:
            pid = writer_pid(trainer)
            try:
                self.look(trainer)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def writer_pid(trainer: Any) -> int:
    pid = trainer.strategy.engine.saves.writer.pid
    assert pid is not None
    return pid


def best_and_last(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last="link")


def run(strategy: Any, *callbacks: Callback, **keywords: Any) -> Any:
    """Train for 3 epochs of 3 batches."""
    settings = {"max_epochs": 3, "num_sanity_val_steps": 0, "enable_checkpointing": True, **keywords}
    trainer = make_trainer(strategy, callbacks=list(callbacks), **settings)
    trainer.fit(TinyModule(), loader(3), loader(1))
    return trainer


def validate(path: Path) -> Any:
    """Load a checkpoint at another stage."""
    trainer = make_trainer(zero(1))
    trainer.validate(TinyModule(), loader(1), ckpt_path=path, verbose=False)
    return trainer


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST_NAME).is_file()


# -- the Trainer ---------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_the_trainer_keeps_what_it_keeps_with_synchronous_saves_and_trains_on_meanwhile(
    tmp_path: Path,
) -> None:
    def look(trainer: Any) -> None:
        """Epoch 1 is being written: epoch 0 is there, and the link leads to it."""
        if rank() == 0:
            assert names_in(tmp_path / "runs") == ["epoch=0.ckpt", "last.ckpt"]
            assert is_complete(tmp_path / "runs" / "last.ckpt")
        seen.append(trainer.global_step)

    seen: list[int] = []
    trainer = run(sharded(async_save=True), HoldBack(1, look), best_and_last(tmp_path / "runs"))
    # As in test_lightning_sharded, with synchronous saves.
    assert names_in(tmp_path / "runs") == ["epoch=2.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "runs" / "last.ckpt") == "epoch=2.ckpt"
    assert seen == [8], "it has not looked, or steps have waited for the save"
    trainer.save_checkpoint(tmp_path / "after")
    assert is_complete(tmp_path / "after"), "a save after the run has nothing to go on beside"
    assert not vars(trainer.checkpoint_callback).keys() & {"_link_checkpoint", "file_exists"}
    expected = trainer.strategy.engine.full_state_dict()
    assert_same_weights(validate(tmp_path / "runs" / "last.ckpt").strategy.engine.full_state_dict(), expected)


@distributed(world_size=2)
def test_a_save_that_fails_is_raised_by_the_next_step_and_nothing_is_deleted_for_it(tmp_path: Path) -> None:
    def kill_the_writer(trainer: Any) -> None:
        trainers.append(trainer)
        if rank() == 1:
            os.kill(writer_pid(trainer), signal.SIGKILL)
        else:
            os.kill(writer_pid(trainer), signal.SIGCONT)
        trainer.strategy.engine.saves.join()

    trainers: list[Any] = []
    with expect_error(zs.CheckpointError, ["[rank 1]", "SIGKILL", "epoch=1.ckpt"]):
        run(sharded(async_save=True), HoldBack(1, kill_the_writer), best_and_last(tmp_path))
    assert trainers[0].global_step == 8
    assert names_in(tmp_path) == ["epoch=0.ckpt", "last.ckpt"] and is_complete(tmp_path / "last.ckpt")
    validate(tmp_path / "last.ckpt")


@distributed(world_size=2)
def test_a_run_that_ends_by_an_exception_leaves_its_save_to_the_end_of_the_program(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        trainers.append(trainer)
        raise ValueError("of the user")

    trainers: list[Any] = []
    with pytest.raises(ValueError, match="of the user"):
        run(sharded(async_save=True), Failing(fail), best_and_last(tmp_path))
    engine = trainers[0].strategy.engine
    assert engine.saves.path == str(tmp_path / "epoch=1.ckpt"), "waited for, though other ranks may be gone"
    assert not is_complete(tmp_path / "epoch=1.ckpt") and is_complete(tmp_path / "last.ckpt")
    os.kill(writer_pid(trainers[0]), signal.SIGCONT)
    engine.saves.join()
    atexit._run_exitfuncs()
    if rank() == 0:
        assert names_in(tmp_path) == ["epoch=1.ckpt", "last.ckpt"] and is_complete(tmp_path / "last.ckpt")


class Failing(HoldBack):
    """Fails while the save of epoch 1 goes on, and leaves it stopped."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        super().__init__(1, look)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 2 and batch_idx == 2:
            self.look(trainer)


class SaveTwice(Callback):
    """Saves in the middle of a run, once as Lightning does before SLURM ends the job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            trainer.save_checkpoint(self.folder / "first")
            trainer.strategy.engine.wait_for_checkpoint()
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "hpc_ckpt_1.ckpt")
            assert is_complete(self.folder / "hpc_ckpt_1.ckpt")
            pid = writer_pid(trainer)
            os.kill(pid, signal.SIGSTOP)
            trainer.save_checkpoint(self.folder / "best.ckpt")
            trainer.strategy.remove_checkpoint(str(self.folder / "first"))
            name = trainer.checkpoint_callback.file_exists(str(self.folder / "best.ckpt"), trainer)
            assert name, "a name that will be taken when the save is complete"
            assert is_complete(self.folder / "first") and not (self.folder / "best.ckpt").exists()
            threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()  # the next save waits for this one


@distributed(world_size=2)
def test_names_are_given_once_and_what_the_job_may_end_after_is_waited_for(tmp_path: Path) -> None:
    kept = ModelCheckpoint(tmp_path, "best", save_top_k=-1, every_n_train_steps=3)
    trainer = run(sharded(1, async_save=True), SaveTwice(tmp_path), kept, max_epochs=1)
    assert names_in(tmp_path) == ["best-v1.ckpt", "best.ckpt", "hpc_ckpt_1.ckpt"]
    validate(tmp_path / "best-v1.ckpt")
    assert trainer.strategy.engine.saves.path is None


# -- both ----------------------------------------------------------------------------------------------------


def test_only_folders_are_saved_asynchronously_and_the_option_says_so() -> None:
    for make in (zs.ZeroStrategy, zs.FabricZeroStrategy):
        for kind in (None, "full"):
            with pytest.raises(
                zs.ConfigError, match=r"(?s)async_save=True.*state_dict_type=.*AsyncCheckpointIO"
            ):
                make(stage=3, async_save=True, state_dict_type=kind)
        with pytest.raises(zs.ConfigError, match="async_save='yes'"):
            make(stage=3, async_save="yes", state_dict_type="sharded")


@distributed(world_size=2)
def test_fabric_trains_on_while_it_saves_and_loads_what_is_still_written(tmp_path: Path) -> None:
    fabric, state = new_state(fabric_zero(3, state_dict_type="sharded", async_save=True))
    fabric.save(tmp_path / "first", state)
    engine = fabric.strategy.engine_of(state["model"])
    engine.wait_for_checkpoint()
    pid = engine.saves.writer.pid
    os.kill(pid, signal.SIGSTOP)
    fabric.save(tmp_path / "second", state)
    weights = go_on(fabric, state)
    assert not (tmp_path / "second").exists()
    threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()
    fabric, other = new_state(fabric_zero(1), seed=1)
    with subtest("another Fabric finds it once it is there"):
        engine.saves.join()
        assert fabric.load(tmp_path / "second", other) == {} and other["step"] == 0
        assert_same_weights(go_on(fabric, other), weights)
    fabric, state = new_state(fabric_zero(3, state_dict_type="sharded", async_save=True))
    fabric.save(tmp_path / "third", state)
    assert fabric.load(tmp_path / "third", state) == {}
    torch.distributed.barrier()
    assert is_complete(tmp_path / "third")
