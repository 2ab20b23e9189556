"""The launcher of ranks reports failures, hangs and deaths, and hands results back.

Oracle: exceptions and values known beforehand. Tolerance: none for results; times are bounded generously,
since the claim is only that a failure shows long before the watchdog.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import distributed, expect_error, rank, run_ranks, subtest, world_size


def _sum_of_ranks() -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([float(rank() + 1)])
    dist.all_reduce(total)
    return rank(), world_size(), total


def _fail_on_rank_1() -> None:
    if rank() == 1:
        with subtest("odd shapes"):
            numel = 7 * 15
            assert numel == 104
    dist.barrier()  # rank 0 waits here for a rank that is gone


def _hang_on_rank_0() -> None:
    if rank() == 0:
        _wait_for_nothing()


def _wait_for_nothing() -> None:
    while True:
        time.sleep(60)


def _hang_in_a_collective_on_rank_0() -> None:
    if rank() == 0:
        dist.all_reduce(torch.ones(1))


def _die_on_rank_1() -> None:
    if rank() == 1:
        os._exit(17)
    dist.barrier()


def _return_something_local() -> object:
    return lambda: None


def _start_a_child_and_hang(folder: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "new").write_text(f"{os.getpid()} {child.pid}")
    (folder / "new").rename(folder / "pids")  # whole or not there
    _wait_for_nothing()


def _draw() -> tuple[int, float, int]:
    return torch.initial_seed(), torch.rand(()).item(), torch.get_num_threads()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _left_alive(folder: Path) -> list[int]:
    pids = [int(pid) for pid in (folder / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if _is_alive(pid)]


def test_results_come_back_in_rank_order() -> None:
    results = run_ranks(_sum_of_ranks, 3)
    assert [(r, n) for r, n, _ in results] == [(0, 3), (1, 3), (2, 3)]
    assert all(torch.equal(total, torch.tensor([6.0])) for *_, total in results)


def test_ranks_have_their_own_seed_and_one_thread() -> None:
    first, second = run_ranks(_draw, 2, process_group=False), run_ranks(_draw, 2)
    assert first == second
    assert [(seed, num_threads) for seed, _, num_threads in first] == [(42, 1), (43, 1)]
    assert first[0][1] != first[1][1]


def test_failing_rank_is_reported_with_its_traceback_and_at_once() -> None:
    start = time.monotonic()
    with expect_error(
        AssertionError, ["_fail_on_rank_1", "-- rank 1 --", "[subtest odd shapes]", "assert 105 == 104"]
    ):
        run_ranks(_fail_on_rank_1, 2, timeout=50)
    assert time.monotonic() - start < 20


def test_hanging_rank_is_ended_and_its_stack_shown() -> None:
    with expect_error(
        AssertionError,
        [
            "_hang_on_rank_0 hung for 2 s on 1 of 2 ranks",
            "-- rank 0 --",
            "_wait_for_nothing",
            "in _hang_on_rank_0",
        ],
    ) as info:
        run_ranks(_hang_on_rank_0, 2, timeout=2)
    assert "-- rank 1 --" not in str(info.value)


def test_rank_that_waits_for_a_collective_nobody_joins_is_ended_and_its_stack_shown() -> None:
    with expect_error(
        AssertionError,
        ["hung for 2 s on 1 of 2 ranks", "in all_reduce", "in _hang_in_a_collective_on_rank_0"],
    ):
        run_ranks(_hang_in_a_collective_on_rank_0, 2, timeout=2)


def test_rank_that_dies_is_named_first_with_its_exit_code() -> None:
    with expect_error(AssertionError, "-- rank 1 --\ndied without a word, exit code 17") as info:
        run_ranks(_die_on_rank_1, 2, timeout=50)
    assert str(info.value).splitlines()[1] == "-- rank 1 --"  # rank 0 may have lost its peer a moment earlier


def test_value_that_cannot_be_sent_is_an_error_not_a_hang() -> None:
    with expect_error(AssertionError, ["-- rank 0 --", "pickle"]):
        run_ranks(_return_something_local, 1, process_group=False, timeout=50)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_no_process_outlives_a_launch_not_even_one_a_rank_started(tmp_path: Path) -> None:
    with expect_error(AssertionError, "hung for 3 s"):
        run_ranks(_start_a_child_and_hang, 1, {"folder": tmp_path}, timeout=3, process_group=False)
    assert _left_alive(tmp_path) == []
    assert multiprocessing.active_children() == []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads process states from /proc")
def test_no_process_outlives_a_session_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from tests.unit import test_harness as t;"
        "t.run_ranks(t._start_a_child_and_hang, 1, {'folder': pathlib.Path(sys.argv[1])})"
    )
    session = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], cwd=Path(__file__).parents[2])
    while not (tmp_path / "pids").exists():
        assert session.poll() is None, f"the session ended by itself with {session.returncode}"
        time.sleep(0.1)
    session.kill()
    session.wait()
    assert _left_alive(tmp_path) == []


@distributed(world_size=[2, 3])
def test_decorated_body_runs_on_every_rank_with_its_fixtures(tmp_path: Path) -> None:
    (tmp_path / str(rank())).touch()
    dist.barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(r) for r in range(world_size())]


@distributed(world_size=1, process_group=False)
def test_body_without_a_process_group_is_rank_0_of_1() -> None:
    assert not dist.is_initialized()
    assert (rank(), world_size()) == (0, 1)


@pytest.mark.parametrize("factor", [2, 5])
@distributed(world_size=2)
def test_parametrised_values_reach_every_rank(factor: int) -> None:
    total = torch.tensor(factor)
    dist.all_reduce(total)
    assert total.item() == factor * world_size()


@distributed(world_size=2)
def test_subtests_start_from_the_same_seed() -> None:
    draws = []
    for name in ("first", "second"):
        with subtest(name):
            draws.append(torch.rand(()).item())
    assert draws[0] == draws[1]


@distributed(world_size=2)
def _skip_on_every_rank() -> None:
    pytest.skip("not on this machine")


def test_skip_inside_a_rank_skips_the_test() -> None:
    with pytest.raises(pytest.skip.Exception, match="not on this machine"):
        _skip_on_every_rank()


def test_expect_error_refuses_a_message_without_the_text() -> None:
    with (
        pytest.raises(AssertionError, match="'rank 3' is not in the message of ValueError"),
        expect_error(ValueError, "rank 3"),
    ):
        raise ValueError("rank 2")
