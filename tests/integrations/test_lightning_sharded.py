"""Checkpoint folders through the Trainer: `ZeroStrategy(state_dict_type="sharded")`.

Oracle: the uninterrupted run, and the same run resumed from a single file; at another number of ranks also
plain DDP resumed from that file. Tolerance 0 between runs of ours, and to DDP at 2 ranks; at 3 ranks DDP adds
in another order, so its losses are compared to 1e-5 of their size.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, run_ranks, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    fit,
    loader,
    make_trainer,
    zero,
)
from tests.integrations.test_lightning_checkpoint import TwoOptimizers, ddp
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.cli import main


def sharded(stage: int, **keywords: Any) -> Any:
    return zero(stage, state_dict_type="sharded", **keywords)


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return trainer.strategy.engine.full_state_dict()


def train(strategy: Any, make_module: Any = TinyModule, path: Any = None, **keywords: Any) -> Any:
    """Train a new module to `max_epochs` and return the trainer."""
    trainer = make_trainer(strategy, **keywords)
    trainer.fit(make_module(), loader(), loader(2), ckpt_path=path)
    return trainer


@distributed(world_size=2, timeout=120)
def test_folder_resumes_with_the_bits_of_the_uninterrupted_run(tmp_path: Path) -> None:
    with subtest("uninterrupted"):
        expected = {
            precision: weights_of(train(zero(2), precision=precision))
            for precision in ("32-true", "bf16-true")
        }
    for first, second, precision in [(1, 3, "32-true"), (3, 1, "bf16-true")]:
        weights = expected[precision]
        with subtest(f"stage {first} to {second}, {precision}"):
            path = tmp_path / f"{first}-{second}-{precision}"
            train(sharded(first), max_epochs=1, precision=precision).save_checkpoint(path)
            # Either strategy reads either kind.
            trainer = train(zero(second, reduce_bucket_size=100), path=path, precision=precision)
            assert_same_weights(weights_of(trainer), weights)
            assert trainer.global_step == 10
            assert [group["lr"] for group in trainer.optimizers[0].param_groups] == [
                1e-2 * 0.5**5,
                5e-3 * 0.5**5,
            ]


@distributed(world_size=2)
def test_a_sharded_strategy_reads_the_file_of_ddp(tmp_path: Path) -> None:
    with subtest("file to folder to file"):
        expected = fit(ddp(), max_epochs=3)
        fit(ddp(), max_epochs=1).trainer.save_checkpoint(tmp_path / "file.ckpt")
        trainer = train(sharded(3), path=tmp_path / "file.ckpt", max_epochs=2)
        trainer.save_checkpoint(tmp_path / "folder.ckpt")
        assert (tmp_path / "folder.ckpt").is_dir()
        trainer = train(zero(3), path=tmp_path / "folder.ckpt", max_epochs=3)
        assert_same_weights(weights_of(trainer), expected.weights)


def save_both_kinds(folder: Path) -> None:
    """Run on the ranks that write: one epoch of the same training under every strategy."""
    for kind, strategy in {"full": zero(1), "sharded": sharded(1)}.items():
        train(strategy, max_epochs=1).save_checkpoint(folder / f"{kind}.ckpt")
    train(ddp(), max_epochs=1).save_checkpoint(folder / "ddp.ckpt")


def resume_both_kinds(folder: Path, stage: int) -> None:
    """Run on the ranks that read: a second epoch, from every checkpoint."""
    reference = make_trainer(ddp())
    expected = TinyModule()
    reference.fit(expected, loader(), loader(2), ckpt_path=folder / "ddp.ckpt")
    runs = []
    for source in ("full", "sharded"):
        with subtest(source):
            runs.append(module := TinyModule())
            trainer = make_trainer(zero(stage))
            trainer.fit(module, loader(), loader(2), ckpt_path=folder / f"{source}.ckpt")
            assert_same_losses(module, runs[0])
            assert torch.allclose(torch.stack(module.losses), torch.stack(expected.losses), rtol=1e-5)


@pytest.mark.parametrize(
    ("writers", "readers", "stage"),
    [(2, 3, 3), pytest.param(3, 1, 2, marks=pytest.mark.slow), pytest.param(1, 2, 1, marks=pytest.mark.slow)],
)
def test_both_kinds_resume_at_another_number_of_ranks_and_stage(
    tmp_path: Path, writers: int, readers: int, stage: int
) -> None:
    run_ranks(save_both_kinds, writers, {"folder": tmp_path}, timeout=120)
    run_ranks(resume_both_kinds, readers, {"folder": tmp_path, "stage": stage}, timeout=120)


class Notes(Callback):
    """Keeps something of its own, of whatever class."""

    def __init__(self, note: Any) -> None:
        self.note = note
        self.found: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"note": self.note}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.found = state["note"]


class Editing(TinyModule):
    """Renames, changes, adds and removes on the way in; stores something on the way out."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.tail = self.head  # under another name
        del self.head

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.tail(self.last(self.frozen(x))) * self.scale

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"words": ["a", "b"], "tensor": torch.arange(3)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        assert weights["first.weight"].shape == (15, 4)  # a look is no change: its master must not be rounded
        for name in [name for name in weights if name.startswith("head.")]:
            weights[name.replace("head.", "tail.")] = weights.pop(name)
        weights["tail.bias"].fill_(5.0)
        weights["first.bias"].mul_(2.0)
        del weights["frozen.bias"]
        self.mine = checkpoint.get("mine")


