"""What ranks tell one another beside the training: values that one leaves and another finds.

For threads that work while the main thread trains, since those must begin no collective: the order of
collectives is the main thread's. Every rank has a box with its last letter in it; letters are told apart by
a name of what they are about, so an old one is never taken for an answer. Opened by the topology.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from zero_strategy.comm.words import Words
from zero_strategy.errors import ShardingError, ZeroError

CHUNK_CHARS = 4 * 2**20  # of a letter; torch's TCPStore takes values of 8 MiB at most
# A wait looks again after an eighth of the time it has lasted: it ends at most so much later than it could.
FIRST_POLL_S, LONGEST_POLL_S, POLL_SHARE = 0.02, 1.0, 1 / 8
PATIENCE_S = 1800.0  # what gloo waits in a collective; a rank that died on another machine leaves no trace


FindGone = Callable[[int, str], ZeroError | None]


class Letters:
    """The boxes of all ranks, as this rank uses them. For one thread at a time.

    Attributes:
        rank: This rank.
        world_size: How many there are.
    """

    def __init__(self, words: Words, rank: int, world_size: int, find_gone: FindGone) -> None:
        """Open this rank's box; all ranks must have before anybody waits for a letter.

        Args:
            words: A connection of its own: letters may be long.
            rank: This rank.
            world_size: How many there are.
            find_gone: Returns what has become of a rank that will never write, with a consequence in its
                text; None if it may yet.
        """
        self.rank = rank
        self.world_size = world_size
        self._words = words
        self._find_gone = find_gone
        words.write(f"letter/{rank}", "")

    def leave(self, about: str, value: Any) -> None:
        """Leave a JSON value in this rank's box, in the place of what lay there.

        Args:
            about: A name of what it is about; no spaces.
            value: Any JSON value.
        """
        text = json.dumps(value)
        starts = range(0, len(text), CHUNK_CHARS)
        for index, start in enumerate(starts):
            self._words.write(f"letter/{self.rank}/{index}", text[start : start + CHUNK_CHARS])
        self._words.write(f"letter/{self.rank}", f"{about} {len(starts)}")

    def wait_for(self, sender: int, about: str, is_cancelled: threading.Event) -> Any:
        """Return what another rank has left, as soon as it has.

        Args:
            sender: The other rank.
            about: The name of what it is about.
            is_cancelled: Ends the wait.

        Raises:
            ZeroError: The other rank is gone, or the store is, or the wait was cancelled or lasted too long.
        """
        began_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            # In this order: what a rank has left at the last moment is found after it has gone.
            gone = self._find_gone(sender, f"Rank {self.rank} waits for its word.")
            found = self._find(sender, about)
            if found is not None:
                return json.loads(found)
            if gone is not None:
                raise gone
            if self._words.is_lost:
                raise _is_lost(sender)
            pause_s = min(max(FIRST_POLL_S, waited_s * POLL_SHARE), LONGEST_POLL_S)
            if is_cancelled.wait(pause_s) or waited_s > PATIENCE_S:
                raise _silent(sender)

    def close(self) -> None:
        """Let go of the connection."""
        self._words.close()

    def _find(self, sender: int, about: str) -> str | None:
        """Return the text of a letter if it is there."""
        found, _, num_chunks = self._words.read(f"letter/{sender}").partition(" ")
        if found != about:
            return None
        return "".join(self._words.read(f"letter/{sender}/{index}") for index in range(int(num_chunks)))


def _is_lost(sender: int) -> ShardingError:
    return ShardingError(
        what=f"There is no way any more to hear from rank {sender}.",
        why="The store of the process group has gone with the process that held it, usually rank 0's.",
        fix="Find out why that process ended.",
    )


def _silent(sender: int) -> ShardingError:
    return ShardingError(
        what=f"Rank {sender} has left no word.",
        why=f"It had {PATIENCE_S:g} s, unless the wait was cancelled.",
        fix=f"Look at the output of rank {sender}.",
    )
