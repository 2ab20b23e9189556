"""Lightning checkpoints written under ZeroStrategy: one plain file that any strategy loads.

Oracle: the uninterrupted run. A run that is saved after one epoch and resumed must end with the same bits,
whichever strategies wrote and read the file (2 ranks, so the order of additions is DDP's). Tolerance 0
throughout.
"""

from __future__ import annotations

import logging
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_weights,
    ddp,
    fit,
    loader,
    make_trainer,
    whole_weights,
    zero,
)
from tests.recorder import logged
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.lightning import checkpoint_files
from zero_strategy.lightning.checkpoints import RNG_KEY
from zero_strategy.log import log_once


def fit_and_save(strategy: Any, folder: Path, **keywords: Any) -> Path:
    """Train one epoch under ModelCheckpoint and return the file."""
    callback = ModelCheckpoint(dirpath=folder, filename="epoch", save_top_k=1, monitor="val_loss")
    settings = {"max_epochs": 1, "callbacks": [callback], "enable_checkpointing": True, **keywords}
    outcome = fit(strategy, **settings)
    assert outcome.trainer.checkpoint_callback.best_model_path == str(folder / "epoch.ckpt")
    return folder / "epoch.ckpt"


@distributed(world_size=2, timeout=120)
def test_resumed_equals_uninterrupted_across_strategies(tmp_path: Path) -> None:
    with subtest("uninterrupted"):
        expected = fit(ddp(), max_epochs=3)
    chains: dict[str, list[Any]] = {
        "1": [zero(1), zero(1), zero(1)],
        "3": [zero(3), zero(3), zero(3)],
        "ddp-3-ddp": [ddp(), zero(3), ddp()],
        "2-ddp-3": [zero(2), ddp(), zero(3)],
        "3-1-2, other buckets": [
            zero(3, reduce_bucket_size=100),
            zero(1),
            zero(2, reduce_bucket_size=10_000),
        ],
    }
    for name, strategies in chains.items():
        with subtest(name):
            path = None
            for epoch, strategy in enumerate(strategies, 1):
                trainer = make_trainer(strategy, max_epochs=epoch)
                module = TinyModule()
                trainer.fit(module, loader(), loader(2), ckpt_path=path)
                path = str(tmp_path / name / f"{epoch}.ckpt")
                trainer.save_checkpoint(path)
            assert_same_weights(whole_weights(trainer), expected.weights)
            assert trainer.global_step == expected.trainer.global_step
            lrs = [group["lr"] for group in trainer.optimizers[0].param_groups]
            assert lrs == [group["lr"] for group in expected.trainer.optimizers[0].param_groups]


@distributed(world_size=2)
def test_bf16_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    with subtest("uninterrupted"):
        expected = fit(zero(2), precision="bf16-true")
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            path = fit_and_save(zero(stage), tmp_path / str(stage), precision="bf16-true")
            found = fit(zero(stage), precision="bf16-true", ckpt_path=path)
            assert_same_weights(found.weights, expected.weights)


@distributed(world_size=2)
def test_file_is_what_ddp_writes(tmp_path: Path) -> None:
    files = {}
    for name, strategy in {"ddp": ddp(), "1": zero(1), "3": zero(3)}.items():
        with subtest(name):
            path = fit_and_save(strategy, tmp_path / name)
            files[name] = torch.load(path, weights_only=True)
            found, expected = files[name], files["ddp"]
            ours_alone = found.pop(RNG_KEY, None)
            assert (ours_alone is None) == (name == "ddp") and found.keys() == expected.keys()
            assert (
                list(found["state_dict"]) == list(expected["state_dict"]) == list(TinyModule().state_dict())
            )
            for key, value in expected["state_dict"].items():
                assert torch.equal(found["state_dict"][key], value), key
            ours, theirs = found["optimizer_states"][0], expected["optimizer_states"][0]
            assert ours["param_groups"] == theirs["param_groups"]
            assert ours["state"].keys() == theirs["state"].keys()
            for index, entry in theirs["state"].items():
                for key, value in entry.items():
                    assert torch.equal(ours["state"][index][key], value), (index, key)
            # Whole tensors only: none drags a larger buffer into the file.
            rng_bytes = len(str(ours_alone))
            assert path.stat().st_size < 1.2 * (tmp_path / "ddp" / "epoch.ckpt").stat().st_size + rng_bytes


@distributed(world_size=2)
def test_plain_lightning_loads_the_file(tmp_path: Path) -> None:
    with subtest("load_from_checkpoint"):
        path = fit_and_save(zero(3), tmp_path)
        module = TinyModule.load_from_checkpoint(path)
        with subtest("and ZeroStrategy evaluates it as DDP does"):
            results = []
            for strategy in (ddp(), zero(3)):
                trainer = make_trainer(strategy)
                results.append(trainer.test(TinyModule(), loader(2), ckpt_path=path, verbose=False))
            results.append(make_trainer(ddp()).test(module, loader(2), verbose=False))
            assert results[0] == results[1] == results[2]


