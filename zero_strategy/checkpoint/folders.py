"""Folders as they are written: by one process at a time, flushed to the disk, with JSON that people can read.

Used by the checkpoint and by what is exported from one. Knows nothing of what is in the files.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path

from zero_strategy.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def lock_folder(folder: Path, subject: Path | None = None) -> int | None:
    """Keep other saves out of a folder; each would take the files of the other for leftovers and delete them.

    Args:
        folder: The folder to lock.
        subject: What is being saved, for the message; None: the folder.

    Returns:
        A file descriptor whose closing ends the lock, as does the end of the process; None where the system
        or the file system has no such locks.

    Raises:
        CheckpointError: Another save is going on.
    """
    if fcntl is None:
        return None
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
        return None
    return descriptor


def unlock_folder(lock: int) -> None:
    """End a lock. Closing alone would not, while a process that was forked meanwhile holds it open.

    Args:
        lock: What `lock_folder` returned.
    """
    if fcntl is not None:
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


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
