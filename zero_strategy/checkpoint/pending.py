"""A save that goes on while the ranks train: its thread, what ranks tell one another meanwhile, how it ends.

The thread waits for this rank's writer process and, on rank 0, for word of what the other ranks have written;
then rank 0 commits and tells them. It begins no collective. Owned by `saves`, which finds out how it has
ended, on all ranks together. What is written and committed is the business of whoever saves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Protocol

from zero_strategy.comm.letters import Letters
from zero_strategy.comm.together import as_zero_error
from zero_strategy.errors import CheckpointError, ZeroError

# How a save stands on one rank. The largest of all ranks' is how it stands.
COMPLETE, GOING_ON, FAILED = 0, 1, 2
# Between two attempts to end what is being written: the first may come before there is a writer process.
STOP_AGAIN_S = 0.05


class Saving(Protocol):
    """What is left to do of a save once this rank's state has been copied. Called by the thread."""

    def write(self) -> Any:
        """Write this rank's file, and return what rank 0 needs to know of it, as JSON."""

    def stop(self) -> None:
        """Have `write` raise, if it is going on. Called by other threads."""

    def commit(self, tables: list[Any]) -> None:
        """Make a checkpoint of the files of all ranks. Rank 0 only; if it raises, there is none."""

    def follow_up(self) -> None:
        """Do what remains when the checkpoint is there. Rank 0 only; if it raises, the checkpoint stays."""

    def undo(self) -> None:
        """Remove what this rank has written: it is known not to be committed."""

    def end(self) -> None:
        """Let go of what is held; called last, however the save has ended."""


class PendingSave:
    """One asynchronous save, as this rank knows it.

    Attributes:
        path: Of the checkpoint, for messages.
        error: What it has failed by, or None.
        is_own: Whether that happened on this rank.
        afterwards: What is to be done, on the main thread, when it is known to be complete.
    """

    def __init__(self, path: str, checkpoint_id: str, saving: Saving, letters: Letters) -> None:
        """Begin. All that follows happens on a thread.

        Args:
            path: Of the checkpoint, for messages.
            checkpoint_id: Its id.
            saving: What is to be done.
            letters: To and from the other ranks.
        """
        self.path = path
        self.error: ZeroError | None = None
        self.is_own = True
        self.afterwards: list[Callable[[], object]] = []
        self._checkpoint_id = checkpoint_id
        self._saving = saving
        self._letters = letters
        self._may_undo = True
        self._is_writing = True
        self._is_cancelled = threading.Event()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="zero_strategy.save", daemon=True)
        self._thread.start()

    # -- on the main thread --

    @property
    def status(self) -> int:
        """How the save stands on this rank."""
        if not self._has_ended.is_set():
            return GOING_ON
        return COMPLETE if self.error is None else FAILED

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the save has ended here, and tell whether it has.

        Args:
            timeout_s: At most so long; None: as long as it takes.
        """
        return self._has_ended.wait(timeout_s)

    def cancel(self) -> None:
        """End the save, if it has not ended."""
        self._is_cancelled.set()
        while not self._has_ended.is_set():
            if self._is_writing:
                self._saving.stop()
            self._has_ended.wait(STOP_AGAIN_S)

    def do_afterwards(self) -> None:
        """Do what was put off until now, in order; the first error ends it."""
        for action in self.afterwards:
            action()

    # -- on the thread --

    def _run(self) -> None:
        try:
            if self._letters.rank == 0:
                self._lead()
            else:
                self._follow()
        except Exception as raised:
            error = as_zero_error(raised)
            if self._is_cancelled.is_set():  # whatever was raised is what this has done to it
                self.is_own, error = False, _cancelled(self.path)
            if error is not raised:
                error.__cause__ = raised
            with contextlib.suppress(Exception):
                if self._may_undo:
                    self._saving.undo()
            with contextlib.suppress(Exception):
                self._letters.leave(self._checkpoint_id, self._complaint(error))
            self.error = error
        finally:
            self._saving.end()
            self._has_ended.set()

    def _lead(self) -> None:
        tables = [self._write()]
        for other in range(1, self._letters.world_size):
            tables.append(self._hear(other))
        self._saving.commit(tables)
        self._may_undo = False
        self._saving.follow_up()
        self._letters.leave(self._checkpoint_id, {"value": None})

    def _follow(self) -> None:
        table = self._write()
        # From here on rank 0 may commit: only its word tells whether it has.
        self._may_undo = False
        self._letters.leave(self._checkpoint_id, {"value": table})
        self._hear(0)

    def _write(self) -> Any:
        try:
            return self._saving.write()
        finally:
            self._is_writing = False

    def _hear(self, other: int) -> Any:
        """Return what another rank has to say.

        Raises:
            CheckpointError: It has failed, or will say nothing any more.
        """
        try:
            letter = self._letters.wait_for(other, self._checkpoint_id, self._is_cancelled)
        except ZeroError as error:
            raise CheckpointError(
                what=f"The checkpoint {self.path} was not completed: {error.what}",
                why=error.why,
                fix=f"{error.fix} An earlier checkpoint is untouched.",
            ) from error
        if "error" in letter:
            self.is_own, self._may_undo = False, letter["may_undo"]
            what, why, fix = letter["error"]
            raise CheckpointError(what=what, why=why, fix=fix)
        return letter["value"]

    def _complaint(self, error: ZeroError) -> dict[str, Any]:
        """Return a letter that says what has gone wrong, here or on a rank that has said so."""
        where = f"[rank {self._letters.rank}] " if self.is_own else ""
        return {"error": [f"{where}{error.what}", error.why, error.fix], "may_undo": self._may_undo}


def _cancelled(path: str) -> CheckpointError:
    return CheckpointError(
        what=f"The checkpoint {path} was given up before it was complete.",
        why="The program was interrupted while it waited for it, or another rank could not write its part.",
        fix="Save again. An earlier checkpoint is untouched.",
    )
