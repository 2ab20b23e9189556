"""One file of exported weights, written front to back while its writer prepares what comes next.

Used by `weight_files`. It does not know what the bytes mean.

[Note: Written behind]
To read weights, compare their checksum and convert them takes about as long as the kernel needs to copy the
result into its cache of the disk. So what is written goes into one of a few buffers, and a thread hands full
buffers to the kernel. A copy costs little, as the bytes are in the processor's cache; it makes large writes
of small tensors, and lets the caller use its own memory again at once.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

from zero_strategy.checkpoint.durable import NewFile

BUFFER_BYTES = 4 * 2**20
NUM_BUFFERS = 3  # one is filled, one is written, one is ready to be written


class OutputFile:
    """A `NewFile` that is written to behind its writer's back. See [Note: Written behind].

    Usage::

        with OutputFile(path) as file:
            file.write(view)  # any number of times; a file for `zipfile` too, which asks `tell()`

    What the system refuses is raised by the call during which it comes to light, at the end of the block at
    last.
    """

    def __init__(self, path: Path) -> None:
        self._file = NewFile(path)
        self._num_bytes = 0
        self._thread = ThreadPoolExecutor(max_workers=1)  # has no thread before something is handed over
        self._buffer: memoryview | None = None  # [BUFFER_BYTES], of which the first bytes are filled
        self._filled_bytes = 0
        self._free: list[memoryview] = []
        self._under_way: deque[tuple[Future[None], memoryview]] = deque()

    def __enter__(self) -> OutputFile:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error
        try:
            if error is None:
                self._hand_over()
                self._wait(until_under_way=0)
        except BaseException as raised:
            failure = raised
            raise
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._file.__exit__(None if failure is None else type(failure), failure, None)

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return how many. The caller may overwrite them at once.

        Raises:
            CheckpointError: The system refuses these, or some from before.
        """
        view = memoryview(data).cast("B")
        taken_bytes = 0
        while taken_bytes < len(view):
            if self._buffer is None:
                self._buffer = self._free.pop() if self._free else memoryview(bytearray(BUFFER_BYTES))
            part = view[taken_bytes : taken_bytes + BUFFER_BYTES - self._filled_bytes]
            self._buffer[self._filled_bytes : self._filled_bytes + len(part)] = part
            self._filled_bytes += len(part)
            taken_bytes += len(part)
            if self._filled_bytes == BUFFER_BYTES:
                self._hand_over()
                self._wait(until_under_way=NUM_BUFFERS - 1)
        self._num_bytes += len(view)
        return len(view)

    def tell(self) -> int:
        """Return how many bytes have been written."""
        return self._num_bytes

    def flush(self) -> None:
        """Do nothing: leaving the block flushes. `zipfile` asks for it."""

    def _hand_over(self) -> None:
        if self._buffer is not None:
            full = self._buffer[: self._filled_bytes]
            self._under_way.append((self._thread.submit(self._file.write, full), self._buffer))
            self._buffer, self._filled_bytes = None, 0

    def _wait(self, *, until_under_way: int) -> None:
        while len(self._under_way) > until_under_way:
            written, buffer = self._under_way.popleft()
            written.result()
            self._free.append(buffer)
