"""Letters: ranks tell one another values on threads, without a collective, and nobody waits for ever.

Oracle: what was left. The store is that of the process group, as in a run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

import zero_strategy as zs
from tests import harness
from tests.harness import distributed, expect_error, rank, run_ranks, subtest, world_size
from zero_strategy.comm import letters as letters_module
from zero_strategy.comm.letters import Letters
from zero_strategy.comm.topology import Topology

NEVER = threading.Event()


@contextmanager
def opened() -> Iterator[Letters]:
    topology = Topology(torch.device("cpu"))
    letters = topology.open_letters()
    if dist.is_initialized():
        dist.barrier()
    yield letters
    letters.close()
    topology.close()


@distributed(world_size=[2, 3])
def test_every_rank_hears_what_every_other_has_left_for_this_number() -> None:
    with opened() as letters:
        for number in ("a", "b"):
            time.sleep(0.1 * rank())  # an old letter lies in the boxes of those who are late
            letters.leave(number, {"from": rank(), "number": number})
            for other in range(world_size()):
                assert letters.wait_for(other, number, NEVER) == {"from": other, "number": number}
            dist.barrier()


@distributed(world_size=2)
def test_a_letter_may_be_longer_than_a_store_takes_at_once() -> None:
    with opened() as letters:
        number = f"{rank()}"
        long = f"{rank()}" * (3 * letters_module.CHUNK_CHARS + 5)
        letters.leave(number, long)
        assert letters.wait_for(1 - rank(), f"{1 - rank()}", NEVER) == f"{1 - rank()}" * len(long)
        dist.barrier()


@distributed(world_size=2)
def test_a_wait_ends_when_it_is_cancelled_and_when_it_lasts_too_long() -> None:
    with opened() as letters:
        if rank() == 0:
            with subtest("cancelled"):
                cancelled = threading.Event()
                threading.Timer(0.2, cancelled.set).start()
                with expect_error(zs.ShardingError, ["Rank 1 has left no word", "cancelled"]):
                    letters.wait_for(1, "a", cancelled)
            with subtest("too late"), pytest.MonkeyPatch.context() as patch:
                patch.setattr(letters_module, "PATIENCE_S", 0.2)
                with expect_error(zs.ShardingError, ["Rank 1 has left no word", "0.2 s"]):
                    letters.wait_for(1, "a", NEVER)
        dist.barrier()


@distributed(world_size=2)
def test_a_rank_that_has_left_is_not_waited_for() -> None:
    topology = Topology(torch.device("cpu"))
    letters = topology.open_letters()
    dist.barrier()
    if rank() == 1:
        letters.leave("last", "words")
        topology.close()
    dist.barrier()
    if rank() == 0:
        assert letters.wait_for(1, "last", NEVER) == "words"
        with expect_error(zs.ShardingError, ["Rank 1 has ended", "Rank 0 waits for its word"]):
            letters.wait_for(1, "next", NEVER)
        topology.close()


def leave_and_die() -> None:
    with opened() as letters:
        if rank() == 1:
            letters.leave("last", "words")
            os.kill(os.getpid(), signal.SIGKILL)
        assert letters.wait_for(1, "last", NEVER) == "words"
        with expect_error(zs.ShardingError, ["process of rank 1 has died", "Rank 0 waits for its word"]):
            letters.wait_for(1, "next", NEVER)


def test_the_last_letter_of_a_rank_that_has_died_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "GRACE_S", 20.0)  # rank 0 comes to its end
    with pytest.raises(AssertionError, match=r"(?s)failed on 1 of 2 ranks.*rank 1.*exit code -9"):
        run_ranks(leave_and_die, 2)


@distributed(world_size=1, process_group=False)
def test_who_is_alone_hears_itself_only() -> None:
    with opened() as letters:
        letters.leave("a", 1)
        assert (letters.rank, letters.world_size) == (0, 1)
