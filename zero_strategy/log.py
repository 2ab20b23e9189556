"""Logging and profiler spans.

Owns the logger `zero_strategy`, its rule (rank 0 speaks at info level, other ranks at debug level), and
`span`, which labels a phase in profiles. Called by every module. Must not know any of them, and must not
call a collective: a line of log is never a reason to wait.
"""

from __future__ import annotations

import functools
import logging
import os
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

LOGGER = logging.getLogger("zero_strategy")
_NO_SPAN: AbstractContextManager[object] = nullcontext()  # holds no state, so one serves all


def get_rank() -> int:
    """Return this process's rank, also before there is a process group (from the launcher's environment)."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


def get_launched_world_size() -> int:
    """Return how many processes the launcher says it has started, 1 if there was none."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def log_event(message: str) -> None:
    """Log one event: at info level on rank 0, at debug level on the others.

    Where nobody configured logging, Python drops info lines; rank 0 then writes them to stderr, so that what
    the config says is seen. `logging.getLogger("zero_strategy").setLevel(logging.WARNING)` silences them.

    Args:
        message: One line (or a table), with units.
    """
    level = logging.INFO if get_rank() == 0 else logging.DEBUG
    is_silenced = LOGGER.level > level or not LOGGER.manager.disable < level
    if level == logging.INFO and not LOGGER.hasHandlers() and not is_silenced:
        logging.StreamHandler().handle(LOGGER.makeRecord(LOGGER.name, level, __file__, 0, message, (), None))
        return
    LOGGER.log(level, "%s", message)


@functools.cache
def log_once(message: str) -> None:
    """Log an event the first time this process meets this very message.

    Args:
        message: As for `log_event`. `log_once.cache_clear()` forgets what was said.
    """
    log_event(message)


def span(name: str, detail: str = "") -> AbstractContextManager[object]:
    """Label a block of code in profiles: `with span("ZeRO::unshard", bucket.name): ...`.

    Costs a flag test when no profiler runs.

    Args:
        name: The phase, beginning with `ZeRO::`.
        detail: What it works on, usually a bucket's name.

    Returns:
        A context manager.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NO_SPAN
    return torch.profiler.record_function(f"{name} {detail}" if detail else name)
