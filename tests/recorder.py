"""Watches an engine: which of its buckets are whole when, the order of their gathers; and what is logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zero_strategy as zs


class Recorder(logging.Handler):
    """Notes gathers ("+a"), resharding ("-a") and dropped gathers ("!a") of the units of `Routes`.

    Attributes:
        warnings: Log records of that level.
        most_whole: The most units that were whole or on their way at once, the root among them.
    """

    def __init__(self, engine: zs.ZeroEngine) -> None:
        super().__init__(logging.WARNING)
        self.events: list[str] = []
        self.warnings: list[str] = []
        self._whole: set[str] = set()
        self.most_whole: set[str] = set()
        for bucket in engine.buckets:
            unit = bucket.name.split(".")[-2] if bucket.name.startswith("units") else "root"
            for sign, method in (("+", "start_unshard"), ("-", "reshard"), ("!", "drop_gather")):
                setattr(bucket, method, partial(self._call, sign + unit, getattr(bucket, method)))
        logging.getLogger().addHandler(self)

    def _call(self, event: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.events.append(event)
        if event[0] == "+":
            self._whole.add(event[1:])
        else:
            self._whole.discard(event[1:])
        self.most_whole = max(self.most_whole, self._whole, key=len).copy()
        return method(*args, **kwargs)

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events


@contextmanager
def logged(level: int = logging.DEBUG) -> Iterator[list[str]]:
    """Collect every line the package logs on this rank, from a level on, while the block runs.

    What rank 0 says for all is on INFO there, and on DEBUG on the others.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("zero_strategy")
    former = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(former)


def assert_nothing_whole(engine: zs.ZeroEngine) -> None:
    """Require that no sharded bucket is whole or on its way."""
    whole = [bucket.name for bucket in engine.buckets if bucket.policy.shard_params and bucket.is_whole]
    held_bytes = engine.ledger.memory["unsharded"]
    assert not whole and not held_bytes, f"whole: {whole}, unsharded bytes: {held_bytes}"