class Renamed(TinyModule):
    """Edits weights on their way in, and lacks a key."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["head.bias"] = torch.full((1,), 5.0)
        checkpoint["state_dict"]["unknown"] = torch.zeros(2)


class Strict(Renamed):
    strict_loading = True


@distributed(world_size=2)
def test_on_load_checkpoint_edits_count(tmp_path: Path) -> None:
    with subtest("edit"):
        path = fit_and_save(zero(3), tmp_path)
        trainer = make_trainer(zero(3))
        trainer.validate(Renamed(), loader(1), ckpt_path=path, verbose=False)
        weights = whole_weights(trainer)
        assert dist.get_rank() != 0 or weights["head.bias"].item() == 5.0
    with subtest("strict"), expect_error(RuntimeError, "unknown"):
        make_trainer(zero(3)).validate(Strict(), loader(1), ckpt_path=path, verbose=False)


class TwoOptimizers(TinyModule):
    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.first, self.head)]


@distributed(world_size=2)
def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    with subtest("two instead of one"):
        path = fit_and_save(zero(3), tmp_path)
        with expect_error(zs.CheckpointError, ["1 optimizers", "2", "configure_optimizers"]):
            fit(zero(3), TwoOptimizers, ckpt_path=path)


@distributed(world_size=2)
def test_engine_is_usable_after_fit() -> None:
    for stage in (1, 3):
        with subtest(f"stage {stage}"):
            outcome = fit(zero(stage), max_epochs=1)
            engine = outcome.trainer.strategy.engine
            assert isinstance(engine, zs.ZeroEngine) and engine.model is outcome.module
            assert_same_weights(whole_weights(outcome.trainer), outcome.weights)
            with engine.unsharded_params():
                whole = {name: p.detach().clone() for name, p in outcome.module.named_parameters()}
            if dist.get_rank() == 0:
                assert all(torch.equal(value, outcome.weights[name]) for name, value in whole.items())
            assert engine.ledger.comm["reduce_scatter"]["bytes_sent"] > 0


@distributed(world_size=2)
def test_folders_are_the_default_above_a_size_and_the_choice_is_logged_once(tmp_path: Path) -> None:
    trainer = fit(zero(3), max_epochs=1).trainer
    numel = sum(p.numel() * (1 + 2 * p.requires_grad) for p in TinyModule().parameters())  # weights, moments
    cases = {
        "small": (10 * 2**30, "files"),
        "limit": (4 * numel, "files"),
        "large": (4 * numel - 1, "folders"),
    }
    for name, (limit_bytes, kind) in cases.items():
        with subtest(name), logged(logging.INFO) as lines, pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_files, "FULL_LIMIT_BYTES", limit_bytes)
            log_once.cache_clear()
            for path in (tmp_path / name, tmp_path / f"{name}-again"):
                trainer.save_checkpoint(path)
            assert (tmp_path / name / MANIFEST_NAME).is_file() == (kind == "folders")
            assert (tmp_path / name).is_file() == (kind == "files")
            found = [line for line in lines if line.startswith("Checkpoints are")]
            assert len(found) == (dist.get_rank() == 0) and all(kind in line for line in found)
    with subtest("the user's word counts"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "FULL_LIMIT_BYTES", 0)
        trainer = make_trainer(zero(1, state_dict_type="full"), max_epochs=1)
        trainer.fit(TinyModule(), loader(), ckpt_path=tmp_path / "large")
        trainer.save_checkpoint(tmp_path / "full")
        assert (tmp_path / "full").is_file()


def wide() -> TinyModule:
    return TinyModule(width=100)


def data_offsets(path: Path) -> list[int]:
    """Return where each tensor of a file begins, in bytes."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        headers = [e.header_offset for e in archive.infolist() if "/data/" in e.filename and e.file_size > 4]
    return [
        at + 30 + sum(int.from_bytes(content[at + i : at + i + 2], "little") for i in (26, 28))
        for at in headers
    ]


@distributed(world_size=2)
def test_a_flipped_bit_in_a_single_file_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = fit_and_save(zero(3), tmp_path, make_module=wide)  # tensors, not what comes before, take the bytes
    good = path.read_bytes()
    offsets = data_offsets(path)
    for index, finder in ((0, 0), (-1, 1)):  # each rank compares its part
        with subtest(f"tensor {index}"):
            dist.barrier()
            if dist.get_rank() == 0:
                flipped = bytearray(good)
                flipped[offsets[index] + 1] ^= 4
                path.write_bytes(flipped)
            dist.barrier()
            torch.load(path, weights_only=True)  # which does not see it
            with expect_error(zs.CheckpointError, [f"[rank {finder}]", "is damaged", "/data/"]):
                fit(zero(1), wide, ckpt_path=path)
    with subtest("a file without checksums"):
        dist.barrier()
        if dist.get_rank() == 0:
            path.write_bytes(good)
            content = torch.load(path, weights_only=True)
            torch.serialization.set_crc32_options(False)
            torch.save(content, path)
        dist.barrier()
        fit(zero(1), wide, ckpt_path=path)