@pytest.mark.slow
@distributed(world_size=2)
def test_hooks_edit_a_folder_as_they_edit_a_file(tmp_path: Path) -> None:
    precision = "bf16-true"  # with masters
    results = []
    for kind, strategy in {"full": zero(3), "sharded": sharded(3)}.items():
        with subtest(f"{kind} {precision}"):
            path = tmp_path / f"{precision}-{kind}.ckpt"
            train(strategy, max_epochs=1, precision=precision).save_checkpoint(path)
            trainer = make_trainer(zero(2), precision=precision)
            trainer.fit(module := Editing(), loader(), loader(2), ckpt_path=path)
            assert module.mine is None
            trainer.save_checkpoint(tmp_path / "again.ckpt")
            trainer = make_trainer(zero(1), precision=precision)
            trainer.validate(module := Editing(), loader(1), ckpt_path=tmp_path / "again.ckpt", verbose=False)
            assert module.mine["words"] == ["a", "b"] and torch.equal(module.mine["tensor"], torch.arange(3))
            results.append(weights_of(trainer))
            if dist.get_rank() == 0:
                assert results[-1]["tail.bias"].item() == 5.0
    assert_same_weights(results[1], results[0])


class Forgetful(TinyModule):
    """Begins with new optimizers."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []
        checkpoint["lr_schedulers"] = []


@distributed(world_size=2)
def test_optimizer_states_dropped_by_a_hook_stay_dropped(tmp_path: Path) -> None:
    with subtest("as DDP"):
        fit(ddp(), max_epochs=1).trainer.save_checkpoint(tmp_path / "file.ckpt")
        train(sharded(3), max_epochs=1).save_checkpoint(tmp_path / "folder.ckpt")
        expected = fit(ddp(), Forgetful, ckpt_path=tmp_path / "file.ckpt")
        found = fit(zero(3), Forgetful, ckpt_path=tmp_path / "folder.ckpt")
        assert_same_weights(found.weights, expected.weights)


@pytest.mark.slow
@distributed(world_size=2)
def test_several_optimizers_and_no_optimizer_resume(tmp_path: Path) -> None:
    for make_module in (Gan, Eternal):
        with subtest(make_module.__name__):
            expected = weights_of(train(zero(3), make_module, num_sanity_val_steps=0))
            path = tmp_path / make_module.__name__
            train(sharded(3), make_module, max_epochs=1).save_checkpoint(path)
            assert_same_weights(weights_of(train(sharded(1), make_module, path)), expected)
    with subtest("another number is refused"), expect_error(zs.CheckpointError, ["1 optimizers", "2"]):
        train(sharded(1), max_epochs=1).save_checkpoint(tmp_path / "one")
        train(sharded(1), TwoOptimizers, tmp_path / "one")


@pytest.mark.slow
@distributed(world_size=2)
def test_two_optimizers_with_schedulers_go_from_ddp_to_stage_3_and_back(tmp_path: Path) -> None:
    expected = fit(ddp(), Gan, max_epochs=3)
    path = None
    for epoch, strategy in enumerate((ddp(), zero(3), ddp()), 1):
        found = fit(strategy, Gan, ckpt_path=path, max_epochs=epoch)
        found.trainer.save_checkpoint(path := tmp_path / f"gan-{epoch}.ckpt")
    assert_same_weights(found.weights, expected.weights)
    # The last epoch's losses: those of a module of its own, each time.
    assert torch.equal(torch.stack(found.module.losses), torch.stack(expected.module.losses[-5:]))


class Gan(TinyModule):
    """Two optimizers with a scheduler each, stepped in turn; one of them has momentum."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = torch.optim.AdamW([*self.first.parameters(), *self.blocks.parameters()], lr=1e-2)
        second = torch.optim.SGD(self.head.parameters(), lr=1e-2, momentum=0.9)
        return [first, second], [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in (first, second)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        optimizer, scheduler = optimizers[batch_idx % 2], schedulers[batch_idx % 2]
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach().clone())
        for other in optimizers:
            other.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        scheduler.step()


