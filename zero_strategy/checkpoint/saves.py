"""The asynchronous saves of an engine, one at a time: what they share, and when one is known to have ended.

Owned by the engine. It has the host copy, the writer process and the letters, all made at the first
asynchronous save; and it is asked at every step whether a save that goes on has ended, so that an error is
raised on all ranks at the same step. It does not know what a checkpoint holds.

[Note: The end of a program]
A program that ends while a save goes on waits for it, whether it ends by itself, by an exception, or by
`engine.close()`. Each rank does so for itself, without a collective: others may be gone. Ctrl-C ends the wait
and the save. A signal that ends the process, such as an unhandled SIGTERM, ends the save as well: what it has
written is removed by the next save.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch

from zero_strategy.checkpoint.background import WriterProcess
from zero_strategy.checkpoint.host_copy import HostCopy
from zero_strategy.checkpoint.pending import COMPLETE, GOING_ON, PendingSave, Saving
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.comm.letters import Letters
from zero_strategy.comm.together import agreed, as_zero_error
from zero_strategy.errors import CheckpointError, ConfigError
from zero_strategy.log import LOGGER, log_event

IfBusy = Literal["wait", "refuse"]
QUIET_S = 1.0  # a wait that lasts longer is told


class Saves:
    """What of saves outlasts the call that began them.

    Attributes:
        memory: What an asynchronous save copies into.
        writer: What writes from there.
    """

    def __init__(self, collectives: Collectives) -> None:
        self.memory = HostCopy()
        self.writer = WriterProcess(self.memory)
        self._collectives = collectives
        self._letters: Letters | None = None
        self._pending: PendingSave | None = None
        self._at_exit: Callable[[], None] | None = None

    # -- in a save --

    def make_way(self, if_busy: IfBusy) -> None:
        """Make sure that no save goes on. Collective.

        Args:
            if_busy: What to do if one does.

        Raises:
            CheckpointError: One does, and `if_busy` is "refuse"; or it has failed. On all ranks.
            ConfigError: There is no such `if_busy`.
        """
        if if_busy not in ("wait", "refuse"):
            raise ConfigError(
                what=f"if_busy={if_busy!r} was given to save_checkpoint.",
                why='It says what to do while an asynchronous save goes on: "wait" for it, or "refuse".',
                fix='Pass "wait" (the default) or "refuse".',
            )
        self.look()
        if self._pending is None:
            return
        if if_busy == "refuse":
            raise CheckpointError(
                what=f"A save was asked for while {self._pending.path} is still being written.",
                why='One asynchronous save goes on at a time, and if_busy="refuse" was said.',
                fix='Save later or less often, or pass if_busy="wait".',
            )
        self.wait()

    def prepare(self, copy: Callable[[Saves], None]) -> None:
        """Have this rank's state copied; all ranks must have done so when a save goes on in the background.

        Args:
            copy: Copies into `memory`.
        """
        if self._letters is None:
            self._letters = self._collectives.open_letters()
        copy(self)

    def begin(self, path: str, checkpoint_id: str, saving: Saving) -> None:
        """Go on with a save in the background; to be called when all ranks have copied their state.

        Args:
            path: Of the checkpoint, for messages.
            checkpoint_id: Its id.
            saving: What is to be done.
        """
        assert self._letters is not None and self._pending is None, "opened, and nothing going on"
        self._pending = PendingSave(path, checkpoint_id, saving, self._letters)
        self._at_exit = partial(_end_at_exit, self._pending, os.getpid())
        atexit.register(self._at_exit)

    # -- later --

    def look(self) -> None:
        """Find out whether the save that goes on has ended. Collective while one does.

        Raises:
            CheckpointError: It has failed; on all ranks at the same call.
        """
        pending = self._pending
        if pending is None:
            return
        found = torch.tensor([pending.status, bool(pending.afterwards)], dtype=torch.uint8, device="cpu")
        self._collectives.maximum(found, "The message about a save that goes on")
        status, has_afterwards = found.tolist()
        if status == GOING_ON:
            return
        self._forget()
        if status != COMPLETE:
            pending.cancel()
            self._collectives.agree(pending.error if pending.is_own else None)
        elif has_afterwards:
            agreed(self._collectives, pending.do_afterwards)

    def wait(self) -> None:
        """Return when no save goes on any more. Collective.

        Raises:
            CheckpointError: It has failed; on all ranks.
        """
        if self._pending is not None:
            _wait_aloud(self._pending)
            self.look()

    def after(self, action: Callable[[], object], *, comes_first: bool = False) -> None:
        """Do something as soon as no save goes on: now, or when the one that does is known to be complete.

        For what must not happen if that save fails, such as the deletion of the checkpoint before it; then it
        never does. Not collective: every rank has its own.

        Args:
            action: Begins no collective. An error it raises later is raised on all ranks.
            comes_first: Do it before what else waits.
        """
        if self._pending is None:
            action()
        else:
            afterwards = self._pending.afterwards
            afterwards.insert(0 if comes_first else len(afterwards), action)

    def join(self) -> None:
        """Return when this rank's save, if one goes on, has ended somehow. Not collective; raises nothing."""
        if self._pending is not None:
            _wait_aloud(self._pending)

    @property
    def path(self) -> str | None:
        """The checkpoint that is being saved; None if no save goes on. The same on all ranks."""
        return None if self._pending is None else self._pending.path

    def close(self) -> None:
        """Wait, and give everything back. Not collective; safe to call twice.

        Raises:
            CheckpointError: The save that went on has failed.
            KeyboardInterrupt: In the wait; the save is ended.
        """
        pending = self._pending
        try:
            if pending is not None:
                self._forget()
                _wait_or_cancel(pending)
        finally:
            self.writer.close()
            self.memory.close()
            if self._letters is not None:
                self._letters.close()
                self._letters = None
        if pending is not None:
            if pending.error is not None:
                raise pending.error
            pending.do_afterwards()

    def memory_use(self) -> MemoryUse:
        """Return the bytes of the host copy."""
        return MemoryUse(host_copy=self.memory.num_bytes)

    # -- helpers --

    def _forget(self) -> None:
        self._pending = None
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = None


def _wait_aloud(pending: PendingSave) -> None:
    if not pending.join(QUIET_S):
        log_event(f"Waiting until the checkpoint {pending.path} is written.")
        pending.join()


def _wait_or_cancel(pending: PendingSave) -> None:
    try:
        _wait_aloud(pending)
    except KeyboardInterrupt:
        pending.cancel()
        raise


def _end_at_exit(pending: PendingSave, pid: int) -> None:
    """See [Note: The end of a program]."""
    if os.getpid() != pid:  # a forked process has no part in it
        return
    with contextlib.suppress(KeyboardInterrupt):
        _wait_or_cancel(pending)
    error = pending.error
    if error is None:  # rank 0 has committed before anybody hears of it: complete here is complete
        try:
            pending.do_afterwards()
        except Exception as raised:
            error = as_zero_error(raised)
    if error is not None:
        LOGGER.error("%s", error)
