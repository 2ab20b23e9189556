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
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from zero_strategy.comm.links import Links
from zero_strategy.comm.processes import is_dead, own_process
from zero_strategy.comm.waits import Notes, Waiting, Waits, find_divergence
from zero_strategy.compat import RankStore
from zero_strategy.errors import ShardingError, ZeroError
from zero_strategy.log import LOGGER

POLL_S = 1.0  # one small request to the store each time
LONG_WAIT_S = 3.0  # a wait that lasts so long is looked into; nothing follows from its length alone
REPORT_S = 60.0  # and is reported after so long
GRACE_S = 10.0  # see [Note: The end of a process]
LINGER_S = 3.0
EXPLAIN_S = 2.0  # a connection may break before the rank at its other end has written why
_TRACEBACK_CHARS = 4000
_FAILED = "failed"
_RUNNING, _SEEN, _LEFT = "", "seen", "left"


class Watch:
    """Knows whether a rank has failed, and gets this one out of its wait.

    Attributes:
        waits: What this rank has begun and what it waits for.
        failure: The error to raise on this rank because of another, or None.
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
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._links = links
        self._store = store
        self._pid = os.getpid()
        self._lock = threading.Lock()  # the store is used by the thread and by who fails
        self._stop = threading.Event()
        self._is_failing = False  # this rank has an error of its own, or has raised `failure`
        self._deadline = 0.0  # when this process is ended, once `failure` is known
        self._beat = 0
        self._heard: dict[int, Notes] = {}  # by rank: the first note of the wait it is in
        self._reported = 0  # the serial of the wait reported last
        self._thread: threading.Thread | None = None
        self._next_hook: Callable[..., Any] = sys.excepthook
        if store is None:
            return
        self._write(f"who/{rank}", json.dumps(own_process()))
        self._write(f"state/{rank}", _RUNNING)
        self._write(f"waits/{rank}", "")
        store.compare_set(_FAILED, "", "none")

    def start(self) -> None:
        """Start the thread. To be called when the watch of every rank has been constructed."""
        if self._store is None or self._thread is not None:
            return
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
        self._thread = None
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_unhandled:
            sys.excepthook = self._next_hook
        with suppress(RuntimeError):
            self._write(f"state/{self._rank}", _LEFT)
        self._store = None

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
        """Return what to raise for a collective that raised: the failure of another rank if there is one."""
        deadline = time.monotonic() + (EXPLAIN_S if self._store is not None else 0.0)
        while self.failure is None and time.monotonic() < deadline:
            self._look_quietly()
            if self.failure is None:
                time.sleep(0.1)
        self._is_failing = True
        return self.failure or _unexplained(what, error)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends by an error. The first that a run has counts."""
        if self._store is None or os.getpid() != self._pid:
            return
        self._is_failing = True
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        name = type(error).__name__
        text = str(error.what if isinstance(error, ZeroError) else error)
        self._post(
            what=f"Rank {self._rank} has failed: {name}{': ' if text else ''}{text}",
            why="All ranks take part in every gather and reduction, so this one cannot go on without it. "
            f"There:\n{''.join(lines)[-_TRACEBACK_CHARS:].rstrip()}",
            fix=f"Find the cause on rank {self._rank}.",
        )

    def forgive(self) -> None:
        """Take back what `fail` has told: the error was caught and a new run begins on all ranks."""
        self._is_failing, self.failure = False, None
        if self._store is not None:
            self._write(f"state/{self._rank}", _RUNNING)
            self._write(_FAILED, "none")

    def _on_unhandled(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if self._store is not None and os.getpid() == self._pid:
            self._is_failing = True
            self._look_quietly()
            if self.failure is None:
                with suppress(RuntimeError):
                    self.fail(error)
        self._next_hook(kind, error, trace)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        with suppress(RuntimeError):
            self._write(f"state/{self._rank}", _SEEN if self._is_failing else _LEFT)
            if self._is_failing or self._rank == 0:
                self._linger()
        self.close()

    def _linger(self) -> None:
        """Wait until the others have read the store. See [Note: The end of a process]."""
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            states = {other: self._read(f"state/{other}") for other in self._others}
            if all(state or self._is_dead(other) for other, state in states.items()):
                return
            time.sleep(0.05)

    # -- on the thread --

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            if not self._look_quietly():
                break
            waiting = self.waits.current
            if self.failure is not None:
                self._get_out(waiting)
            elif waiting is not None and time.monotonic() - waiting.since > LONG_WAIT_S:
                with suppress(RuntimeError):
                    self._look_into(waiting)
            elif self._heard:
                self._heard.clear()

    def _look_quietly(self) -> bool:
        """Read whether a rank has failed; return whether the store could be read."""
        try:
            found = self._read(_FAILED)
        except RuntimeError:
            return False  # gone with the process that held it, at the end of a run as a rule
        if found not in ("", "none") and self.failure is None:
            fields = json.loads(found)
            self.failure = ShardingError(**fields)
            self._deadline = time.monotonic() + GRACE_S
            if not self._is_failing:
                LOGGER.error("[rank %d] %s", self._rank, self.failure)
            with suppress(RuntimeError):
                self._write(f"state/{self._rank}", _SEEN)
        return True

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
        self._beat += 1
        note = self.waits.notes(self._rank, waiting, self._beat)
        self._write(f"waits/{self._rank}", json.dumps(note.to_json()))
        for other in self._others:
            if self._has_ended(other, waiting):
                return
        notes = self._steady_notes()
        if (parted := find_divergence(notes, len(self._others) + 1)) is not None:
            self._post(
                what=parted,
                why="A collective needs all ranks, in one order; these can never meet.",
                fix="Every rank must run the same modules in the same order, and as many batches, forwards, "
                "backwards, steps and calls of the engine as the others. A module that runs on some ranks "
                "only must be one unit with its siblings: name its parent in "
                "zero_optimization.leaf_module.classes or .names.",
            )
        elif time.monotonic() - waiting.since > REPORT_S and self._reported != waiting.serial:
            self._reported = waiting.serial
            waiting_too = {note.rank for note in notes} | {self._rank}
            if min(waiting_too) == self._rank:
                busy = [rank for rank in range(len(self._others) + 1) if rank not in waiting_too]
                LOGGER.warning(
                    "Rank %d has waited %d s in %s; ranks that wait for nobody: %s.",
                    self._rank, REPORT_S, waiting.ticket.what, busy or "none",
                )  # fmt: skip

    def _steady_notes(self) -> list[Notes]:
        """Return the notes of ranks, this one too, that have waited in one place since they were seen."""
        steady = []
        for rank in range(len(self._others) + 1):
            text = self._read(f"waits/{rank}")
            if not text:
                continue
            note = Notes.from_json(json.loads(text))
            first = self._heard.get(rank)
            if first is None or first.serial != note.serial:
                self._heard[rank] = note
            elif note.beat > first.beat:
                steady.append(note)
        return steady

    def _has_ended(self, other: int, waiting: Waiting) -> bool:
        if self._is_dead(other):
            what = f"The process of rank {other} has died without a word"
            why = "It was killed (by a signal, or for memory), or has crashed."
        elif self._read(f"state/{other}") == _LEFT and self._read(_FAILED) == "none":
            what = f"Rank {other} has ended"
            why = "Its process, or its engine, has come to its end before this rank's has."
        else:
            return False
        self._post(
            what=f"{what}, and rank {self._rank} waits for it in {waiting.ticket.what}.",
            why=why,
            fix=f"Look at the output of rank {other}, and at the machine's log. Every rank must make the "
            "same calls, with as many batches.",
        )
        return True

    # -- helpers --

    def _is_dead(self, other: int) -> bool:
        text = self._read(f"who/{other}")
        return bool(text) and is_dead(json.loads(text))

    def _post(self, *, what: str, why: str, fix: str) -> None:
        if self._store is None:
            return
        with self._lock:
            self._store.compare_set(_FAILED, "none", json.dumps({"what": what, "why": why, "fix": fix}))

    def _read(self, key: str) -> str:
        store = self._store
        if store is None:
            return ""
        with self._lock:
            return store.get(key).decode()

    def _write(self, key: str, value: str) -> None:
        store = self._store
        if store is not None:
            with self._lock:
                store.set(key, value)


def _unexplained(what: str, error: BaseException) -> ShardingError:
    return ShardingError(
        what=f"{what} did not finish: {str(error).splitlines()[0]}",
        why="Another rank has ended, or ran other code than this one and never joined in. Every rank must "
        "run the same forwards, backwards and steps in the same order.",
        fix="Look at the other ranks' errors first. If there is none: was a call made on one rank only "
        "(save_checkpoint, full_state_dict, clip_grad_norm_ and step are for all ranks)? Do ranks have "
        "different numbers of batches, or does the model choose its modules by a rank's own data? Such "
        "modules are one unit if they are named in zero_optimization.leaf_module. Waiting ends at the "
        "process group's timeout (init_process_group(timeout=...)).",
    )