class Eternal(TinyModule):
    """Nothing to optimize."""

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return super().training_step(batch, batch_idx)


@distributed(world_size=2)
def test_a_folder_evaluates_alone_without_an_optimizer(tmp_path: Path) -> None:
    with subtest("validate, test, predict"):
        train(sharded(3), max_epochs=1).save_checkpoint(tmp_path / "folder")
        train(sharded(3), max_epochs=1).save_checkpoint(tmp_path / "light", weights_only=True)
        fit(ddp(), max_epochs=1).trainer.save_checkpoint(tmp_path / "file.ckpt")
        results = []
        for strategy, path in [
            (ddp(), "file.ckpt"),
            (zero(2), "folder"),
            (sharded(3), "light"),
            (zero(1), "file.ckpt"),
        ]:
            trainer = make_trainer(strategy)
            module = NoOptimizer()
            keywords = {"ckpt_path": tmp_path / path}
            results.append(
                (
                    trainer.validate(module, loader(2), verbose=False, **keywords),
                    trainer.test(module, loader(2), verbose=False, **keywords),
                    torch.cat(trainer.predict(module, loader(2), **keywords)).tolist(),
                )
            )
        assert results[0] == results[1] == results[2] == results[3]
    with subtest("weights alone are no resume"), expect_error(KeyError, "optimizer state"):
        train(zero(3), path=tmp_path / "light")


class NoOptimizer(TinyModule):
    def configure_optimizers(self) -> None:
        raise AssertionError("evaluation builds no optimizer")


