"""Lightning's own callbacks and tools under ZeroStrategy, the real Trainer on 2 ranks over gloo.

Oracle: the same Trainer and callbacks with `DDPStrategy`; tolerance 0 for weights, losses, learning rates,
scores, stops and names of files. Times and memory are measured, so only that they are reported is compared.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    compare_with_ddp,
    ddp,
    fit,
    loader,
    make_trainer,
    strategies,
    whole_weights,
    zero,
)

MEASURED = ("time", "per_sec", "device/", "DeviceStats")  # in names of columns that differ from run to run


# -- observers -----------------------------------------------------------------------------------------------


class Recorder(LambdaCallback):
    """Records hooks in order, and what a user reads in them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        super().__init__(
            on_before_optimizer_step=lambda trainer, module, optimizer: self.note("step", trainer),
            on_validation_epoch_end=lambda trainer, module: self.note("validation", trainer),
            on_train_epoch_end=lambda trainer, module: self.note("epoch", trainer),
        )

    def note(self, hook: str, trainer: Any) -> None:
        self.seen.append((hook, trainer.global_step, float(trainer.callback_metrics.get("val_loss", 0.0))))


def watched(strategy: Any, folder: Path) -> tuple[Any, Recorder, list[dict[str, str]]]:
    """Train under all observers at once; return the outcome, what was recorded, and rank 0's log."""
    recorder = Recorder()
    callbacks = [
        recorder,
        LearningRateMonitor("step", log_weight_decay=True),
        EarlyStopping("val_loss", min_delta=10.0, patience=2),  # never that much better: stops after 3 epochs
        Timer(duration="00:01:00:00"),
        ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0)),
        DeviceStatsMonitor(cpu_stats=True),
        RichModelSummary(max_depth=-1),
        RichProgressBar() if rank() else TQDMProgressBar(),
    ]
    logger = CSVLogger(folder, name="", version="")
    found = fit(
        strategy,
        callbacks=callbacks,
        logger=logger,
        log_every_n_steps=1,
        max_epochs=6,
        enable_progress_bar=True,
        enable_model_summary=True,
    )
    rows = []
    if rank() == 0:
        with open(folder / "metrics.csv", newline="") as file:
            rows = list(csv.DictReader(file))
    return found, recorder, rows


@distributed(world_size=2, timeout=120)
def test_callbacks_that_watch_see_what_they_see_under_ddp(tmp_path: Path) -> None:
    with subtest("ddp"):
        expected, recorded, rows = watched(ddp(), tmp_path / "ddp")
        assert expected.trainer.current_epoch == 3  # stopped early
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found, seen, logged = watched(zero(stage), tmp_path / str(stage))
            assert found.trainer.current_epoch == 3
            assert_same_weights(found.weights, expected.weights)
            assert seen.seen == recorded.seen
            assert len(seen.seen) == 15 + 4 + 3
            for row, wanted in zip(logged, rows, strict=True):  # on rank 0
                assert row.keys() == wanted.keys()
                assert {k: bool(v) for k, v in row.items()} == {k: bool(v) for k, v in wanted.items()}
                kept = [key for key in row if not any(word in key for word in MEASURED)]
                assert {k: row[k] for k in kept} == {k: wanted[k] for k in kept}
            if rank() == 0:
                names = set(rows[0])
                assert any("lr-AdamW/pg1" in name for name in names)
                assert any("weight_decay" in name for name in names)
                assert any("train/samples" in name for name in names)
                assert any("DeviceStatsMonitor" in name for name in names)


class TimedOut(Timer):
    """A timer whose time is up after four batches."""

    def _check_time_remaining(self, trainer: Any) -> None:
        self._duration = 1e9 if trainer.global_step < 4 else 0.0
        super()._check_time_remaining(trainer)


@distributed(world_size=2)
def test_a_timer_stops_all_ranks_at_the_same_step() -> None:
    for name, strategy in strategies().items():
        with subtest(name):
            found = fit(strategy, callbacks=[TimedOut(duration={"hours": 1}, interval="step")])
            assert found.trainer.global_step == 4


# -- checkpoints ---------------------------------------------------------------------------------------------


