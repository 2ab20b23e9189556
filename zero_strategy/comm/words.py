"""Where ranks leave word for one another: the store of the process group, used by two threads, and mortal.

The store is gone with the process that held it, usually rank 0's; from then on nothing is read and what is
written reaches nobody. Owned by the watch, which knows what the words mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from zero_strategy.compat import RankStore

_T = TypeVar("_T")


class Words:
    """Short texts by key, the same for all ranks.

    Attributes:
        is_lost: Whether the store has gone with the process that held it.
    """

    def __init__(self, store: RankStore | None) -> None:
        """Begin.

        Args:
            store: Of this rank's watch alone; None if there is nobody else.
        """
        self.is_lost = False
        self._store = store
        self._lock = threading.Lock()  # used by the watch's thread and by who fails

    @property
    def are_kept(self) -> bool:
        """Whether there is a store, lost or not: other ranks to leave word for."""
        return self._store is not None

    def read(self, key: str) -> str:
        """Return the word under a key; nothing if the store is gone."""
        return (self._ask(lambda store: store.get(key)) or b"").decode()

    def write(self, key: str, word: str) -> None:
        """Leave a word."""
        self._ask(lambda store: store.set(key, word))

    def replace(self, key: str, expected: str, word: str) -> None:
        """Leave a word where there is the expected one, in one operation; '' stands for none."""
        self._ask(lambda store: store.compare_set(key, expected, word))

    def close(self) -> None:
        """Let go of the store."""
        self._store = None

    def _ask(self, request: Callable[[RankStore], _T]) -> _T | None:
        store = self._store
        if store is None or self.is_lost:
            return None
        try:
            with self._lock:
                return request(store)
        except RuntimeError:
            self.is_lost = True
            return None
