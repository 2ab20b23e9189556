"""The writer process: writes a rank's files out of its host copy while the rank trains on.

Started by `background`, with a Python of its own that never imports torch: it starts in a few hundredths of
a second and is small. A job is a line of JSON on its stdin, the answer a line on its stdout; what it writes
lies in memory that both processes see. It ends with the rank, whatever that ends by.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from zero_strategy.checkpoint.durable import Checksum, NewFile
from zero_strategy.errors import CheckpointError

POLL_S = 1.0  # a forked process of the rank may hold the pipe open; then the rank's end shows by its number


def main(arguments: Sequence[str]) -> None:
    """Do jobs until the rank ends, or closes the pipe.

    Args:
        arguments: The descriptor of the host copy; the process id of the rank.
    """
    memory, parent = map(int, arguments)
    jobs: SimpleQueue[bytes] = SimpleQueue()
    # So that the end of the rank is noticed while a disk is slow.
    threading.Thread(target=_listen, args=(jobs, parent), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        sys.stdout.write(json.dumps(_answer(memory, Path(job["path"]), job["ends"])) + "\n")
        sys.stdout.flush()


def write_parts(path: Path, view: memoryview, ends: Sequence[int]) -> list[str]:
    """Write the beginning of a memory into a new file, and flush it to the disk.

    Args:
        path: A file that does not exist yet.
        view: The memory.
        ends: Where its parts end, in bytes, ascending; the last is the size of the file.

    Returns:
        The checksum of every part.

    Raises:
        CheckpointError: The system refuses.
    """
    checksums = []
    with NewFile(path) as file:
        for end in ends:
            found = Checksum()
            file.write(view[file.num_bytes : end], found)
            checksums.append(str(found))
    return checksums


def _answer(memory: int, path: Path, ends: Sequence[int]) -> dict[str, Any]:
    # Not closed but let go of: the traceback of an error still holds views.
    view = memoryview(mmap.mmap(memory, ends[-1], prot=mmap.PROT_READ))
    try:
        return {"checksums": write_parts(path, view, ends)}
    except CheckpointError as error:
        return {"error": [error.what, error.why, error.fix]}


def _listen(jobs: SimpleQueue[bytes], parent: int) -> None:
    """Take jobs in; end this process when nobody is left to send any."""
    received = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], POLL_S)[0]:
            continue
        chunk = os.read(0, 2**16)
        if not chunk:
            break
        *lines, received = (received + chunk).split(b"\n")
        for line in lines:
            jobs.put(line)
    os._exit(0)
