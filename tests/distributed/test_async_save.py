"""Asynchronous saves: what is saved, that training goes on meanwhile, and what every failure leaves.

Oracles: a synchronous save at the same step, byte for byte; the losses of a run that saves nothing; the
checkpoint before. A save is held back by stopping its writer process (SIGSTOP), never by a time.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_strategy as zs
from tests import harness
from tests.distributed.state_support import EXTRA, LAYOUTS, assert_same, engine_of, train, whole_state
from tests.harness import distributed, expect_error, rank, run_ranks, subtest, world_size
from tests.launching import TORCHRUN, Ended, run_script
from tests.recorder import logged
from zero_strategy.checkpoint.extra import MODULES_KEY
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.comm import watch

CHECKPOINT_ID = re.compile(rb"[0-9a-f]{16}")


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def writer_pid(engine: zs.ZeroEngine) -> int:
    pid = engine._saves.writer.pid
    assert pid is not None
    return pid


@contextmanager
def held_back(engine: zs.ZeroEngine, where: int | None = None, for_s: float | None = None) -> Iterator[None]:
    """Within the block a save goes on: the writer process of one rank, or of all, is stopped.

    It goes on at the end of the block, or so long after its beginning.
    """
    pid = writer_pid(engine)
    if where not in (None, rank()):
        yield
        return
    go_on = threading.Timer(for_s or 0.0, lambda: os.kill(pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    try:
        if for_s is not None:
            go_on.start()
        yield
    finally:
        if for_s is None:
            go_on.start()
        go_on.join()


def begun(layout: int, folder: Path) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
    """An engine that has trained two steps and has a first asynchronous save, number 1, behind it."""
    engine, optimizer = engine_of(LAYOUTS[layout])
    train(engine.model, optimizer, 2)
    engine.save_checkpoint(folder, extra={"number": 1}, asynchronous=True)
    engine.wait_for_checkpoint()
    return engine, optimizer


def files_of(folder: Path) -> dict[str, bytes]:
    """The rank files of a checkpoint, by name; ids, which are drawn at random, taken out."""
    return {
        CHECKPOINT_ID.sub(b"ID", path.name.encode()).decode(): CHECKPOINT_ID.sub(b"ID", path.read_bytes())
        for path in folder.glob("rank-*")
    }


# -- what is saved -------------------------------------------------------------------------------------------


@distributed(world_size=[1, 2, 3])
def test_the_files_are_those_of_a_synchronous_save_though_training_goes_on(tmp_path: Path) -> None:
    for number in {1: [3], 2: [0, 2, 5], 3: [1, 4]}[world_size()]:
        with subtest(f"{LAYOUTS[number]}"):
            engine, optimizer = begun(number, tmp_path / f"{number}-first")
            train(engine.model, optimizer, 1, first=2)
            engine.save_checkpoint(tmp_path / f"{number}-sync", extra=EXTRA)
            with held_back(engine):
                engine.save_checkpoint(tmp_path / f"{number}-async", extra=EXTRA, asynchronous=True)
                train(engine.model, optimizer, 2, first=3)
            engine.wait_for_checkpoint()
            expected, found = files_of(tmp_path / f"{number}-sync"), files_of(tmp_path / f"{number}-async")
            assert len(expected) == world_size() and found == expected
            engine.close()


@distributed(world_size=2)
def test_a_checkpoint_that_is_still_written_can_be_loaded_at_once(tmp_path: Path) -> None:
    engine, optimizer = begun(3, tmp_path / "c")
    train(engine.model, optimizer, 1, first=2)
    expected = whole_state(engine)
    engine.save_checkpoint(tmp_path / "c", extra=EXTRA, asynchronous=True)
    train(engine.model, optimizer, 1, first=3)
    assert_same(engine.load_checkpoint(tmp_path / "c"), EXTRA)
    assert_same(whole_state(engine), expected)
    engine.close()


# -- while it goes on ----------------------------------------------------------------------------------------


@distributed(world_size=[1, 2])
def test_training_goes_on_while_a_save_does(tmp_path: Path) -> None:
    plain, optimizer = engine_of(LAYOUTS[3])
    expected = train(plain.model, optimizer, 6)
    plain.close()
    engine, optimizer = begun(3, tmp_path / "c")
    state = whole_state(engine)
    with held_back(engine):
        engine.save_checkpoint(tmp_path / "d", asynchronous=True)
        losses = train(engine.model, optimizer, 4, first=2)
        assert not (tmp_path / "d").exists(), "a checkpoint whose files are not written yet"
    assert torch.equal(torch.stack(losses), torch.stack(expected[2:]))
    engine.wait_for_checkpoint()
    other, _ = engine_of(LAYOUTS[1], seed=5)
    other.load_checkpoint(tmp_path / "d")
    assert_same(whole_state(other), state)
    other.close()
    engine.close()


@distributed(world_size=2)
def test_only_a_step_with_a_save_under_way_sends_a_message_more(tmp_path: Path) -> None:
    engine, optimizer = begun(1, tmp_path / "c")

    def messages_of_a_step() -> int:
        before = engine.ledger.comm["control"]["calls"]
        train(engine.model, optimizer, 1)
        return engine.ledger.comm["control"]["calls"] - before

    messages_of_a_step()
    usual = messages_of_a_step()
    with held_back(engine):
        engine.save_checkpoint(tmp_path / "c", asynchronous=True)
        assert messages_of_a_step() == messages_of_a_step() == usual + 1
    engine.wait_for_checkpoint()
    assert messages_of_a_step() == usual
    engine.close()


@distributed(world_size=2)
def test_the_call_sends_five_messages_and_flushes_nothing(tmp_path: Path) -> None:
    """What it takes beside the copy; each flush of a folder may take as long as that."""
    engine, _ = begun(3, tmp_path / "c")
    flushes_by_main: list[bool] = []
    flush = os.fsync

    def noting(descriptor: int) -> None:
        flushes_by_main.append(threading.current_thread() is threading.main_thread())
        flush(descriptor)

    os.fsync = noting
    before = engine.ledger.comm["control"]["calls"]
    engine.save_checkpoint(tmp_path / "new" / "folders" / "d", asynchronous=True)
    assert engine.ledger.comm["control"]["calls"] - before == 5
    assert not any(flushes_by_main)
    engine.wait_for_checkpoint()
    os.fsync = flush
    assert rank() or len(flushes_by_main) >= 5, "the manifest and every folder that is new, at the end"
    engine.close()


@distributed(world_size=2)
def test_a_second_save_waits_or_is_refused(tmp_path: Path) -> None:
    engine, _ = begun(3, tmp_path / "c")
    for asynchronous in (True, False):
        for where in (None, 1):
            with subtest(f"asynchronous={asynchronous}, held back on {where}"):
                with held_back(engine, where):
                    engine.save_checkpoint(tmp_path / "c", extra={"number": 2}, asynchronous=True)
                    with expect_error(zs.CheckpointError, [str(tmp_path / "c"), "if_busy"]):
                        engine.save_checkpoint(tmp_path / "d", asynchronous=asynchronous, if_busy="refuse")
                with held_back(engine, where, for_s=0.2):
                    engine.save_checkpoint(tmp_path / "c", extra={"number": 3}, asynchronous=True)
                    engine.save_checkpoint(tmp_path / "e", asynchronous=asynchronous)
                assert engine.load_checkpoint(tmp_path / "c") == {"number": 3}
                assert engine.load_checkpoint(tmp_path / "e") is None
    engine.save_checkpoint(tmp_path / "e", asynchronous=True)
    engine.wait_for_checkpoint()
    engine.save_checkpoint(tmp_path / "d", asynchronous=True, if_busy="refuse")
    engine.close()


@distributed(world_size=2)
def test_what_must_wait_for_a_save_is_done_when_it_is_complete_on_all_ranks_and_never_if_it_failed(
    tmp_path: Path,
) -> None:
    def fail() -> None:
        raise OSError("no such thing")

    engine, optimizer = begun(3, tmp_path / "c")
    saves, done = engine.saves, []
    saves.after(lambda: done.append("at once"))
    assert done == ["at once"] and saves.path is None
    with subtest("complete"):
        with held_back(engine, 1):
            engine.save_checkpoint(tmp_path / "d", asynchronous=True)
            if rank() == 0:  # ranks need not have the same to do
                saves.after(lambda: done.append((tmp_path / "d").exists()))
                saves.after(lambda: done.append("first"), comes_first=True)
            train(engine.model, optimizer, 2)
            assert done == ["at once"] and saves.path == str(tmp_path / "d")
        engine.wait_for_checkpoint()
        assert done == (["at once", "first", True] if rank() == 0 else ["at once"])
    with subtest("an error of one rank"), expect_error(zs.CheckpointError, ["[rank 1]", "no such thing"]):
        engine.save_checkpoint(tmp_path / "d", asynchronous=True)
        if rank() == 1:
            saves.after(fail)
        engine.wait_for_checkpoint()
    with subtest("failed"):
        with held_back(engine, 1):
            engine.save_checkpoint(tmp_path / "d", asynchronous=True)
            saves.after(lambda: done.append("after a failure"))
            if rank() == 1:
                kill(writer_pid(engine))
        with expect_error(zs.CheckpointError, "SIGKILL"):
            engine.wait_for_checkpoint()
        engine.save_checkpoint(tmp_path / "d", asynchronous=True)
        engine.wait_for_checkpoint()
    with subtest("closed"):
        engine.save_checkpoint(tmp_path / "d", asynchronous=True)
        saves.after(lambda: done.append("closed"))
        engine.close()
    assert "after a failure" not in done and done[-1] == "closed"


# -- what can go wrong ---------------------------------------------------------------------------------------


def raises_at(engine: zs.ZeroEngine, optimizer: zs.ShardedOptimizer, texts: list[str]) -> int:
    """Train until a step raises; returns its number, which must be the same on all ranks."""
    for number in range(1000):
        try:
            train(engine.model, optimizer, 1, first=number % 4)
        except zs.CheckpointError as error:
            assert all(text in str(error) for text in texts), error
            assert len(set(engine.collectives.gather_json(number))) == 1, "not at the same step"
            optimizer.zero_grad()
            return number
    raise AssertionError("no step has raised")


def fill_the_disk(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (5_000, resource.RLIM_INFINITY))


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


FAULTS: dict[str, tuple[Callable[[int], None], str]] = {
    "the writer process is killed": (kill, "SIGKILL"),
    "the disk is full": (fill_the_disk, "too large"),
}


@distributed(world_size=[1, 3])
def test_a_failure_is_raised_by_the_next_step_on_all_ranks_and_costs_no_checkpoint(tmp_path: Path) -> None:
    folder, number = tmp_path / "c", 1
    engine, optimizer = begun(3, folder)
    for name, (fault, text) in FAULTS.items():
        for broken in {0, world_size() - 1}:
            with subtest(f"{name} on rank {broken}"):
                where = f"[rank {broken}]" if world_size() > 1 else str(folder)
                with held_back(engine, broken):
                    engine.save_checkpoint(folder, extra={"number": number + 1}, asynchronous=True)
                    train(engine.model, optimizer, 1)
                    if rank() == broken:
                        fault(writer_pid(engine))
                raises_at(engine, optimizer, [where, text, "untouched"])
                barrier()
                assert engine.load_checkpoint(folder) == {"number": number}
                if rank() == broken and text != "SIGKILL":
                    kill(writer_pid(engine))
                number += 2
                engine.save_checkpoint(folder, extra={"number": number}, asynchronous=True)
                engine.wait_for_checkpoint()
                assert engine.load_checkpoint(folder) == {"number": number}
                barrier()
                assert len(list(folder.iterdir())) == 1 + world_size()
    engine.close()


@distributed(world_size=2)
def test_a_failure_is_raised_by_whatever_comes_first(tmp_path: Path) -> None:
    def end(engine: zs.ZeroEngine) -> None:
        engine.close()

    calls: dict[str, Callable[[zs.ZeroEngine], object]] = {
        "save": lambda engine: engine.save_checkpoint(tmp_path / "d"),
        "wait": lambda engine: engine.wait_for_checkpoint(),
        "load": lambda engine: engine.load_checkpoint(tmp_path / "c"),
        "close": end,
    }
    engine, _ = begun(3, tmp_path / "c")
    for name, call in calls.items():
        with subtest(name):
            with held_back(engine, 1):
                engine.save_checkpoint(tmp_path / "c", extra={"number": 2}, asynchronous=True)
                if rank() == 1:
                    kill(writer_pid(engine))
            with expect_error(
                zs.CheckpointError, ["[rank 1]" if name != "close" else "SIGKILL", "Save again"]
            ):
                call(engine)
            if name != "close":
                assert engine.load_checkpoint(tmp_path / "c") == {"number": 1}
                engine.save_checkpoint(tmp_path / "e", asynchronous=True)  # by another writer process
                engine.wait_for_checkpoint()


def save_and_lose_a_rank(folder: Path) -> None:
    watch.POLL_S, watch.LONG_WAIT_S = 0.05, 0.5
    engine, optimizer = begun(3, folder / "c")
    if rank() == 0:
        torch.save(whole_state(engine), folder / "expected.pt")
    else:
        whole_state(engine)
    with held_back(engine, 1):
        engine.save_checkpoint(folder / "c", extra={"number": 2}, asynchronous=True)
        train(engine.model, optimizer, 1)
        if rank() == 1:
            kill(os.getpid())
        with pytest.raises(zs.ZeroError, match="rank 1"):
            train(engine.model, optimizer, 100)
    with pytest.raises(zs.CheckpointError, match=r"not completed: .*rank 1"):
        engine.close()


def save_where_a_rank_was_lost(folder: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1], seed=5)
    assert engine.load_checkpoint(folder / "c") == {"number": 1}
    assert_same(whole_state(engine), torch.load(folder / "expected.pt", weights_only=False))
    engine.save_checkpoint(folder / "c", extra={"number": 3}, asynchronous=True)
    engine.wait_for_checkpoint()
    barrier()
    assert len(list((folder / "c").iterdir())) == 1 + world_size(), "leftovers go with the next save"
    engine.close()


def test_a_rank_killed_while_a_save_goes_on_leaves_the_checkpoint_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 20.0)  # rank 0 comes to its end
    with pytest.raises(AssertionError, match=r"(?s)failed on 1 of 2 ranks.*rank 1.*exit code -9"):
        run_ranks(save_and_lose_a_rank, 2, {"folder": tmp_path})
    run_ranks(save_where_a_rank_was_lost, 2, {"folder": tmp_path})


# -- the end -------------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_closing_waits_and_leaves_no_process_memory_or_descriptor(tmp_path: Path) -> None:
    begun(3, tmp_path / "c")[0].close()
    descriptors = len(os.listdir("/proc/self/fd"))
    engine, _ = begun(3, tmp_path / "c")
    pid = writer_pid(engine)
    assert engine.ledger.memory["host_copy"] >= 1
    with logged() as lines, held_back(engine, for_s=1.3):
        engine.save_checkpoint(tmp_path / "c", extra={"number": 2}, asynchronous=True)
        engine.close()
    assert not Path(f"/proc/{pid}").exists()
    assert [line for line in lines if "Waiting until" in line and str(tmp_path / "c") in line]
    assert engine.ledger.memory["host_copy"] == 0
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert "zero_strategy" not in Path("/proc/self/maps").read_text().replace(str(Path.cwd()), "")
    other, _ = engine_of(LAYOUTS[1], seed=5)
    assert other.load_checkpoint(tmp_path / "c") == {"number": 2}
    other.close()


@distributed(world_size=[1, 2])
def test_the_end_of_a_program_waits_also_without_a_process_group(tmp_path: Path) -> None:
    engine, _ = begun(3, tmp_path / "c")
    pid = writer_pid(engine)
    with held_back(engine, for_s=0.2):
        engine.save_checkpoint(tmp_path / "c", extra={"number": 2}, asynchronous=True)
        dist.destroy_process_group()  # as scripts do before they end
        atexit._run_exitfuncs()
    assert not Path(f"/proc/{pid}").exists()
    extra = Manifest.read(tmp_path / "c").extra
    assert isinstance(extra, dict) and extra[MODULES_KEY]["user"] == {"number": 2}  # type: ignore[index,call-overload]


SCRIPT = """
import os, signal, sys, threading
import torch, torch.distributed as dist
from torch import nn
import zero_strategy as zs

