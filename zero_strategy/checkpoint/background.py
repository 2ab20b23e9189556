"""The rank's side of its writer process: started when it is first needed, given jobs, ended.

Owned by `pending`, whose thread waits here for the answers. What the process does is `writer_process`'.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

from zero_strategy.checkpoint.host_copy import HostCopy
from zero_strategy.errors import CheckpointError

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_CODE = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from zero_strategy.checkpoint.writer_process import main; main(sys.argv[2:])"
)
# A signal meant for the rank (Ctrl-C goes to all processes of a terminal) must not end what it waits for.
_NOT_ITS_OWN = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
END_S = 5.0  # for the process to end once its pipe is closed

_Process = subprocess.Popen[bytes]


class WriterProcess:
    """Writes files out of a host copy, in a process of its own.

    A process that has ended, for whatever reason, is followed by a new one at the next job.
    """

    def __init__(self, memory: HostCopy) -> None:
        """Begin without a process.

        Args:
            memory: What it writes from; its descriptor stays the same while it grows.
        """
        self._memory = memory
        self._processes: list[_Process] = []  # one at most
        weakref.finalize(self, _end_all, self._processes)  # of an engine that is dropped without close()

    @property
    def pid(self) -> int | None:
        """The id of the process, if it runs."""
        return next((process.pid for process in self._processes if process.poll() is None), None)

    def write(self, path: Path, ends: Sequence[int]) -> list[str]:
        """Have the beginning of the memory written into a new file and flushed, and wait. For a thread.

        Args:
            path: A file that does not exist yet; removed again if anything fails.
            ends: Where its parts end, in bytes, ascending; the last is the size of the file.

        Returns:
            The checksum of every part.

        Raises:
            CheckpointError: The system refuses, or the process has ended.
        """
        if self.pid is None:
            _end_all(self._processes)
            self._processes.append(self._start())
        process = self._processes[0]
        assert process.stdin is not None and process.stdout is not None, "asked for"
        job = {"path": os.path.abspath(path), "ends": list(ends)}
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # ValueError: closed
            line = b""
        if not line.endswith(b"\n"):
            raise self._gone(process, path)
        answer = json.loads(line)
        if "error" in answer:
            what, why, fix = answer["error"]
            raise CheckpointError(what=what, why=why, fix=fix)
        checksums: list[str] = answer["checksums"]
        return checksums

    def kill(self) -> None:
        """End the process in the middle of what it does; `write` raises then. May be called by any thread."""
        for process in list(self._processes):
            process.kill()

    def close(self) -> None:
        """End the process. Safe to call twice."""
        _end_all(self._processes)

    # -- helpers --

    def _start(self) -> _Process:
        places = [_PACKAGE_ROOT, *(path or os.getcwd() for path in sys.path)]
        # -S -E: nothing of site or the environment is looked at, which takes time and may import anything.
        command = [sys.executable, "-S", "-E", "-c", _CODE, json.dumps(places)]
        command += [str(self._memory.descriptor), str(os.getpid())]
        # What a thread has blocked stays blocked in the processes it starts, from their first moment on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_ITS_OWN)
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._memory.descriptor],
            )
        except OSError as error:
            raise CheckpointError(
                what=f"The writer process of an asynchronous save could not be started: {error}.",
                why=f"It is a Python of its own: {sys.executable}.",
                fix="Save without asynchronous=True, or make room for one more process a rank.",
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _gone(self, process: _Process, path: Path) -> CheckpointError:
        process.kill()
        code = process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        path.unlink(missing_ok=True)
        return CheckpointError(
            what=f"The writer process ended {how} before {path} was complete.",
            why="Somebody ended it, or memory ran out. The unfinished file was removed; an earlier "
            "checkpoint is untouched.",
            fix="Save again: another process is started. Its messages, if it left any, are on stderr.",
        )


def _end_all(processes: list[_Process]) -> None:
    while processes:
        process = processes.pop()
        assert process.stdin is not None and process.stdout is not None, "asked for"
        with contextlib.suppress(OSError):  # what was left to write to a process that is gone
            process.stdin.close()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
