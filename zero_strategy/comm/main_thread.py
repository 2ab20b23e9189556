"""Where the main thread stands: in somebody else's collective, and on which line of the user's code.

Lightning, torchmetrics and users call collectives of their own, on the default process group. They are not
announced to us, so the watch's thread looks at the stack of the main thread now and then; nothing is done on
the way of a collective. How many the group has begun torch counts itself, the same way on all ranks. Knows
nothing of what other ranks do.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist

from zero_strategy.comm.waits import Ticket, Waiting
from zero_strategy.compat import num_begun_by_default

_NAMES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "gather", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
_COLLECTIVES: dict[CodeType, str] = {
    inspect.unwrap(vars(dist)[name]).__code__: name for name in _NAMES if name in vars(dist)
}
_OURS = str(Path(__file__).resolve().parents[1])
_TORCH = str(Path(torch.__file__).resolve().parent)
_INSTALLED = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_NOT_THE_USERS = tuple(f"{folder}{os.sep}" for folder in (_OURS, _TORCH, *_INSTALLED))
_MOST_CHARS = 100  # of a line of code in a message


class MainThread:
    """Tells how long the main thread has stood in one collective of the default process group."""

    def __init__(self) -> None:
        self._last: Waiting | None = None

    def look(self) -> Waiting | None:
        """Return that collective as a wait, or None. To be called every now and then by another thread."""
        name = next((name for frame in _frames() if (name := _collective_in(frame)) is not None), None)
        begun = num_begun_by_default()
        if name is None or not begun:
            self._last = None
            return None
        # The engine's own waits have serials above 0.
        ticket, serial = Ticket("default", begun - 1, f"torch.distributed.{name}()"), -begun
        if self._last is None or (self._last.ticket, self._last.serial) != (ticket, serial):
            self._last = Waiting(ticket, time.monotonic(), serial)
        return self._last


def users_line() -> str:
    """Return the innermost line of the main thread that belongs to no installed package, or nothing."""
    for frame in _frames():
        path = frame.f_code.co_filename
        if not path.startswith(("<", *_NOT_THE_USERS)):
            code = linecache.getline(path, frame.f_lineno).strip()[:_MOST_CHARS]
            return f"{os.path.basename(path)}:{frame.f_lineno}{f': {code}' if code else ''}"
    return ""


def _frames() -> Iterator[FrameType]:
    """Go through the main thread's frames, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _collective_in(frame: FrameType) -> str | None:
    """Return the name of the collective a frame is the call of, if that is one of the default group."""
    name = _COLLECTIVES.get(frame.f_code)
    group = frame.f_locals.get("group") if name is not None else None
    return name if group is None or group is dist.group.WORLD else None
