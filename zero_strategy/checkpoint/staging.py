"""Where a save writes its files, and how they become the checkpoint in one step.

A path that does not exist yet is written beside its place, into a hidden folder, and renamed when all of it
is on the disk: a folder that exists is complete. A folder that exists cannot be replaced in one step; there
the manifest's rename is the step ([Note: Commit by rename] in `manifest`), and the folder that is written to
is the one that is to be. Called by `save` and `tags`. It does not know what is in the files.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.folders import lock_folder, sync_folder
from zero_strategy.checkpoint.manifest import MANIFEST_NAME, remove_own_files, remove_save
from zero_strategy.errors import CheckpointError

_STAGING_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.partial", re.DOTALL)


class Staging(NamedTuple):
    """The folders of a save: one and the same where a checkpoint is replaced in place."""

    target: Path  # where the files are written
    final: Path  # where the checkpoint is to be
    entered_in: tuple[Path, ...]  # the folders that get an entry by it, as those around it may be new too


def staging_of(path: Path, checkpoint_id: str, *, in_place: bool) -> Staging:
    """Name the folders of a save to `path`; a link to a folder stays one."""
    final = Path(os.path.realpath(path))
    target = final if in_place else final.with_name(f".{final.name}.{checkpoint_id}.partial")
    entered_in = [final.parent]
    while not entered_in[-1].exists():
        entered_in.append(entered_in[-1].parent)
    return Staging(target, final, tuple(entered_in))


def begin(staging: Staging, *, is_alone: bool) -> int | None:
    """Make the folder to write to, lock it, and remove what saves that were killed have left beside it.

    That it is there need not survive a power cut before `publish`, so nothing is flushed: a flush may take as
    long as the copy that an asynchronous save waits for.

    Args:
        staging: The folders of the save.
        is_alone: Nothing but checkpoints is beside it, so what saves of other names left is removed too.

    Returns:
        As for `lock_folder`.

    Raises:
        CheckpointError: Another save to the same place is going on, or the folder cannot be made.
    """
    try:
        staging.target.mkdir(parents=True, exist_ok=staging.target == staging.final)
    except OSError as error:
        raise CheckpointError(
            what=f"The folder {staging.final} could not be made: {error.strerror or error}.",
            why="A checkpoint is a folder.",
            fix="Choose another path, or remove the file that is in the way.",
        ) from error
    lock = lock_folder(staging.target, staging.final)
    try:
        if not (staging.target / MANIFEST_NAME).exists():  # with one there, its successor's commit does it
            remove_own_files(staging.target)
        _remove_leftovers(staging, is_alone)
    except BaseException:
        discard(staging)
        if lock is not None:
            os.close(lock)
        raise
    return lock


def publish(staging: Staging) -> None:
    """Put a complete checkpoint into its place.

    Raises:
        CheckpointError: Something else has got there first.
    """
    if staging.target == staging.final:
        return
    try:
        os.rename(staging.target, staging.final)
    except OSError as error:
        raise CheckpointError(
            what=f"The checkpoint could not be moved to {staging.final}: {error.strerror or error}.",
            why="There was nothing when the save began, so something else was put there since, or the folder "
            "around it may no longer be written to.",
            fix="Save to another path, or let one program at a time save there.",
        ) from error
    with contextlib.suppress(OSError):  # it is there: what fails now must not be reported as if it were not
        for folder in staging.entered_in:
            sync_folder(folder)


def undo(staging: Staging, checkpoint_id: str) -> None:
    """Remove what one process has written for a checkpoint, unless it has become one; for any exception."""
    discard(staging)
    if staging.target == staging.final:
        with contextlib.suppress(OSError):
            remove_save(staging.target, checkpoint_id)


def discard(staging: Staging) -> None:
    """Remove what was written beside its place; of what is replaced in place every rank removes its own."""
    if staging.target != staging.final:
        _remove(staging.target)


def hide(folder: Path, checkpoint_id: str) -> None:
    """Take a checkpoint from its place in one step, then delete it: nobody ever finds a half of it.

    Raises:
        CheckpointError: A save into it is going on.
        OSError: It may not be moved.
    """
    lock = lock_folder(folder, folder)
    try:
        hidden = staging_of(folder, checkpoint_id, in_place=False).target
        os.rename(folder, hidden)
        _remove(hidden)
    finally:
        if lock is not None:
            os.close(lock)


def _remove_leftovers(staging: Staging, is_alone: bool) -> None:
    beside: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that may be written to and not listed
        beside = list(staging.final.parent.iterdir())
    for path in beside:
        found = _STAGING_NAME.fullmatch(path.name)
        if found is None or path == staging.target or path.is_symlink() or not path.is_dir():
            continue
        if found["name"] == staging.final.name:
            lock = lock_folder(path, staging.final)
            _remove(path)
            if lock is not None:
                os.close(lock)
        elif is_alone:
            if_unused(path, partial(_remove, path))


def if_unused(folder: Path, tidy: Callable[[], None]) -> None:
    """Tidy a folder up if a lock shows that nobody writes into it; that this fails is no reason to fail."""
    with contextlib.suppress(CheckpointError, OSError):
        lock = lock_folder(folder)
        if lock is not None:
            try:
                tidy()
            finally:
                os.close(lock)


def _remove(folder: Path) -> None:
    """Delete the files of a save in a folder, and the folder unless it holds others."""
    with contextlib.suppress(OSError):
        remove_own_files(folder)
        folder.rmdir()
