"""One rank's part of something that all ranks do, so that all of them raise if one fails.

Called by whatever writes or reads checkpoints. It must not know what the work is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError, ZeroError

T = TypeVar("T")


def agreed(collectives: Collectives, work: Callable[[], T]) -> T:
    """Do this rank's part of something all ranks do; if any fails, all raise what it raised."""
    result: T | None = None
    error: ZeroError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except ZeroError as raised:
        error = cause = raised
    except OSError as raised:
        cause = raised
        error = CheckpointError(
            what=f"{type(raised).__name__}: {raised}",
            why="The file system refused.",
            fix="Check free space, permissions and the path. A checkpoint that was there before still is.",
        )
    except Exception as raised:
        cause = raised
        error = CheckpointError(
            what=f"{type(raised).__name__}: {raised}",
            why="It was raised while a checkpoint was written or read; the traceback above says where.",
            fix="A checkpoint that was there before still is. If the error is not yours, please report it.",
        )
    try:
        collectives.agree(error)
    except ZeroError as everybodys:
        raise everybodys from cause
    return result  # type: ignore[return-value]
