"""A new file that is either on the disk as a whole or not there, and the checksums of what goes into it.

One way to write for whoever writes: a rank by itself, and its writer process (writer_process.py), which
starts with this module and must not wait for torch. So this imports nothing that imports torch, and knows
bytes only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from xxhash import xxh3_64

from zero_strategy.errors import CheckpointError

_SYNC_FILE_RANGE_WRITE = 2  # of linux/fs.h

CHUNK_BYTES = 64 * 2**20  # bytes moved at once: large enough for full disk speed, small beside any model
# Bytes summed and then written at once: they are still in the processor's cache when the kernel copies them,
# so that a checksum costs 5 percent of the copy instead of 15.
WRITE_BYTES = 2**20
# Written before the disk is asked to begin with them: it works while the next are summed and copied, instead
# of at the end.
FLUSH_BYTES = 4 * 2**20


class Checksum:
    """The checksum of bytes that come in parts: the 64 bits of XXH3, which reads memory at its full speed.

    It finds every accident; it is no proof against somebody who wants to deceive.
    Source: https://github.com/Cyan4973/xxHash.
    """

    def __init__(self) -> None:
        self._state = xxh3_64()

    def add(self, data: memoryview | bytes) -> None:
        """Continue with the bytes that follow."""
        self._state.update(data)

    def __str__(self) -> str:
        return f"xxh3:{self._state.hexdigest()}"


class NewFile:
    """A file that is written front to back.

    Usage::

        with NewFile(path) as file:
            file.write(view)

    Leaving the block flushes the file to the disk. An error inside it removes the file.

    Attributes:
        num_bytes: Written so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_bytes = 0
        self._begun_bytes = 0  # of them the disk has been asked to take
        self._file: BinaryIO | None = None

    def __enter__(self) -> NewFile:
        try:
            # "x": names are drawn at random, so a file that is there belongs to somebody else.
            self._file = open(self.path, "xb", buffering=0)
        except OSError as error:
            raise _write_error(self.path, error) from error
        return self

    def write(self, view: memoryview | bytes, checksum: Checksum | None = None) -> None:
        """Append bytes, and continue a checksum with them in the same pass.

        Raises:
            CheckpointError: The system refuses.
        """
        assert self._file is not None, "written to without being entered"
        view = memoryview(view)
        for start in range(0, len(view), WRITE_BYTES):
            part = view[start : start + WRITE_BYTES]
            if checksum is not None:
                checksum.add(part)
            try:
                while part:  # one write may take less than all
                    num_written = self._file.write(part)
                    part = part[num_written:]
                    self.num_bytes += num_written
            except OSError as error:
                raise _write_error(self.path, error) from error
            if self.num_bytes - self._begun_bytes >= FLUSH_BYTES:
                self._begin_flush()

    def _begin_flush(self) -> None:
        """Have the disk begin to take what is written; the end of the block waits for it. Linux only."""
        assert self._file is not None, "flushed without being entered"
        range_bytes = (self._begun_bytes, self.num_bytes - self._begun_bytes)
        _sync_file_range(self._file.fileno(), *range_bytes, _SYNC_FILE_RANGE_WRITE)
        self._begun_bytes = self.num_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None, "left without being entered"
        if error is not None:
            self._discard()
            return
        try:
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as failure:
            self._discard()
            raise _write_error(self.path, failure) from failure

    def _discard(self) -> None:
        """Remove the file; an error is on its way already, and no other takes its place."""
        assert self._file is not None, "discarded without being entered"
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the disk may only now say what it did not take
            self._file.close()


def _sync_file_range(descriptor: int, start: int, num_bytes: int, flags: int) -> None:
    """Call what Python has no function for; a system that lacks it or refuses only loses time."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
        function(descriptor, start, num_bytes, flags)


def _write_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        what=f"{path} could not be written: {error.strerror or error}.",
        why="The system refused it. The unfinished file was removed; an earlier checkpoint is untouched.",
        fix="Check free space, quota and permissions of the folder, then save again.",
    )
