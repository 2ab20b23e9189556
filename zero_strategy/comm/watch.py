"""Ends all ranks when one has failed, and says on each what happened on that one.

A rank that fails writes its error into the store of the process group. A thread on every rank looks there
once a second. It makes the error known to `check` (called before every collective), and cuts the connections
of the collective this rank waits in, whose exception `explain` then replaces. When a wait lasts, the thread
also looks whether the others are alive and whether they can still meet (waits.py). A front end that catches
exceptions reports them by `fail`; what nobody catches comes by `sys.excepthook`.

Owned by the topology; knows no tensors. Without other ranks there is no store, no thread and no hook.

[Note: The end of a process]
A rank that has been told of a failure and neither reaches one of our collectives nor ends within `GRACE_S`
(it stands in somebody else's collective, or computes on) is ended from the thread, with the other rank's
error printed. A failing rank, and rank 0 in any case (its process often holds the store), stay at their end
until the others have read what is there, `LINGER_S` at most.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from zero_strategy.comm import causes
from zero_strategy.comm.links import Links
from zero_strategy.comm.main_thread import MainThread, users_line
from zero_strategy.comm.processes import is_dead, own_process
from zero_strategy.comm.waits import Notes, Waiting, Waits, find_divergence
from zero_strategy.comm.words import Words
from zero_strategy.compat import RankStore, num_begun_by_default
from zero_strategy.errors import ShardingError
from zero_strategy.log import LOGGER

POLL_S = 1.0  # one small request to the store each time
LONG_WAIT_S = 3.0  # a wait that lasts so long is looked into; nothing follows from its length alone
REPORT_S = 60.0  # and is reported after so long
GRACE_S = 10.0  # see [Note: The end of a process]
LINGER_S = 3.0
EXPLAIN_S = 2.0  # a connection may break before the rank at its other end has written why
_NOBODY = "none"  # has failed
_RUNNING, _SEEN, _LEFT = "", "seen", "left"


class Watch:
    """Knows whether a rank has failed, and gets this one out of its wait.

    Attributes:
        waits: What this rank has begun and what it waits for.
        failure: What to raise on this rank instead of beginning a collective, or None.
    """

    def __init__(self, rank: int, world_size: int, links: Links, store: RankStore | None = None) -> None:
        """Begin to watch.

        Args:
            rank: This rank.
            world_size: How many there are.
            links: The connections of the groups that are watched.
            store: Where ranks leave word, the same for all and of this thread alone; None if there is nobody
                else.
        """
        self.waits = Waits()
        self.failure: ShardingError | None = None
        self._agreed: weakref.ref[BaseException] | None = None  # weak: its traceback refers to the engine
        self._is_abandoned = False
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._links = links
        self._words = Words(store)
        self._pid = os.getpid()
        self._processes: dict[int, list[str]] = {}  # of the other ranks
        self._stop = threading.Event()
        self._is_failing = False  # this rank has an error of its own, or has raised `failure`
        self._deadline = 0.0  # when this process is ended, once `failure` is known
        self._run_number = 0  # a late word about the run before must not end this one
        self._beat = 0
        self._main_thread = MainThread()
        self._heard: dict[int, Notes] = {}  # by rank: the first note of the wait it is in
        self._reported = 0  # the serial of the wait reported last
        self._thread: threading.Thread | None = None
        self._next_hook: Callable[..., Any] = sys.excepthook
        if store is None:
            return
        self._words.write(f"who/{rank}", json.dumps(own_process()))
        self._words.write(f"state/{rank}", _RUNNING)
        self._words.write(f"waits/{rank}", "")
        self._open_run()

    def start(self) -> None:
        """Start the thread. To be called when the watch of every rank has been constructed."""
        if not self._words.are_kept or self._thread is not None:
            return
        self._processes = {
            other: json.loads(self._words.read(f"who/{other}") or "[]") for other in self._others
        }
        self._next_hook, sys.excepthook = sys.excepthook, self._on_unhandled
        self._thread = threading.Thread(target=self._run, name="zero_strategy.watch", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def close(self) -> None:
        """Stop watching. Not collective; safe to call twice."""
        if self._thread is None:
            return
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * POLL_S)
        self._leave()

    def abandon(self) -> None:
        """Let the thread stop watching. For the garbage collector: it waits for nobody and takes no lock."""
        self._is_abandoned = True

    def _leave(self) -> None:
        self._thread = None
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_unhandled:
            sys.excepthook = self._next_hook
        self._words.write(f"state/{self._rank}", _LEFT)
        self._words.close()

    # -- on the main thread --

    def check(self) -> None:
        """Raise if another rank has failed.

        Raises:
            ShardingError: It has; the text has its error.
        """
        if self.failure is not None:
            self._is_failing = True
            raise self.failure

    def explain(self, what: str, error: BaseException) -> ShardingError:
        """Return what to raise for a collective that raised: what happened to another rank, if that is known.

        Args:
            what: The collective, for the message.
            error: What it raised.
        """
        cause = self._find_cause(f"{what} did not finish{_here()}.") or causes.unexplained(what, error)
        self._is_failing = True
        return cause

    def _find_cause(self, consequence: str) -> ShardingError | None:
        """Look for what has broken a connection; the rank at its other end may be about to write it."""
        deadline = time.monotonic() + (EXPLAIN_S if self._words.are_kept else 0.0)
        while self.failure is None and time.monotonic() < deadline:
            self._look()
            if self.failure is None and (gone := self._find_any_gone(consequence)) is not None:
                self._end_all(gone)
            elif self._words.is_lost:
                break
            elif self.failure is None:
                time.sleep(0.1)
        return self.failure

    def note_agreed(self, error: BaseException) -> None:
        """Note an error that all ranks raise together."""
        self._agreed = weakref.ref(error)

    def is_agreed(self, error: BaseException) -> bool:
        """Tell whether this is the last error that all ranks have raised together."""
        return self._agreed is not None and self._agreed() is error

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends by an error. The first that a run has counts.

        Args:
            error: What ends it. One that all ranks have agreed to raise is no news and changes nothing.
        """
        if not self._words.are_kept or os.getpid() != self._pid or self.is_agreed(error):
            return
        self._is_failing = True
        self._post(causes.has_failed(self._rank, error))
        if self.failure is None:
            self.failure = causes.after_failure(error)

    def fail_or_explain(self, error: BaseException) -> ShardingError | None:
        """Report an error that ends this rank, unless another rank's is behind it.

        Returns:
            The other rank's, or None.
        """
        if not self._words.are_kept or os.getpid() != self._pid:
            return None
        is_broken = isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))
        if not is_broken:
            self.fail(error)
            return None
        cause = self._find_cause("This rank stood in a collective.")
        self._is_failing = True
        if cause is None:
            self.fail(error)
        return cause

    def give_up(self, why: str) -> None:
        """End all ranks because this one cannot go on; may be called by any thread."""
        self._post(causes.was_stopped(self._rank, why))

    def forgive(self) -> None:
        """Begin a new run on all ranks, whatever the last one ended by. To be called on all ranks."""
        self._is_failing, self.failure, self._agreed = False, None, None
        self._run_number += 1
        if self._words.are_kept:
            self._words.write(f"state/{self._rank}", _RUNNING)
            self._open_run()

    def _on_unhandled(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        # What it explains has been logged.
        self.fail_or_explain(error)
        self._next_hook(kind, error, trace)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        self._words.write(f"state/{self._rank}", _SEEN if self._is_failing else _LEFT)
        if self._is_failing or self._rank == 0:
            self._linger()
        self.close()

    def _linger(self) -> None:
        """Wait until the others have read the store. See [Note: The end of a process]."""
        deadline = time.monotonic() + LINGER_S
        remaining = list(self._others)
        while remaining and not self._words.is_lost and time.monotonic() < deadline:
            time.sleep(0.05)
            remaining = [
                other
                for other in remaining
                if not (self._words.read(f"state/{other}") or is_dead(self._processes[other]))
            ]

    def find_gone(self, other: int, consequence: str) -> ShardingError | None:
        """Return what has become of a rank that will never join in again; None if it may. For any thread.

        Args:
            other: The rank.
            consequence: What follows, for the message.
        """
        if is_dead(self._processes.get(other, [])):
            return causes.has_died(other, consequence)
        if self._words.read(f"state/{other}") == _LEFT:
            return causes.has_left(other, consequence)
        return None

    # -- on the thread --

    def _run(self) -> None:
        while not self._stop.wait(POLL_S) and not self._is_abandoned:
            self._look()
            waiting = self.waits.current
            if self.failure is not None:
                self._get_out(waiting)
                continue
            waiting = waiting or self._main_thread.look()
            if waiting is None or time.monotonic() - waiting.since <= LONG_WAIT_S:
                self._heard.clear()
            else:
                self._look_into(waiting)
        if self._is_abandoned:
            self._leave()

    def _look(self) -> None:
        """Read whether a rank has failed."""
        found = self._words.read(self._failed_key())
        if found in ("", _NOBODY) or self.failure is not None:
            return
        self.failure = ShardingError(**json.loads(found))
        self._deadline = time.monotonic() + GRACE_S
        if not self._is_failing:
            LOGGER.error("[rank %d] %s", self._rank, self.failure)
        self._words.write(f"state/{self._rank}", _SEEN)

    def _get_out(self, waiting: Waiting | None) -> None:
        if waiting is not None:
            self._links.cut()
        if not self._is_failing and time.monotonic() > self._deadline:
            LOGGER.error(
                "[rank %d] This process is ended: it stands in a call that cannot be ended. %s",
                self._rank,
                self.failure,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _look_into(self, waiting: Waiting) -> None:
        """Find out why a wait lasts: a rank that has ended, ranks that have parted, or only a slow one."""
        self._words.write(f"waits/{self._rank}", json.dumps(self._note(waiting).to_json()))
        is_ours = waiting.ticket.channel != "default"
        consequence = f"Rank {self._rank} waits in {waiting.ticket.what}{_here()}."
        # In other people's collectives a rank whose engine is closed may well join in.
        if is_ours and (gone := self._find_any_gone(consequence)) is not None:
            self._end_all(gone)
            return
        notes = self._steady_notes()
        parted = find_divergence(notes, len(self._others) + 1)
        waited_s = time.monotonic() - waiting.since
        if parted is not None and (len(notes) > len(self._others) or waited_s > 2 * LONG_WAIT_S):
            self._end_all(causes.have_parted(parted))  # named better once all have told
        elif is_ours and waited_s > REPORT_S and self._reported != waiting.serial:
            self._reported = waiting.serial
            self._report(waiting, notes)

    def _note(self, waiting: Waiting) -> Notes:
        self._beat += 1
        note = self.waits.notes(self._rank, waiting, self._beat)
        note.begun["default"] = num_begun_by_default()
        if waiting.ticket.channel == "default":
            note.recent["default"] = [waiting.ticket.what]
        return note._replace(line=users_line())

    def _report(self, waiting: Waiting, notes: list[Notes]) -> None:
        """Say who waits, on one of the ranks that wait for the engine."""
        if all(note.rank >= self._rank for note in notes if note.ticket.channel != "default"):
            ranks = {note.rank for note in notes} | {self._rank}
            busy = [rank for rank in range(len(self._others) + 1) if rank not in ranks]
            LOGGER.warning(
                "Rank %d has waited %d s in %s. Ranks that wait for nobody: %s.",
                self._rank, REPORT_S, waiting.ticket.what, busy or "none",
            )  # fmt: skip

    def _steady_notes(self) -> list[Notes]:
        """Return the notes of ranks, this one too, that have waited in one place since they were seen."""
        steady = []
        for rank in range(len(self._others) + 1):
            text = self._words.read(f"waits/{rank}")
            if not text:
                continue
            note = Notes.from_json(json.loads(text))
            first = self._heard.get(rank)
            if first is None or first.serial != note.serial:
                self._heard[rank] = note
            elif note.beat > first.beat:
                steady.append(note)
        return steady

    # -- helpers --

    def __reduce__(self) -> NoReturn:
        raise causes.was_pickled()

    def _failed_key(self) -> str:
        return f"failed/{self._run_number}"

    def _open_run(self) -> None:
        """Say that nobody has failed in this run, unless somebody has already."""
        self._words.replace(self._failed_key(), "", _NOBODY)

    def _find_any_gone(self, consequence: str) -> ShardingError | None:
        """Look for a rank that will never join in again."""
        found = (self.find_gone(other, consequence) for other in self._others)
        return next((gone for gone in found if gone is not None), None)

    def _end_all(self, error: ShardingError) -> None:
        """End all ranks, this one too. The first error that a run has counts."""
        self._post(error)
        self._look()
        if self.failure is None:  # nobody can be told any more
            self._deadline = time.monotonic() + GRACE_S
            self.failure = error

    def _post(self, error: ShardingError) -> None:
        text = json.dumps({"what": error.what, "why": error.why, "fix": error.fix})
        self._words.replace(self._failed_key(), _NOBODY, text)


def _here() -> str:
    """Say where in the user's code the main thread stands, if it does."""
    line = users_line()
    return f" (at {line})" if line else ""
