"""Checkpoints under tags, by engines on several ranks: saved, found again, kept, deleted, refused on all.

Oracles: the whole state gathered before the save, bit for bit; the folder's listing.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import torch
import torch.distributed as dist

import zero_strategy as zs
from tests.distributed.state_support import LAYOUTS, assert_same, engine_of, train, whole_state
from tests.harness import distributed, expect_error, rank, subtest
from zero_strategy.checkpoint import tags
from zero_strategy.checkpoint.own_files import MANIFEST_NAME


@distributed(world_size=2)
def test_a_run_is_resumed_from_its_outer_folder_from_a_tag_and_from_the_inner_one(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine, optimizer = engine_of(LAYOUTS[3])
    states = {}
    for number in (1, 2, 3, 4):
        train(engine.model, optimizer, 1)
        engine.save_checkpoint(runs, extra={"number": number}, tag=f"step-{number}", keep_last=2)
        dist.barrier()
        assert (runs / "latest").read_text() == f"step-{number}\n"
        left = {f"step-{kept}" for kept in (number - 1, number) if kept} | {"latest"}
        assert set(os.listdir(runs)) == left
        dist.barrier()
        states[number] = whole_state(engine)
    other, _ = engine_of(LAYOUTS[1], seed=5)
    for path, tag, number in (
        (runs, None, 4),
        (runs, "step-3", 3),
        (runs, "step-4", 4),
        (runs / "step-3", None, 3),
    ):
        with subtest(f"{path.name} {tag}"):
            assert other.load_checkpoint(path, tag) == {"number": number}
            assert_same(whole_state(other), states[number])
    with other.open_checkpoint(runs, tag="step-3") as opened:
        assert opened.extra() == {"number": 3}
    dist.barrier()
    if rank() == 0:
        (runs / "latest").unlink()
    dist.barrier()
    for path, tag, texts in (
        (runs, None, ["holds 2 checkpoints: step-3, step-4"]),
        (runs, "step-1", ["'step-1'", "newest first: step-4, step-3"]),
        (runs / "step-3", "step-3", ["Leave the tag out"]),
    ):
        with subtest(f"refused: {path.name} {tag}"), expect_error(zs.CheckpointError, ["[rank 0]", *texts]):
            other.load_checkpoint(path, tag)
    assert_same(whole_state(other), states[3])  # the last that was loaded


@distributed(world_size=2)
def test_a_save_under_a_tag_is_checked_on_all_ranks_before_anything_is_written(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine, _ = engine_of(LAYOUTS[1])
    for arguments, texts in (
        ({"tag": "a/b"}, ["'a/b' is no tag"]),
        ({"tag": "a", "keep_last": 0}, ["keep_last=0"]),
        ({"keep_last": 2}, ["tag=None"]),
    ):
        with subtest(f"{arguments}"), expect_error(zs.ConfigError, texts):
            engine.save_checkpoint(runs, **arguments)
    assert not runs.exists()
    engine.save_checkpoint(runs, tag="a")
    with expect_error(zs.CheckpointError, ["holds checkpoints under tags"]):
        engine.save_checkpoint(runs)
    with expect_error(zs.CheckpointError, ["is itself a checkpoint"]):
        engine.save_checkpoint(runs / "a", tag="b")
    dist.barrier()
    assert sorted(os.listdir(runs)) == ["a", "latest"]


@distributed(world_size=2)
def test_a_checkpoint_whose_pointer_cannot_be_written_is_kept_and_said(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    engine, _ = engine_of(LAYOUTS[1])
    engine.save_checkpoint(runs, extra=1, tag="a")
    dist.barrier()

    def refuse(path: Path, content: bytes, temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    replace_file, tags.replace_file = tags.replace_file, refuse
    try:
        with expect_error(zs.CheckpointError, ["[rank 0]", "latest could not be written", "'b' is complete"]):
            engine.save_checkpoint(runs, extra=2, tag="b", keep_last=1)
    finally:
        tags.replace_file = replace_file
    dist.barrier()
    assert (runs / "latest").read_text() == "a\n"
    assert engine.load_checkpoint(runs) == 1  # not deleted, as it is still the latest
    assert engine.load_checkpoint(runs, "b") == 2


@distributed(world_size=2)
def test_a_save_that_fails_leaves_nothing_of_a_folder_that_was_not_there(tmp_path: Path) -> None:
    engine, optimizer = engine_of(LAYOUTS[1])
    optimizer.param_groups[0]["hook"] = print
    if rank() == 0:
        (tmp_path / "runs").mkdir()
    dist.barrier()
    with expect_error(zs.CheckpointError, ["'hook'", "pickle"]):
        engine.save_checkpoint(tmp_path / "runs" / "c")
    dist.barrier()
    assert os.listdir(tmp_path / "runs") == []
    del optimizer.param_groups[0]["hook"]
    engine.save_checkpoint(tmp_path / "runs" / "c")
    dist.barrier()
    assert os.listdir(tmp_path / "runs") == ["c"]
    assert len(os.listdir(tmp_path / "runs" / "c")) == 3


@distributed(world_size=2)
def test_extra_state_that_is_a_slice_of_something_large_is_stored_alone(tmp_path: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1])
    large = torch.arange(1_000_000, dtype=torch.float32)
    engine.save_checkpoint(tmp_path / "without")
    engine.save_checkpoint(tmp_path / "with", extra={"x": large[10:20], "y": large[::200_000]})
    dist.barrier()
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).glob("rank-*")) for name in ("without", "with")
    ]
    assert 0 < sizes[1] - sizes[0] < 1000
    found = engine.load_checkpoint(tmp_path / "with")
    assert torch.equal(found["x"], large[10:20]) and torch.equal(found["y"], large[::200_000])
    kinds = {path.suffix for path in (tmp_path / "with").iterdir()}
    assert kinds == {".json", ".safetensors"} and (tmp_path / "with" / MANIFEST_NAME).exists()  # no pickle