how, rank, folder = sys.argv[1], int(os.environ.get("RANK") or sys.argv[2]), sys.argv[3]
print(f"rank {rank} is {os.getpid()}", flush=True)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
engine = zs.ZeroEngine(model, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
engine.save_checkpoint(f"{folder}/c", {"number": 1}, asynchronous=True)
engine.wait_for_checkpoint()
pid = engine._saves.writer.pid
print(f"writer {pid}", flush=True)
os.kill(pid, signal.SIGSTOP)
engine.save_checkpoint(f"{folder}/c", {"number": 2}, asynchronous=True)
timer = threading.Timer(1.5, lambda: os.kill(pid, signal.SIGCONT))
timer.daemon = True
for number in range(3):
    if number == 1 and how == "raise":
        timer.start()
        if rank == 1:
            raise ValueError("boom of rank 1")
    engine.backward(model(torch.ones(2, 8)).mean())
    optimizer.step()
if how == "end":
    timer.start()  # here, so that a slow machine does not write the checkpoint before the end
print("now", flush=True)
"""


def run_to_the_end(folder: Path, how: str, *, torchrun: bool = False, **keywords: Any) -> Ended:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    if torchrun:
        return run_script([*TORCHRUN, "2", str(script), how, "-", str(folder)], **keywords)
    return run_script(*([str(script), how, str(number), str(folder)] for number in range(2)), **keywords)


def assert_writers_ended(ended: Ended) -> None:
    for pid in re.findall(r"writer (\d+)", ended.output):
        assert not Path(f"/proc/{pid}").exists() or "zombie" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_script_that_ends_waits_for_its_checkpoint(torchrun: bool, tmp_path: Path) -> None:
    ended = run_to_the_end(tmp_path, "end", torchrun=torchrun)
    assert not any(ended.codes) and not ended.hung, ended.output
    assert ended.output.count("Waiting until the checkpoint") == 1, ended.output
    assert Manifest.read(tmp_path / "c").extra == {"number": 2}
    assert_writers_ended(ended)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_script_that_ends_by_an_exception_waits_for_its_checkpoint(torchrun: bool, tmp_path: Path) -> None:
    ended = run_to_the_end(tmp_path, "raise", torchrun=torchrun)
    assert all(ended.codes) and not ended.hung and "boom of rank 1" in ended.output, ended.output
    assert Manifest.read(tmp_path / "c").extra == {"number": 2}
    assert_writers_ended(ended)


@pytest.mark.slow
def test_an_interrupt_ends_the_wait_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    def interrupt(pids: dict[int, int], group: int) -> None:
        time.sleep(2.0)
        for pid in pids.values():
            os.kill(pid, signal.SIGINT)

    ended = run_to_the_end(tmp_path, "interrupt", on_now=interrupt)
    assert not ended.hung and ended.seconds < 15, ended.output
    assert "Traceback" not in ended.output and "SIGKILL" not in ended.output, ended.output
    assert "given up" in ended.output and "untouched" in ended.output, ended.output
    assert Manifest.read(tmp_path / "c").extra == {"number": 1}
    assert_writers_ended(ended)
