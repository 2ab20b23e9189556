"""Faults at seeded points of a save, and of what it left: nothing is lost, and every fault is named.

A rank is killed (at a byte of a file, at an operation on files, after a while), disks are full, files are
damaged at rest. Oracle: the whole state of an engine that was trained alike; the folder's listing. Tolerance:
none. A few points run always, hundreds where slow tests do.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zero_strategy as zs
from tests.distributed.state_support import LAYOUTS, assert_same, engine_of, train, whole_state
from tests.harness import rank, run_ranks, subtest
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.inspection import find_damage
from zero_strategy.checkpoint.tags import tags_in

SLOW = pytest.mark.slow
MANY_POINTS = 60


def states(num: int) -> Iterator[tuple[zs.ZeroEngine, dict[str, Any]]]:
    """Yield an engine after 1, 2, ... steps, each time with its whole state."""
    engine, optimizer = engine_of(LAYOUTS[3])
    for _ in range(num):
        train(engine.model, optimizer, 1)
        yield engine, whole_state(engine)


def listing(folder: Path) -> list[str]:
    """Return all files below a folder; the same on all ranks, if nobody writes."""
    dist.barrier()
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    dist.barrier()
    return found


# -- killed ranks --


def kill_later(point: int, kind: str, file_bytes: int = 0) -> None:
    """Arrange for the end of this process, somewhere in the saves to come."""
    rng = random.Random(point)
    if kind == "byte":
        # The kernel ends who writes beyond the limit, after the bytes up to it.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(file_bytes), resource.RLIM_INFINITY))
    elif kind == "time":
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.05))
    else:
        countdown = rng.randrange(16)

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal countdown
            writes = event == "open" and set(str(arguments[1])) & set("wxa")
            if writes or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                countdown -= 1
                if countdown < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)


def save_until_killed(outer: Path, point: int, kind: str, in_place: bool) -> None:
    tags = ("c", "c") if in_place else ("one", "two")
    for number, (engine, _) in enumerate(states(2), start=1):
        if number == 2:
            break
        engine.save_checkpoint(outer, extra={"number": 1}, tag=tags[0])
    dist.barrier()
    file_bytes = max(path.stat().st_size for path in (outer / tags[0]).glob("rank-*"))
    if rank() == point % 2:
        kill_later(point, kind, file_bytes)
    with pytest.raises(zs.ZeroError):
        for _ in range(100):
            engine.save_checkpoint(outer, extra={"number": 2}, tag=tags[1])


def save_beside_training_until_killed(outer: Path, point: int, kind: str) -> None:
    """As `save_until_killed`, of asynchronous saves; only rank 0 writes in this process, and not the data."""
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(outer, extra={"number": 1}, tag="one", asynchronous=True)
    engine.wait_for_checkpoint()
    train(engine.model, optimizer, 1)
    dist.barrier()
    if rank() == (0 if kind == "operation" else point % 2):
        kill_later(point, kind)
    with pytest.raises(zs.ZeroError):
        for _ in range(100):
            engine.save_checkpoint(outer, extra={"number": 2}, tag="two", asynchronous=True)


def find_what_is_left(outers: list[Path]) -> list[int]:
    """Load what each killed save has left, then save again; return which of the two saves was found."""
    expected = {number: state for number, (_, state) in enumerate(states(2), start=1)}
    engine, _ = engine_of(LAYOUTS[1], seed=5)
    found = []
    for outer in outers:
        with subtest(outer.name):
            number = engine.load_checkpoint(outer)["number"]
            assert_same(whole_state(engine), expected[number])
            for tag in tags_in(outer):
                engine.load_checkpoint(outer, tag)  # what has a name is complete
            tags = ["c"] if (outer / "c").exists() else ["two", "after"]
            engine.save_checkpoint(outer, extra={"number": 3}, tag=tags[-1], keep_last=2)
            # That of a save that was killed while it moved `latest` is deleted when it is an hour old.
            names = [name for name in listing(outer) if not re.fullmatch(r"\.latest\.\w+\.tmp", name)]
            assert len(names) == 1 + 4 * len(tags) and {"latest", tags[-1]} < set(names), names
            assert not any(".partial" in name or name.endswith(".tmp") for name in names), names
            assert engine.load_checkpoint(outer) == {"number": 3}
            found.append(number)
    return found


@pytest.mark.parametrize("num_points", [5, pytest.param(MANY_POINTS, marks=SLOW)])
def test_a_rank_killed_in_a_save_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, num_points: int
) -> None:
    outers = []
    for point in range(num_points):
        rng = random.Random(1000 + point)
        kind = ("byte", "operation", "time")[point % 3]
        outers.append(tmp_path / f"{point}-{kind}")
        arguments = {"outer": outers[-1], "point": point, "kind": kind, "in_place": rng.random() < 0.3}
        with pytest.raises(AssertionError, match="exit code -"):
            run_ranks(save_until_killed, 2, arguments)
    found = run_ranks(find_what_is_left, 2, {"outers": outers}, timeout=240)[0]
    assert len(found) == num_points and 1 in found
    assert num_points < MANY_POINTS or 2 in found, "no rank was killed after the commit"


@pytest.mark.slow
@pytest.mark.parametrize("num_points", [40])
def test_a_rank_killed_beside_an_asynchronous_save_leaves_the_one_before_or_the_new_one(
    tmp_path: Path, num_points: int
) -> None:
    outers = []
    for point in range(num_points):
        kind = ("operation", "time")[point % 2]
        outers.append(tmp_path / f"{point}-{kind}")
        with pytest.raises(AssertionError, match="exit code -"):
            arguments = {"outer": outers[-1], "point": point, "kind": kind}
            run_ranks(save_beside_training_until_killed, 2, arguments)
    found = run_ranks(find_what_is_left, 2, {"outers": outers}, timeout=240)[0]
    assert len(found) == num_points and set(found) == {1, 2}


# -- full disks --


@contextlib.contextmanager
def small_files_of(pid: int, num_bytes: int) -> Iterator[None]:
    """Let no file of a process grow beyond a size: a write is cut short, the next one fails."""
    old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, old)


def save_on_full_disks(outer: Path, num_points: int, asynchronous: bool) -> None:
    """Save where one rank has too little space; what was there stays, and nothing else does."""
    saved = states(2)
    engine, before = next(saved)
    engine.save_checkpoint(outer, extra={"number": 1}, tag="one", asynchronous=asynchronous)
    engine.wait_for_checkpoint()
    names = listing(outer)
    sizes = [next((outer / "one").glob(f"rank-{number:05d}-*")).stat().st_size for number in range(2)]
    if not asynchronous:  # then the manifest is written by the same process
        sizes[0] = max(sizes[0], (outer / "one" / "manifest.json").stat().st_size)
    engine, _ = next(saved)
    other, _ = engine_of(LAYOUTS[1], seed=5)
    for point in range(num_points):
        rng = random.Random(point)
        broken, share = rng.randrange(2), rng.random()
        pid = engine.saves.writer.pid if asynchronous else os.getpid()
        assert pid is not None
        of_pid = small_files_of(pid, int(share * sizes[broken]))
        limit = of_pid if rank() == broken else contextlib.nullcontext()
        with subtest(f"{point}: rank {broken}, {share:.2f} of its largest file"):
            with limit, pytest.raises(zs.CheckpointError) as info:
                options: dict[str, Any] = {"keep_last": 1, "asynchronous": asynchronous}
                engine.save_checkpoint(outer, extra={"number": 2}, tag="two", **options)
                engine.wait_for_checkpoint()
            assert f"[rank {broken}]" in str(info.value) and "File too large" in str(info.value)
            assert listing(outer) == names
            assert other.load_checkpoint(outer) == {"number": 1}
            assert_same(whole_state(other), before)
    engine.save_checkpoint(outer, extra={"number": 2}, tag="two", keep_last=1)
    assert other.load_checkpoint(outer) == {"number": 2}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("num_points", [3, pytest.param(60, marks=SLOW)])
def test_a_full_disk_fails_the_save_and_leaves_what_was_there(
    tmp_path: Path, num_points: int, asynchronous: bool
) -> None:
    arguments = {"outer": tmp_path, "num_points": num_points, "asynchronous": asynchronous}
    run_ranks(save_on_full_disks, 2, arguments, timeout=240)


@contextlib.contextmanager
def little_space(folder: Path, num_bytes: int) -> Iterator[str]:
    """Have little space in a folder, and return how the system says so. For all ranks.

    A file system of that size; where none may be mounted, a limit for each rank's files of its part of it.
    """
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    done = [rank() != 0 or subprocess.run(command, capture_output=True, check=False).returncode == 0]
    dist.broadcast_object_list(done)
    if not done[0]:
        with small_files_of(os.getpid(), num_bytes // 4):  # two ranks, two checkpoints
            yield "File too large"
        return
    try:
        yield "No space left"
    finally:
        dist.barrier()
        if rank() == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)
        dist.barrier()


def save_with_little_space(folder: Path, num_points: int) -> list[bool]:
    """Save twice where there may be space for one save only; return which second saves had enough."""
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder / "sized")
    dist.barrier()
    # Whole pages, and one for each folder and for `latest`.
    num_pages = sum(-(-path.stat().st_size // 4096) for path in (folder / "sized").iterdir()) + 4
    outcomes = []
    for point in range(num_points):
        size_pages = int(num_pages * random.Random(point).uniform(1.0, 2.2))
        small = folder / str(point)
        small.mkdir(exist_ok=True)
        outer = small / "runs"
        with subtest(f"{point}"), little_space(small, size_pages * 4096) as text:
            if text == "File too large":  # which would hold for the first save too
                with small_files_of(os.getpid(), resource.RLIM_INFINITY):
                    engine.save_checkpoint(outer, extra=1, tag="one")
            else:
                engine.save_checkpoint(outer, extra=1, tag="one")
            names = listing(outer)
            try:
                engine.save_checkpoint(outer, extra=2, tag="two", keep_last=1)
                outcomes.append(True)
            except zs.CheckpointError as error:
                assert text in str(error)
                outcomes.append(False)
                if "is complete" not in str(error):  # all but the pointer
                    assert listing(outer) == names
            assert engine.load_checkpoint(outer) == (2 if outcomes[-1] else 1)
    return outcomes


@pytest.mark.parametrize("num_points", [3, pytest.param(40, marks=SLOW)])
def test_too_little_space_for_a_save_leaves_what_was_there(tmp_path: Path, num_points: int) -> None:
    outcomes = run_ranks(save_with_little_space, 2, {"folder": tmp_path, "num_points": num_points})[0]
    assert False in outcomes and len(outcomes) == num_points


# -- damage at rest --


def flip(content: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(content))
    return content[:position] + bytes([content[position] ^ 1 << rng.randrange(8)]) + content[position + 1 :]


def cut_off(content: bytes, rng: random.Random) -> bytes:
    return content[: rng.randrange(len(content))]


def zero_the_rest(content: bytes, rng: random.Random) -> bytes:
    """As after a power cut: the length was on the disk, the data was not."""
    position = rng.randrange(len(content))
    return content[:position] + bytes(len(content) - position)


def shift(content: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(content))
    return content[:position] + b"\0" + content[position:-1]


def append(content: bytes, rng: random.Random) -> bytes:
    return content + rng.randbytes(rng.randrange(1, 100))


DAMAGE: list[Callable[[bytes, random.Random], bytes]] = [flip, flip, cut_off, zero_the_rest, shift, append]


def load_what_was_damaged(outer: Path, num_points: int) -> int:
    """Damage one file a point, load, and put it right again; return how many were refused."""
    expected = {}
    for number, (engine, state) in enumerate(states(2), start=1):
        engine.save_checkpoint(outer, extra={"number": number}, tag=("one", "two")[number - 1])
        expected[number] = state
    dist.barrier()
    files = sorted([*(outer / "two").iterdir(), outer / "latest"], key=lambda path: path.name[:10])
    engine, _ = engine_of(LAYOUTS[1], seed=5)
    num_refused = 0
    for point in range(num_points):
        rng = random.Random(point)
        path, change = files[point % len(files)], rng.choice(DAMAGE)
        original = path.read_bytes()
        damaged = change(original, rng)
        with subtest(f"{point}: {change.__name__} {path.name}"):
            dist.barrier()
            if rank() == 0:
                path.write_bytes(damaged)
            dist.barrier()
            before = whole_state(engine)
            try:
                number = engine.load_checkpoint(outer)["number"]
                # What `latest` names is not told from what it should; all the rest is.
                assert path.name == "latest" or damaged == original
                assert_same(whole_state(engine), expected[number])
            except zs.CheckpointError as error:
                num_refused += 1
                assert path.name in str(error) and "one" in error.fix + error.why, error
                assert_same(whole_state(engine), before)
                if path.parent.name == "two":
                    assert damage_in(outer / "two", path.name)
            assert engine.load_checkpoint(outer, tag="one") == {"number": 1}
            assert_same(whole_state(engine), expected[1])
            dist.barrier()
            if rank() == 0:
                path.write_bytes(original)
            dist.barrier()
    assert engine.load_checkpoint(outer) == {"number": 2}
    return num_refused


def damage_in(folder: Path, name: str) -> bool:
    """Whether `zero-strategy verify` names a file."""
    try:
        with CheckpointReader(folder, check_files=False) as reader:
            return name in {part.file for part in find_damage(reader)}
    except zs.CheckpointError as error:
        return name in str(error)


@pytest.mark.parametrize("num_points", [9, pytest.param(160, marks=SLOW)])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_loads(
    tmp_path: Path, num_points: int
) -> None:
    arguments = {"outer": tmp_path, "num_points": num_points}
    num_refused = run_ranks(load_what_was_damaged, 2, arguments, timeout=240)[0]
    assert num_refused > 0.7 * num_points
