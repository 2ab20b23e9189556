"""Ranks that can never meet are told from ranks that are slow.

Oracle: sequences of collectives written out by hand, and processes that the test itself has started and
ended. Tolerance: none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zero_strategy.comm.processes import is_dead, own_process
from zero_strategy.comm.waits import Notes, Waits, find_divergence

GATHER_A, GATHER_B, GATHER_C = (("gather", f"The all-gather of bucket {name!r}") for name in "abc")
REDUCE_A = ("reduce", "The reduce-scatter of bucket 'a'")
MESSAGE = ("control", "The message at the end of a backward")


def notes_of(rank: int, *begun: tuple[str, str], waits_for: int = -1) -> Notes:
    """Notes of a rank that has begun some collectives, in order, and waits for one of them."""
    waits = Waits()
    tickets = [waits.begin(*each) for each in begun]  # type: ignore[arg-type]
    with waits.waiting(tickets[waits_for]):
        assert waits.current is not None
        note = waits.notes(rank, waits.current, beat=1)
    assert waits.current is None
    return Notes.from_json(note.to_json())


def test_another_bucket_in_the_same_place_is_a_parting_that_names_both() -> None:
    found = find_divergence(
        [
            notes_of(0, GATHER_A, GATHER_B),
            notes_of(1, GATHER_A, GATHER_C, REDUCE_A),
            notes_of(2, GATHER_A, GATHER_B),
        ],
        world_size=4,
    )
    assert found is not None
    assert "bucket 'b' on ranks 0, 2;" in found and "bucket 'c' on rank 1;" in found and "number 2" in found


def test_ranks_that_wait_for_what_the_other_has_not_begun_have_parted() -> None:
    found = find_divergence([notes_of(0, GATHER_A, GATHER_B), notes_of(1, GATHER_A, MESSAGE)], world_size=2)
    assert found is not None
    assert "rank 0 waits in the all-gather of bucket 'b', which rank 1 has not begun" in found
    assert "rank 1 waits in the message at the end of a backward, which rank 0 has not begun" in found


def test_names_of_the_default_group_prove_nothing_while_a_rank_computes() -> None:
    gathers, passes = ("default", "torch.distributed.gather()"), ("default", "torch.distributed.barrier()")
    # Rank 1, which computes, has sent rank 2 a message before: gloo has counted it, on those two alone.
    waiting = [notes_of(0, gathers, passes), notes_of(2, MESSAGE, gathers, gathers)]
    assert find_divergence(waiting, world_size=3) is None
    found = find_divergence([*waiting, notes_of(1, gathers, gathers)], world_size=3)
    assert found is not None and "barrier() on rank 0" in found and "gather() on ranks" in found


def test_a_parting_long_ago_is_found_as_long_as_it_is_remembered() -> None:
    ours = [GATHER_A, GATHER_B] + [GATHER_A] * 100
    theirs = [GATHER_B, GATHER_A] + [GATHER_A] * 99
    found = find_divergence([notes_of(0, *ours), notes_of(1, *theirs)], world_size=2)
    assert found is not None and "number 1 " in found


BARRIER, BROADCAST = (("default", f"torch.distributed.{name}()") for name in ("barrier", "broadcast"))


def test_a_collective_of_the_default_group_is_compared_by_the_number_begun() -> None:
    found = find_divergence([notes_of(0, BARRIER), notes_of(1, GATHER_A)], world_size=2)
    assert found is not None
    assert "rank 0 waits in torch.distributed.barrier(), which rank 1 has not begun" in found
    assert "rank 1 waits in the all-gather of bucket 'a', which rank 0 has not begun" in found
    found = find_divergence([notes_of(0, BARRIER), notes_of(1, BROADCAST)], world_size=2)
    assert found is not None and "barrier() on rank 0; torch.distributed.broadcast() on rank 1" in found


def test_a_parting_says_on_which_lines_of_the_users_code_ranks_stand() -> None:
    lines = ["train.py:3: trainer.save_checkpoint(path)", "train.py:9: trainer.fit(model)"]
    notes = [notes_of(rank, each)._replace(line=lines[rank]) for rank, each in enumerate([GATHER_A, MESSAGE])]
    found = find_divergence(notes, world_size=2)
    assert found is not None and found.endswith(f" In your code: rank 0 at {lines[0]}; rank 1 at {lines[1]}.")


@pytest.mark.parametrize(
    "notes",
    [
        pytest.param([notes_of(0, GATHER_A), notes_of(1, GATHER_A)], id="all_wait_for_one_slow_transfer"),
        pytest.param([notes_of(0, GATHER_A, GATHER_B)], id="the_other_rank_computes"),
        pytest.param(
            [notes_of(0, GATHER_A, GATHER_B, waits_for=0), notes_of(1, GATHER_A, GATHER_B, REDUCE_A)],
            id="one_is_ahead_by_what_the_other_has_not_come_to",
        ),
        pytest.param(
            [notes_of(0, GATHER_A, REDUCE_A), notes_of(1, GATHER_A, GATHER_B, waits_for=0)],
            id="one_waits_for_the_other_who_waits_for_a_transfer",
        ),
        pytest.param(
            [notes_of(0, BARRIER), notes_of(1, BARRIER, GATHER_A)],
            id="one_waits_in_a_barrier_that_the_other_has_passed",
        ),
    ],
)
def test_slowness_proves_nothing(notes: list[Notes]) -> None:
    assert find_divergence(notes, world_size=2) is None


def test_a_process_is_dead_once_it_has_ended_also_before_its_parent_takes_note() -> None:
    program = (
        "import json, sys; from zero_strategy.comm.processes import own_process;"
        "print(json.dumps(own_process()), flush=True); sys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    )
    assert child.stdout is not None
    process = json.loads(child.stdout.readline())
    assert not is_dead(process)
    child.kill()
    deadline = time.monotonic() + 10
    while not is_dead(process) and time.monotonic() < deadline:  # a zombie: nobody has waited for it yet
        time.sleep(0.01)
    assert is_dead(process)
    child.communicate()
    assert is_dead(process)


def test_of_another_machine_and_of_an_id_used_anew_nothing_wrong_is_concluded() -> None:
    machine, namespace, pid, start = own_process()
    assert not is_dead(["another machine", namespace, "1", "0"])
    assert not is_dead([])
    assert not is_dead([machine, namespace, pid, start])
    assert is_dead([machine, namespace, pid, "0"])
