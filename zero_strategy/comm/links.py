"""The connections behind process groups, and how to cut them: the way out of a collective that never ends.

torch has no call that gets a thread out of a collective on gloo: `abort` does nothing there, and a timeout
ends it after half an hour. Closing the connection does: the collective raises at once, as it does when the
other process has died. Which connections belong to a group is known by what its construction has opened.
Backends that do have an `abort` (NCCL) get it called. Called by the topology and by the watch's thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

_OPEN_FILES = Path("/proc/self/fd")  # Linux; elsewhere nothing is found and nothing cut


class Links:
    """What has been opened between construction and `note`, to be cut when a rank has failed."""

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._opened: dict[int, str] = {}
        self._groups: list[dist.ProcessGroup] = []

    def note(self, groups: Sequence[dist.ProcessGroup], native: bool) -> None:
        """Note that these groups have been made, and nothing else was since construction.

        Args:
            groups: The groups.
            native: Whether their backend has an `abort` that works.
        """
        now = _open_sockets()
        self._opened = {fd: name for fd, name in now.items() if self._before.get(fd) != name}
        self._groups = list(groups) if native else []

    def cut(self) -> None:
        """End every collective that is under way on the groups, here and on the other ranks."""
        for group in self._groups:
            with contextlib.suppress(RuntimeError):
                group.abort()
        for fd, name in self._opened.items():
            if _name_of(fd) == name:
                _shut_down(fd)


def _open_sockets() -> dict[int, str]:
    try:
        fds = [int(entry) for entry in os.listdir(_OPEN_FILES)]
    except OSError:
        return {}
    return {fd: name for fd in fds if (name := _name_of(fd)).startswith("socket:")}


def _name_of(fd: int) -> str:
    try:
        return os.readlink(_OPEN_FILES / str(fd))
    except OSError:
        return ""


def _shut_down(fd: int) -> None:
    connection = socket.socket(fileno=fd)
    try:
        # A listening socket has no peer; gloo ends the process if it is shut down.
        with contextlib.suppress(OSError):
            connection.getpeername()
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
    finally:
        connection.detach()  # gloo closes it