class Exotic(TinyModule):
    """Buffers that stay fp32 under bf16-true, one that is not saved, an integer one, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((3,), 1 / 3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.words = "fresh"

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        mean = self.mean
        super()._apply(fn, recurse)
        self.mean = mean
        return self

    def get_extra_state(self) -> dict[str, Any]:
        return {"words": self.words}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.words = state["words"]

    def on_train_epoch_end(self) -> None:
        self.count += 7
        self.mean.mul_(1.5)
        self.words = "trained"


@distributed(world_size=2)
def test_buffers_frozen_tied_and_extra_state_survive(tmp_path: Path) -> None:
    for kind, strategy in {"full": zero(3), "sharded": sharded(3)}.items():
        with subtest(kind):
            trainer = make_trainer(strategy, max_epochs=1, precision="bf16-true")
            trainer.fit(saved := Exotic(), loader())
            trainer.save_checkpoint(tmp_path / kind)
            expected = weights_of(trainer)
            trainer = make_trainer(zero(1), precision="bf16-true")
            trainer.validate(found := Exotic(), loader(1), ckpt_path=tmp_path / kind, verbose=False)
            assert found.words == "trained" and found.count.item() == 7
            assert found.mean.dtype == saved.mean.dtype == torch.float32 and torch.equal(
                found.mean, saved.mean
            )
            expected.pop("_extra_state", None), (weights := weights_of(trainer)).pop("_extra_state", None)
            assert_same_weights(weights, expected)


@pytest.mark.slow
@distributed(world_size=2)
def test_classes_torch_does_not_trust_need_the_users_word(tmp_path: Path) -> None:
    for kind, strategy in {"full": zero(3), "sharded": sharded(3)}.items():
        note = Path("a-class-of-its-own")
        with subtest(f"{kind}: refused"):
            train(strategy, max_epochs=1, callbacks=[Notes(note)]).save_checkpoint(tmp_path / kind)
        with expect_error(zs.CheckpointError, ["PosixPath", "weights_only=False"]):
            train(zero(1), path=tmp_path / kind, callbacks=[Notes(None)])
        with subtest(f"{kind}: trusted"):
            callback = Notes(None)
            trainer = make_trainer(zero(1), callbacks=[callback])
            trainer.fit(TinyModule(), loader(), loader(2), ckpt_path=tmp_path / kind, weights_only=False)
            assert callback.found == note
    with subtest("what cannot be pickled"), expect_error(zs.CheckpointError, ["Can't", "callback"]):
        train(sharded(3), max_epochs=1, callbacks=[Notes(lambda: None)]).save_checkpoint(tmp_path / "no")


@distributed(world_size=2)
def test_what_cannot_be_a_checkpoint_is_refused_on_all_ranks(tmp_path: Path) -> None:
    with subtest("set up"):
        train(sharded(3), max_epochs=1).save_checkpoint(tmp_path / "runs" / "folder")
        full, folder = train(zero(3), max_epochs=1), train(sharded(3), max_epochs=1)
        full.save_checkpoint(tmp_path / "file.ckpt")
        engine_alone = tmp_path / "engine"
        full.strategy.engine.save_checkpoint(engine_alone)
        if dist.get_rank() == 0:
            torch.save({"first.weight": torch.zeros(2)}, tmp_path / "raw.pt")
            content = (tmp_path / "file.ckpt").read_bytes()
            (tmp_path / "damaged.ckpt").write_bytes(content[:2000])
            (tmp_path / "half.ckpt").write_bytes(content[: len(content) // 2])
        dist.barrier()
    with subtest("the outer folder of one checkpoint loads"):
        make_trainer(zero(1)).validate(TinyModule(), loader(1), ckpt_path=tmp_path / "runs", verbose=False)
        folder.save_checkpoint(tmp_path / "runs" / "other")
    before = (tmp_path / "file.ckpt").read_bytes()
    with subtest("a file over a folder"), expect_error(zs.CheckpointError, ["is a folder", "sharded"]):
        full.save_checkpoint(tmp_path / "runs" / "folder")
    with subtest("a folder over a file"), expect_error(zs.CheckpointError, ["is a file", "full"]):
        folder.save_checkpoint(tmp_path / "file.ckpt")
    assert (tmp_path / "file.ckpt").read_bytes() == before
    with subtest("a remote folder"), expect_error(zs.CheckpointError, ["s3://", "CheckpointIO"]):
        folder.save_checkpoint("s3://bucket/folder")
    with subtest("storage options"), expect_error(zs.ConfigError, "storage_options"):
        folder.save_checkpoint(tmp_path / "other", storage_options={"a": 1})
    paths = {
        "missing.ckpt": ["missing.ckpt", "does not exist"],
        "runs": ["holds 2 checkpoints: folder, other"],
        "raw.pt": ["no checkpoint of a Trainer", "first.weight"],
        "damaged.ckpt": ["damaged.ckpt", "cannot be read", "damaged"],
        "half.ckpt": ["half.ckpt", "cannot be read", "damaged"],
        "engine": ["no checkpoint of a Trainer", "engine.load_checkpoint"],
    }
    for name, words in paths.items():
        with subtest(name), expect_error(zs.CheckpointError, words):
            make_trainer(zero(1)).validate(TinyModule(), loader(1), ckpt_path=tmp_path / name, verbose=False)
    with subtest("an unknown type"), expect_error(zs.ConfigError, ["'sharted'", "'sharded'"]):
        zs.ZeroStrategy(state_dict_type="sharted")


def save_with_callback(folder: Path) -> None:
    """Train under `ModelCheckpoint` in every way it names, keeps and deletes."""
    best = ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_top_k=1, monitor="val_loss", save_last="link"
    )
    trainer = train(sharded(3), max_epochs=3, callbacks=[best], enable_checkpointing=True)
    kept = sorted(path.name for path in folder.iterdir())
    assert kept == ["epoch=2.ckpt", "last.ckpt"] and best.best_model_path == str(folder / "epoch=2.ckpt")
    assert (folder / "last.ckpt").is_symlink() and (folder / "epoch=2.ckpt" / "manifest.json").exists()
    results = [
        trainer.validate(ckpt_path=path, verbose=False, dataloaders=loader(2)) for path in ("best", "last")
    ]
    assert results[0] == results[1]
    trainer = make_trainer(sharded(3), default_root_dir=folder / "slurm", max_epochs=4)
    trainer.fit(TinyModule(), loader(), ckpt_path=folder / "last.ckpt")
    trainer.save_checkpoint(folder / "slurm" / "hpc_ckpt_1.ckpt")
    trainer = make_trainer(zero(1), default_root_dir=folder / "slurm", max_epochs=5)
    trainer.fit(TinyModule(), loader(), ckpt_path="hpc")
    assert trainer.global_step == 25


def test_model_checkpoint_keeps_links_and_deletes_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(save_with_callback, 2, {"folder": tmp_path})
    folder = tmp_path / "last.ckpt"
    # What the command line does with a folder of a Trainer.
    assert main(["verify", str(folder)]) == 0 and "as they were written" in capsys.readouterr().out
    assert main(["consolidate", str(folder), str(tmp_path / "out")]) == 0
    with CheckpointReader(folder) as reader:
        assert reader.manifest.stage == 3 and "lightning" in str(reader.manifest.extra)
    plain = tmp_path / "plain.ckpt"
    torch.save({"state_dict": {}}, plain)
    capsys.readouterr()
    for command in (["inspect", str(plain)], ["consolidate", str(plain), str(tmp_path / "out2")]):
        assert main(command) == 2
        assert "load_from_checkpoint" in capsys.readouterr().err


PLAIN = """
import sys
from tests.integrations.lightning_support import TinyModule  # before the ban: the tests' own support uses it
for name in [name for name in sys.modules if name.split(".")[0] == "zero_strategy"]:
    del sys.modules[name]
sys.modules["zero_strategy"] = None
module = TinyModule.load_from_checkpoint(sys.argv[1])
print(module.head.bias.item())
"""


def save_file(path: Path) -> float:
    trainer = train(zero(3), max_epochs=1, precision="bf16-true")
    trainer.save_checkpoint(path)
    weights = weights_of(trainer)
    return weights["head.bias"].item() if weights else 0.0


@pytest.mark.slow
def test_plain_lightning_loads_the_file_without_zero_strategy(tmp_path: Path) -> None:
    expected = run_ranks(save_file, 2, {"path": tmp_path / "file.ckpt"})[0]
    command = [sys.executable, "-c", PLAIN, str(tmp_path / "file.ckpt")]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert float(found.stdout) == expected