def checkpoints_of(strategy: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Train under several `ModelCheckpoint`s and describe what they kept."""
    savers = {
        "best": ModelCheckpoint(
            folder / "best", "{step}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True
        ),
        "linked": ModelCheckpoint(folder / "linked", "{step}", save_top_k=-1, save_last="link"),
        "steps": ModelCheckpoint(folder / "steps", "{step}", every_n_train_steps=2, save_top_k=-1),
        "weights": ModelCheckpoint(folder / "weights", "{step}", save_weights_only=True, every_n_epochs=2),
    }
    found = fit(
        strategy,
        callbacks=list(savers.values()),
        enable_checkpointing=True,
        max_epochs=3,
        val_check_interval=2,
    )
    kept = {
        name: {
            "files": sorted(path.name for path in (folder / name).iterdir()),
            "best": Path(saver.best_model_path).name,
            "score": saver.best_model_score,
            "scores": sorted(float(value) for value in saver.best_k_models.values()),
            "last": Path(saver.last_model_path).name,
        }
        for name, saver in savers.items()
    }
    return found, kept


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_model_checkpoint_keeps_the_files_it_keeps_under_ddp(tmp_path: Path) -> None:
    with subtest("ddp"):
        expected, wanted = checkpoints_of(ddp(), tmp_path / "ddp")
        assert wanted["best"]["last"] == "last.ckpt" and len(wanted["steps"]["files"]) == 7
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found, kept = checkpoints_of(zero(stage), tmp_path / str(stage))
            assert kept == wanted
            assert (tmp_path / str(stage) / "linked" / "last.ckpt").is_symlink()
            best = found.trainer.validate(found.module, loader(2), ckpt_path="best", verbose=False)
            last = found.trainer.validate(found.module, loader(2), ckpt_path="last", verbose=False)
            with_ddp = [
                expected.trainer.validate(expected.module, loader(2), ckpt_path=which, verbose=False)
                for which in ("best", "last")
            ]
            assert [best, last] == with_ddp


# -- tools ---------------------------------------------------------------------------------------------------


def search(strategy: Any, folder: Path, callback: bool) -> tuple[list[Tensor], Any, Any]:
    """Look for a learning rate, then train with it."""
    module = TinyModule()
    settings = {"min_lr": 1e-4, "max_lr": 0.5, "early_stop_threshold": None}
    finder = LearningRateFinder(num_training_steps=14, **settings)
    trainer = make_trainer(
        strategy, callbacks=[finder] if callback else [], max_epochs=3, default_root_dir=folder
    )
    if not callback:
        found = Tuner(trainer).lr_find(module, loader(), loader(2), num_training=14, **settings)
    trainer.fit(module, loader(), loader(2))
    if callback:
        found = finder.optimal_lr
    assert found is not None
    return [torch.tensor(found.results["loss"]), torch.tensor(found.suggestion() or 0.0)], module, trainer


def check_search(folder: Path, callback: bool) -> None:
    with subtest("ddp"):
        wanted, expected, reference = search(ddp(), folder, callback)
        weights = whole_weights(reference)
        assert len(wanted[0]) >= 14 and wanted[1] > 0
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            found, module, trainer = search(zero(stage), folder, callback)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
            assert_same_losses(module, expected)  # those of the search too
            assert_same_weights(whole_weights(trainer), weights)
    assert not list(folder.glob(".lr_find*"))


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_the_learning_rate_finder_finds_what_it_finds_under_ddp(tmp_path: Path) -> None:
    check_search(tmp_path, callback=True)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_the_tuner_finds_the_learning_rate_it_finds_under_ddp(tmp_path: Path) -> None:
    check_search(tmp_path, callback=False)


class Sized(TinyModule):
    """Makes its own loaders, of the batch size that is looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(loader().dataset, batch_size=self.batch_size)


@distributed(world_size=2)
def test_lightning_itself_refuses_the_batch_size_finder_on_several_ranks() -> None:
    for name, strategy in strategies().items():
        with subtest(name), expect_error(MisconfigurationException, "Batch size finder"):
            make_trainer(strategy, callbacks=[BatchSizeFinder()]).fit(Sized())


# -- the model -----------------------------------------------------------------------------------------------


class Normed(TinyModule):
    """With batch norm before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(15), nn.Linear(15, 1))


@distributed(world_size=2)
def test_batch_norm_equals_ddp_and_sync_batchnorm_is_put_in_as_there() -> None:
    """torch synchronises batch norms on GPUs only, so that on a CPU the two agree in its refusal."""
    compare_with_ddp(Normed)
    for name, strategy in strategies().items():
        with subtest(f"{name}, synchronised"):
            module = Normed()
            trainer = make_trainer(strategy, sync_batchnorm=True)
            with expect_error(ValueError, "SyncBatchNorm"):
                trainer.fit(module, loader(), loader(2))
            if name != "ddp":  # which has taken it out again
                assert isinstance(module.head[0], nn.SyncBatchNorm)


class Keeping(BasePredictionWriter):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *which: Any) -> None:
        self.written.append((prediction.clone(), which[0]))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, which: Any) -> None:
        self.written.append((torch.cat(list(predictions)), which))


@distributed(world_size=2)
def test_a_prediction_writer_gets_what_it_gets_under_ddp() -> None:
    outcomes = []
    for name, strategy in strategies().items():
        with subtest(name):
            keeping = Keeping()
            make_trainer(strategy, callbacks=[keeping]).predict(TinyModule(), loader(2))
            outcomes.append(keeping.written)
            assert len(outcomes[0]) == len(outcomes[-1]) == 3
            for found, expected in zip(outcomes[-1], outcomes[0], strict=True):
                assert torch.equal(found[0], expected[0]) and found[1] == expected[1]


# -- pruning -------------------------------------------------------------------------------------------------


class Restarting(ModelPruning):
    """Puts copies of the first values back, as the lottery ticket hypothesis wants it.

    Lightning binds the weights to the very tensors it has kept, which the next epoch then trains.
    """

    @staticmethod
    def _copy_param(new: nn.Module, old: nn.Module, name: str) -> None:
        kept = getattr(old, name)
        if isinstance(kept, Tensor):
            getattr(new, f"{name}_orig" if hasattr(new, f"{name}_orig") else name).data = kept.data.clone()


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_model_pruning_equals_ddp_below_stage_3() -> None:
    for restart in (False, True):
        settings = {"amount": 0.3, "use_lottery_ticket_hypothesis": restart}
        with subtest(f"ddp, restart={restart}"):
            expected = fit(ddp(), callbacks=[Restarting("l1_unstructured", **settings)], max_epochs=3)
            assert rank() or float((expected.weights["first.weight"] == 0).float().mean()) > 0.3
        for stage in (1, 2):
            with subtest(f"stage {stage}, restart={restart}"):
                pruning = ModelPruning("l1_unstructured", **settings)
                found = fit(zero(stage), callbacks=[pruning], max_epochs=3)
                assert_same_losses(found.module, expected.module)
                assert_same_weights(found.weights, expected.weights)
