"""How a run ends before its time: exceptions, SIGTERM and Ctrl-C, on all ranks together.

`reporting` wraps the launcher's `launch`, the one call all errors of a run pass through, before any callback
of Lightning's hears of them: what fails here is told to the other ranks, what failed there replaces the
broken connection it shows as here. `SignalStops` takes the place of Lightning's signal handlers, of which the
one for SIGTERM begins a collective at whatever moment the signal comes. Knows neither hooks nor checkpoints.

[Note: Stopping together]
The first SIGTERM or Ctrl-C in a `fit` only makes a note, on whichever rank. All ranks know of it at the end
of a backward and raise it at their next step, where nothing is under way: callbacks that save on an
exception then find all ranks there. A second one is raised at once; so is the first where no backward would
come (validate, test, predict). A rank that does not get to a backward within `STOP_S`, because it waits or
computes on, is ended by the watch, and with it the others.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch.distributed as dist

from zero_strategy.comm.stops import StopRequest
from zero_strategy.comm.watch import Watch
from zero_strategy.errors import ConfigError, first_line
from zero_strategy.log import log_event

STOP_S = 6.0  # leaves the watch time to end all ranks within 20 s of the signal
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalStops:
    """Turns signals into stops that all ranks make together. See [Note: Stopping together]."""

    def __init__(self, namespace: str) -> None:
        """Note the handlers a script has installed: Lightning has not installed its own yet.

        Args:
            namespace: The Lightning package whose SIGTERMException is raised.
        """
        exceptions = importlib.import_module(f"{namespace}.utilities.exceptions")
        self._sigterm_error: type[BaseException] = exceptions.SIGTERMException
        self._stop: StopRequest | None = None
        self._watch: Watch | None = None
        self._former: dict[int, Any] = {}
        self._of_user: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        self._former_fd = -1
        self._pipe: tuple[socket.socket, socket.socket] | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self.raised: BaseException | None = None  # by all ranks together

    def install(self, stop: StopRequest | None, watch: Watch) -> None:
        """Take the place of Lightning's handlers.

        Args:
            stop: Carries a request to the other ranks; None in a run without backwards.
            watch: Ends all ranks if no backward comes.
        """
        self._stop, self._watch = stop, watch
        if self._pipe is not None or threading.current_thread() is not threading.main_thread():
            return
        self.raised = None
        self._is_over.clear()
        self._pipe = socket.socketpair()
        for end in self._pipe:
            end.setblocking(end is self._pipe[0])
        # A handler waits until Python code runs again on the main thread; this does not.
        self._former_fd = signal.set_wakeup_fd(self._pipe[1].fileno(), warn_on_full_buffer=False)
        self._former = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._thread = threading.Thread(
            target=self._listen, args=self._pipe[:1], name="zero_strategy.signals", daemon=True
        )
        self._thread.start()

    def remove(self) -> None:
        """Put the former handlers back. Safe to call twice."""
        if self._pipe is None:
            return
        self._is_over.set()
        for number, handler in self._former.items():
            if signal.getsignal(number) == self._on_signal:  # Lightning ignores Ctrl-C while it shuts down
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._pipe[1].close()
        self._pipe = None
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def raise_agreed(self) -> None:
        """Raise what a rank was asked if all know of it. To be called at the same point on all ranks."""
        number = self._stop.take() if self._stop is not None else 0
        if number:
            self._is_over.set()
            self.raised = self._error(number)
            raise self.raised

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        of_user = self._of_user.get(number)
        if number == signal.SIGTERM and callable(of_user):
            of_user(number, frame)
        stop = self._stop
        if stop is None or stop.asked:
            raise self._error(number)
        stop.asked = number
        log_event(f"Received {signal.Signals(number).name}: all ranks stop after the backward that runs now.")

    def _error(self, number: int) -> BaseException:
        # Stock Lightning ends with code 0 on SIGTERM; a shell calls it 143.
        return KeyboardInterrupt() if number == signal.SIGINT else self._sigterm_error(128 + number)

    def _listen(self, pipe: socket.socket) -> None:
        main = threading.main_thread().ident
        assert main is not None, "it runs"
        with pipe:
            while received := pipe.recv(1):
                if received[0] in _SIGNALS and not self._is_over.wait(STOP_S):
                    name = signal.Signals(received[0]).name
                    assert self._watch is not None, "installed"
                    self._watch.give_up(
                        f"It received {name}, and no backward has ended within {STOP_S:g} s after that."
                    )
                    signal.pthread_kill(main, received[0])  # also out of a sleep


def reporting(
    launcher: Any, watches: Callable[[], list[Watch]], is_agreed: Callable[[BaseException], bool]
) -> None:
    """Have a launcher report what ends the function it launches.

    Args:
        launcher: Lightning's, for processes that are started by command.
        watches: Returns what to report to.
        is_agreed: Whether an exception is one that all ranks raise together.
    """
    launcher.launch = partial(_launch, launcher, launcher.launch, watches, is_agreed)


def refuse_port(error: Exception) -> ConfigError:
    """Return what to raise when the ranks cannot meet because of their port, or the network."""
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return ConfigError(
        what=f"The ranks cannot meet at {place} (MASTER_ADDR:MASTER_PORT): {first_line(error)}",
        why="Rank 0 listens there for the others. A port belongs to one program, such as another job.",
        fix="Unset MASTER_PORT, and a free port is chosen (on one machine), or set it to another one.",
    )


def _launch(
    launcher: Any,
    launch: Callable[..., Any],
    watches: Callable[[], list[Watch]],
    is_agreed: Callable[[BaseException], bool],
    function: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    for watch in watches():
        watch.forgive()
    try:
        return launch(function, *args, **kwargs)
    except BaseException as error:
        if not dist.is_initialized():
            launcher.kill(signal.SIGTERM)  # the ranks it has started wait for one that will never come
        if not is_agreed(error):
            for watch in watches():
                cause = watch.fail_or_explain(error)
                if cause is not None and cause is not error:
                    raise cause from error
        raise
