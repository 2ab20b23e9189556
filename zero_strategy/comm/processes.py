"""Whether the process of another rank on this machine is dead: known for sure or not at all.

A process is named by machine, process namespace, id and start, so that no id used anew is taken for it.
Elsewhere than on Linux, and of ranks on other machines, nothing is known and nothing is concluded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_PROC = Path("/proc")


def own_process() -> list[str]:
    """Return what names this process; empty where it cannot be told."""
    pid = os.getpid()
    try:
        machine = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return []
    state_and_start = _state_and_start(pid)
    return [machine, namespace, str(pid), state_and_start[1]] if state_and_start is not None else []


def is_dead(process: Sequence[str]) -> bool:
    """Tell whether the process that `own_process` has named is known to have ended.

    Args:
        process: What it returned there.
    """
    here = own_process()
    if not here or not process or list(process[:2]) != here[:2]:
        return False
    found = _state_and_start(int(process[2]))
    # A zombie has ended and waits for its parent to take note.
    return found is None or found[0] in "ZX" or found[1] != process[3]


def _state_and_start(pid: int) -> tuple[str, str] | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], fields[19]
