"""Start a script as its users do, and see how each of its ranks ends.

The script prints `rank R is PID` on each rank, and `now` when the trouble begins. `run_script` returns when
all ranks have ended, or ends them itself when `timeout_s` has passed. It knows nothing of zero_strategy.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


class Ended(NamedTuple):
    """How a script ended."""

    output: str
    codes: list[int]  # of the processes that were started
    seconds: float  # from `now` to the end of the last rank
    hung: list[int]  # ranks that had to be ended


def run_script(
    *commands: Sequence[str],
    num_ranks: int = 2,
    timeout_s: float = 100.0,
    on_now: Callable[[dict[int, int], int], None] | None = None,
) -> Ended:
    """Run Python with each of the arguments.

    Args:
        *commands: Arguments of the processes to start: one with a launcher, one for each rank without. Each
            leads a process group, as from a terminal.
        num_ranks: How many ranks there will be.
        timeout_s: For all of it.
        on_now: Called once, when `now` is printed, with the process ids by rank and the first process group.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *command], env=environment, text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command in commands
    ]  # fmt: skip
    lines: list[str] = []
    readers = [threading.Thread(target=lines.extend, args=(p.stdout,), daemon=True) for p in started]
    for reader in readers:
        reader.start()
    deadline, now = time.monotonic() + timeout_s, 0.0
    pids: dict[int, int] = {}
    while time.monotonic() < deadline:
        pids |= {int(r): int(p) for r, p in re.findall(r"rank (\d+) is (\d+)", "".join(lines))}
        if not now and "now\n" in "".join(lines):
            now = time.monotonic()
            if on_now is not None:
                on_now(pids, started[0].pid)
        if all(p.poll() is not None for p in started) and not any(map(_is_running, pids.values())):
            break
        time.sleep(0.05)
    seconds = time.monotonic() - (now or deadline)
    hung = [rank for rank, pid in pids.items() if _is_running(pid)]
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    codes = [process.wait() for process in started]
    for reader in readers:
        reader.join(timeout=5)
    return Ended("".join(lines), codes, seconds, hung)


def assert_all_ended(ended: Ended, *texts: str, within_s: float = 20.0, num_ranks: int = 2) -> None:
    """Every rank has ended by itself, soon, by an error; the output has every one of `texts`."""
    assert len(set(re.findall(r"rank (\d+) is", ended.output))) == num_ranks, ended.output
    assert not ended.hung, f"ranks {ended.hung} did not end:\n{ended.output}"
    assert all(code != 0 for code in ended.codes), f"{ended.codes}:\n{ended.output}"
    assert 0 < ended.seconds < within_s, f"{ended.seconds:.1f} s:\n{ended.output}"
    for text in texts:
        assert text in ended.output, f"{text!r} is not in\n{ended.output}"


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
