"""What a save leaves on the disk: bytes, files, failed and killed saves, consolidation by the command line.

Oracles: sizes written as sums; the folder before the save; the whole state gathered on rank 0, bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.state_support import (
    BF16,
    LAYOUTS,
    assert_same,
    build,
    engine_of,
    save_alone,
    sharded,
    train,
    whole_state,
)
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.models import Mlp
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.safetensors_io import RankFile
from zero_strategy.cli import main

# -- on disk -------------------------------------------------------------------------------------------------


@distributed(world_size=[2, 4])
def test_a_checkpoint_takes_no_more_than_its_tensors(tmp_path: Path) -> None:
    for layout in ({"stage": 0}, {"stage": 3}, {"stage": 2, **BF16}):
        with subtest(f"{layout}"):
            torch.manual_seed(0)
            engine = sharded(Mlp(depth=4, width=256), **layout)
            optimizer = engine.shard_optimizer(torch.optim.AdamW(engine.model.parameters()))
            inputs = torch.randn(2, 256, dtype=next(engine.model.parameters()).dtype)
            engine.model(inputs).sum().backward()
            optimizer.step()
            engine.save_checkpoint(tmp_path / "c")
            psi = sum(param.numel() for param in engine.model.parameters())
            found = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
            # fp32 weights (or masters) and two fp32 moments; nothing twice, no padding.
            assert 12 * psi <= found <= 1.05 * 12 * psi
            engine.close()


@distributed(world_size=2)
def test_ranks_write_their_files_at_the_same_time(tmp_path: Path) -> None:
    """No rank waits for another's write, only for the end of all."""
    write, engine, num_met = RankFile.write, sharded(build(), stage=3), 0
    meeting = dist.new_group(timeout=timedelta(seconds=30))

    def meet_and_write(*args: Any) -> Any:
        nonlocal num_met
        dist.barrier(meeting)  # who writes alone waits here in vain
        num_met += 1
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankFile, "write", meet_and_write)
        engine.save_checkpoint(tmp_path / "c")
    assert num_met == 1
    engine.close()


@distributed(world_size=2)
def test_saving_twice_into_a_folder_leaves_the_second_checkpoint_only(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    engine, optimizer = engine_of(LAYOUTS[1])
    engine.save_checkpoint(folder, extra={"number": 1})
    first = {path.name for path in folder.iterdir()}
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 2})
    second = {path.name for path in folder.iterdir()}
    assert len(second) == 3 and first & second == {MANIFEST_NAME}
    expected = whole_state(engine)
    other, _ = engine_of(LAYOUTS[3], seed=5)
    assert other.load_checkpoint(folder) == {"number": 2}
    assert_same(whole_state(other), expected)


def save_until_killed(folder: Path, delay_s: float) -> None:
    """Save over and over; rank 1 is killed after a while, wherever it is then, and rank 0 must notice."""
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 1})
    expected = whole_state(engine)
    if rank() == 0:
        torch.save(expected, folder.parent / "expected.pt")
    else:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    with pytest.raises(zs.ZeroError):
        while True:
            engine.save_checkpoint(folder, extra={"number": 1})


def load_what_is_left(folder: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1], seed=5)
    assert engine.load_checkpoint(folder) == {"number": 1}
    assert_same(whole_state(engine), torch.load(folder.parent / "expected.pt", weights_only=False))
    engine.save_checkpoint(folder, extra={"number": 3})
    dist.barrier()
    assert len(list(folder.iterdir())) == 3, "what the killed save left is removed by the next one"


@pytest.mark.parametrize("delay_s", [0.02, 0.1])
def test_a_rank_killed_while_saving_leaves_a_checkpoint_that_loads(delay_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(save_until_killed, 2, {"folder": folder, "delay_s": delay_s})
    run_ranks(load_what_is_left, 2, {"folder": folder})


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@distributed(world_size=3)
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 1})
    expected = whole_state(engine)
    before = sorted(path.name for path in folder.iterdir())
    train(engine.model, optimizer, 1)
    for broken in (0, 1, 2):
        with subtest(f"rank {broken}"):
            limit = file_size_limit(5_000) if rank() == broken else contextlib.nullcontext()
            start = time.monotonic()
            with limit, expect_error(zs.CheckpointError, f"[rank {broken}]") as info:
                engine.save_checkpoint(folder, extra={"number": 2})
            assert time.monotonic() - start < 10
            assert "too large" in str(info.value) or "space" in str(info.value)
            dist.barrier()
            assert sorted(path.name for path in folder.iterdir()) == before
    other, _ = engine_of(LAYOUTS[1], seed=5)
    assert other.load_checkpoint(folder) == {"number": 1}
    assert_same(whole_state(other), expected)
    engine.save_checkpoint(folder, extra={"number": 2})
    assert other.load_checkpoint(folder) == {"number": 2}


