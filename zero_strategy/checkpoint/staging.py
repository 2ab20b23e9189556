"""Where a folder is written, and how it gets into its place in one step; how it is taken away in one.

A path that does not exist yet is written beside its place, into a hidden folder, and renamed when all of it
is on the disk: a folder that exists is complete. A checkpoint that exists cannot be replaced in one step;
there the manifest's rename is the step ([Note: Commit by rename] in `manifest`), and the folder that is
written to is the one that is to be. Called by whoever writes checkpoints and exports, and by `tags`. It does
not know what is in the files; which of them may be deleted is a matter of their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.folders import FolderLock, lock_folder, sync_folder
from zero_strategy.checkpoint.own_files import MANIFEST_NAME, is_own_file, remove_own_files, remove_save
from zero_strategy.checkpoint.records import new_checkpoint_id
from zero_strategy.errors import CheckpointError

IsOurs = Callable[[Path], bool]

_STAGING_NAME = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.partial", re.DOTALL)


def anything(path: Path) -> bool:
    """Say of everything that is in a staged folder that it may be deleted: nobody else writes there."""
    return True


class Staging(NamedTuple):
    """The folders of something that is written: one and the same where a checkpoint is replaced in place."""

    target: Path  # where the files are written
    final: Path  # where the folder is to be
    entered_in: tuple[Path, ...]  # the folders that get an entry by it, as those around it may be new too
    is_ours: IsOurs  # what in a staged folder may be deleted

    @property
    def is_in_place(self) -> bool:
        """Whether files are written where they are to be."""
        return self.target == self.final


def staging_of(path: Path, checkpoint_id: str, *, in_place: bool, is_ours: IsOurs = is_own_file) -> Staging:
    """Name the folders of something that is to be at `path`; a link to a folder stays one.

    Args:
        path: Where it is to be.
        checkpoint_id: Of its own.
        in_place: Write there.
        is_ours: What in a folder written beside its place may be deleted, if that is never completed.
    """
    final = Path(os.path.realpath(path))
    target = final if in_place else final.with_name(f".{final.name}.{checkpoint_id}.partial")
    entered_in = [final.parent]
    while not entered_in[-1].exists():
        entered_in.append(entered_in[-1].parent)
    return Staging(target, final, tuple(entered_in), is_ours)


def begin(staging: Staging, *, is_alone: bool = False, num_bytes: int = 0) -> FolderLock:
    """Make the folder to write to, lock it, and remove what those that were killed have left beside it.

    That it is there need not survive a power cut before `publish`, so nothing is flushed: a flush may take as
    long as the copy that an asynchronous save waits for.

    Args:
        staging: The folders.
        is_alone: Nothing but checkpoints is beside it, so what saves of other names left is removed too.
        num_bytes: That are to be written, if that is known.

    Raises:
        CheckpointError: Another save to the same place is going on, the folder cannot be made, or the disk
            has too little space.
    """
    try:
        staging.target.mkdir(parents=True, exist_ok=staging.is_in_place)
    except OSError as error:
        raise CheckpointError(
            what=f"The folder {staging.final} could not be made: {error.strerror or error}.",
            why="A checkpoint is a folder, and so are exported weights.",
            fix="Choose another path, or remove the file that is in the way.",
        ) from error
    lock = lock_folder(staging.target, staging.final)
    try:
        if lock.is_held and staging.is_in_place and not (staging.target / MANIFEST_NAME).exists():
            remove_own_files(staging.target)  # with a manifest there, the next commit does it
        _remove_leftovers(staging, is_alone)
        _require_space(staging, num_bytes)
    except BaseException:
        discard(staging)
        lock.release()
        raise
    return lock


def publish(staging: Staging) -> None:
    """Put a complete folder, all of whose files are on the disk, into its place.

    Raises:
        CheckpointError: Something else has got there first.
    """
    if staging.is_in_place:
        return
    try:
        os.rename(staging.target, staging.final)
    except OSError as error:
        raise CheckpointError(
            what=f"The folder could not be moved to {staging.final}: {error.strerror or error}.",
            why="There was nothing when it was begun, so something else was put there since, or the folder "
            "around it may no longer be written to.",
            fix="Save to another path, or let one program at a time save there.",
        ) from error
    with contextlib.suppress(OSError):  # it is there: what fails now must not be reported as if it were not
        for folder in staging.entered_in:
            sync_folder(folder)


def undo(staging: Staging, checkpoint_id: str) -> None:
    """Remove what one process has written for a checkpoint, unless it has become one; for any exception."""
    discard(staging)
    if staging.is_in_place:
        with contextlib.suppress(OSError):
            remove_save(staging.target, checkpoint_id)


def discard(staging: Staging) -> None:
    """Remove what was written beside its place; of what is replaced in place every rank removes its own."""
    if not staging.is_in_place:
        _remove(staging.target, staging.is_ours)


def delete(folder: Path, is_ours: IsOurs = is_own_file) -> None:
    """Take a checkpoint from its place in one step, then delete it: nobody ever finds a half of it.

    Args:
        folder: The checkpoint.
        is_ours: What in it is deleted; if there is anything else, that stays in a hidden folder.

    Raises:
        CheckpointError: A save into it is going on, or it is a link, which leads to what may be needed.
        OSError: It may not be moved.
    """
    if folder.is_symlink():
        raise CheckpointError(
            what=f"{folder} is a link to {os.path.realpath(folder)}, and was not deleted.",
            why="What it leads to has a name of its own, by which it may be needed.",
            fix="Remove the link, or the folder it leads to, yourself.",
        )
    with lock_folder(folder):
        hidden = staging_of(folder, new_checkpoint_id(), in_place=False).target
        os.rename(folder, hidden)
        _remove(hidden, is_ours)


def if_unused(folder: Path, tidy: Callable[[], None]) -> None:
    """Tidy a folder up if a lock shows that nobody writes into it; that this fails is no reason to fail."""
    with contextlib.suppress(CheckpointError, OSError), lock_folder(folder) as lock:
        if lock.is_held:
            tidy()


# -- helpers --


def _remove_leftovers(staging: Staging, is_alone: bool) -> None:
    beside: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that may be written to and not listed
        beside = list(staging.final.parent.iterdir())
    for path in beside:
        found = _STAGING_NAME.fullmatch(path.name)
        if found is None or path == staging.target or path.is_symlink() or not path.is_dir():
            continue
        if found["name"] == staging.final.name:
            with lock_folder(path, staging.final) as lock:
                if lock.is_held:
                    _remove(path, staging.is_ours)
        elif is_alone:
            if_unused(path, partial(_remove, path, staging.is_ours))


def _require_space(staging: Staging, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(staging.target).free
    if num_bytes > free_bytes:
        raise CheckpointError(
            what=f"The folder {staging.final} was not written.",
            why=f"It needs {num_bytes} bytes and the disk has {free_bytes}.",
            fix="Choose a folder with enough space.",
        )


def _remove(folder: Path, is_ours: IsOurs) -> None:
    """Delete what is ours in a folder, and the folder unless it holds anything else."""
    if folder.is_symlink():
        return
    with contextlib.suppress(OSError):
        for path in filter(is_ours, folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        folder.rmdir()
