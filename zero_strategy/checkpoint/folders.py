"""Folders as they are written: by one process at a time, flushed to the disk, with JSON that people can read.

Used by the checkpoint and by what is exported from one. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path

from zero_strategy.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

COPY_BYTES = 2**20  # of a file at once


class FolderLock:
    """Keeps other saves out of a folder until it is released, or the process ends.

    Each would take the files of the other for leftovers and delete them. On a network file system the lock of
    a folder counts on the machine that holds it only: there one program at a time may save into a folder.

    Attributes:
        is_held: False where the system or the file system has no such locks.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def is_held(self) -> bool:
        """Whether it keeps anybody out."""
        return self._descriptor is not None

    def release(self) -> None:
        """Let others in. Safe to call twice."""
        if self._descriptor is not None:
            # Closing alone would not, while a process that was forked meanwhile holds it open.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def lock_folder(folder: Path, subject: Path | None = None) -> FolderLock:
    """Keep other saves out of a folder.

    Args:
        folder: The folder to lock.
        subject: What is being saved, for the message; None: the folder.

    Raises:
        CheckpointError: Another save is going on.
        OSError: The folder cannot be opened.
    """
    if fcntl is None:
        return FolderLock(None)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(
            what=f"Another save into {subject or folder} is going on.",
            why="Two saves into one folder would take each other's files for leftovers.",
            fix="Wait for it, or save into another folder. What the folder held before is untouched.",
        ) from None
    except OSError:
        os.close(descriptor)
        return FolderLock(None)
    return FolderLock(descriptor)


def replace_file(path: Path, content: bytes, temporary: Path) -> None:
    """Put a file into its place in one step: whoever looks sees the old content or the new one.

    Args:
        path: The file.
        content: What it is to hold.
        temporary: A name in the same folder to write under; what an earlier attempt left there is replaced.

    Raises:
        OSError: It cannot be written; `path` is as it was.
    """
    try:
        with open(temporary, "wb") as file:  # plain open: permissions as the umask says
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # From here on the content is the new one: a failure must not be reported as if it were not.
    with contextlib.suppress(OSError):
        sync_folder(path.parent)


def copy_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy the content of a file and flush it to the disk; permissions as the umask says."""
    with open(source, "rb") as read, open(target, "wb") as written:
        shutil.copyfileobj(read, written, COPY_BYTES)
        written.flush()
        os.fsync(written.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, so that a rename survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do this by themselves.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file for people to read, and flush it to the disk."""
    with open(path, "w", encoding="utf-8") as file:  # plain open: permissions as the umask says
        file.write(to_readable_json(value) + "\n")
        file.flush()
        os.fsync(file.fileno())


def to_readable_json(value: object, indent: str = "") -> str:
    """Write JSON as a person would: what fits into one line stays on one line."""
    if isinstance(value, dict):
        items = [f"{json.dumps(k)}: {to_readable_json(v, indent + '  ')}" for k, v in value.items()]
        opening, closing = "{", "}"
    elif isinstance(value, list | tuple):
        items = [to_readable_json(v, indent + "  ") for v in value]
        opening, closing = "[", "]"
    else:
        return json.dumps(value)
    inline = ", ".join(items)
    if "\n" not in inline and len(indent) + len(inline) <= 200:
        return opening + inline + closing
    inner = f",\n{indent}  ".join(items)
    return f"{opening}\n{indent}  {inner}\n{indent}{closing}"
