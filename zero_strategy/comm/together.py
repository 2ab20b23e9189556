"""One rank's part of something that all ranks do, so that all of them raise if one fails.

Called by whatever writes or reads checkpoints and optimizer state. It must not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError, ZeroError

T = TypeVar("T")


def agreed(collectives: Collectives, work: Callable[[], T]) -> T:
    """Do this rank's part of something all ranks do; if any fails, all raise what it raised."""
    result, cause = _tried(work)
    _agree(collectives, cause)
    return result  # type: ignore[return-value]


def told_by_first(collectives: Collectives, work: Callable[[], T]) -> T:
    """Return on all ranks what rank 0's work comes to, a JSON value; if it fails, all raise that."""
    result, cause = _tried(work) if collectives.rank == 0 else (None, None)
    return _agree(collectives, cause, result)  # type: ignore[no-any-return]


def as_zero_error(raised: Exception) -> ZeroError:
    """Return an exception as one that can be told to other ranks: itself, or what it says."""
    if isinstance(raised, ZeroError):
        return raised
    why = "It was raised while state was written or read; the traceback above says where."
    fix = "If the error is not yours, please report it."
    if isinstance(raised, OSError):
        why, fix = "The file system refused.", "Check free space, permissions and the path."
    return CheckpointError(
        what=f"{type(raised).__name__}: {raised}",
        why=why,
        fix=f"A checkpoint that was there before still is. {fix}",
    )


# -- helpers --


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as raised:
        return None, raised


def _agree(collectives: Collectives, cause: Exception | None, word: Any = None) -> Any:
    try:
        return collectives.agree(None if cause is None else as_zero_error(cause), word)
    except ZeroError as everybodys:
        raise everybodys from cause