@distributed(world_size=2)
def test_a_file_where_the_folder_should_be_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1])
    if rank() == 0:
        (tmp_path / "taken").write_text("mine")
    dist.barrier()
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with subtest(path.name), expect_error(zs.CheckpointError, ["[rank 0]", "taken", "another path"]):
            engine.save_checkpoint(path)
    assert (tmp_path / "taken").read_text() == "mine"


@distributed(world_size=2)
def test_extra_that_cannot_be_stored_is_refused_on_all_ranks_before_anything_is_written(
    tmp_path: Path,
) -> None:
    engine, optimizer = engine_of(LAYOUTS[1])
    with expect_error(zs.CheckpointError, ["[rank 0]", 'extra["a"][1]', "pickle"]):
        engine.save_checkpoint(tmp_path / "c", extra={"a": [1, object()]})
    optimizer.param_groups[0]["hook"] = print
    with expect_error(zs.CheckpointError, ["'hook'", "pickle"]):
        engine.save_checkpoint(tmp_path / "c")
    dist.barrier()
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()
    assert not list((tmp_path / "c").glob("rank-*")) if (tmp_path / "c").exists() else True


# -- consolidation -------------------------------------------------------------------------------------------


def save_for_consolidation(folder: Path) -> None:
    for name, layout in (("fp32", LAYOUTS[3]), ("bf16", LAYOUTS[4])):
        engine, optimizer = engine_of(layout)
        train(engine.model, optimizer, 2)
        engine.save_checkpoint(folder / name)
        whole = whole_state(engine)["weights"]
        masters = engine.full_state_dict(dtype=torch.float32)
        if rank() == 0:
            torch.save(whole, folder / f"{name}.pt")
            torch.save(masters, folder / f"{name}-masters.pt")


def test_a_consolidated_checkpoint_loads_strictly_into_the_plain_model(tmp_path: Path) -> None:
    run_ranks(save_for_consolidation, 3, {"folder": tmp_path})
    for name in ("fp32", "bf16"):
        assert main(["consolidate", str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 0
        found = safetensors.torch.load_file(tmp_path / f"{name}-out" / "model.safetensors")
        expected = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
        aliases = {"head.weight": "embed.weight", "right.weight": "left.weight"}
        assert_same({key: found[aliases.get(key, key)] for key in tensors}, tensors)
        model = build()
        model.counting = nn.Identity()
        missing, unexpected = safetensors.torch.load_model(
            model, tmp_path / f"{name}-out" / "model.safetensors", strict=True
        )
        assert (missing, unexpected) == (set(), [])
        for key, value in model.state_dict().items():
            assert torch.equal(value, tensors[key].to(value.dtype)), key


def test_a_consolidated_bf16_checkpoint_can_give_its_fp32_masters(tmp_path: Path) -> None:
    run_ranks(save_for_consolidation, 2, {"folder": tmp_path})
    assert main(["consolidate", str(tmp_path / "bf16"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    rounded = torch.load(tmp_path / "bf16.pt", weights_only=False)
    master = found["shared.weight"]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), rounded["shared.weight"])
    assert not torch.equal(master, rounded["shared.weight"].float())
    masters = torch.load(tmp_path / "bf16-masters.pt", weights_only=False)
    assert_same(found, {name: masters[name] for name in found})


def test_the_manifest_names_what_a_reader_needs(tmp_path: Path) -> None:
    run_ranks(save_alone, 1, {"folder": tmp_path}, process_group=False)
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    document = json.loads((folder / MANIFEST_NAME).read_text())
    optimizer = document["optimizers"][0]
    assert optimizer["class"] == "AdamW"
    assert [group["betas"] for group in optimizer["param_groups"]] == [[0.9, 0.999], [0.8, 0.95]]
    assert "embed.weight" in optimizer["param_groups"][0]["params"]
    assert main(["verify", str(folder)]) == 0
    assert os.listdir(folder)
