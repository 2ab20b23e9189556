"""After a step: the all-gathers that make whole parameters agree, so many elements at a time.

`allgather_bucket_size` is kept here: what is on its way at a time is no more, a larger bucket travels in
parts, and several small ones travel at once. Called by a sharded optimizer while it goes through its buckets.
"""

from __future__ import annotations

from collections import deque

from zero_strategy.bucket import Bucket
from zero_strategy.comm.collectives import Handle


class Publisher:
    """Starts gathers in the order of the buckets and waits for the oldest where there is no room for more."""

    def __init__(self, limit_numel: int) -> None:
        """Begin with nothing on its way.

        Args:
            limit_numel: Elements that may be on their way at a time, padding included; at least one a rank.
        """
        self._limit_numel = limit_numel
        self._under_way: deque[tuple[int, Handle]] = deque()
        self._numel = 0

    def start(self, bucket: Bucket) -> None:
        """Start publishing a bucket whose shard has changed. Collective."""
        shard_numel, num_shards = bucket.layout.shard_numel, bucket.layout.num_shards
        part_numel = max(1, min(shard_numel, self._limit_numel // num_shards))
        for start in range(0, shard_numel, part_numel):
            part = range(start, min(start + part_numel, shard_numel))
            if bucket.publishes:
                self._make_room(len(part) * num_shards)
            handle = bucket.start_publish(part)
            if handle is None:
                return
            self._under_way.append((len(part) * num_shards, handle))
            self._numel += len(part) * num_shards

    def wait(self) -> None:
        """Return when everything has arrived."""
        while self._under_way:
            self._wait_for_one()

    # -- helpers --

    def _make_room(self, numel: int) -> None:
        while self._under_way and self._numel + numel > self._limit_numel:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        numel, handle = self._under_way.popleft()
        self._numel -= numel
        handle.wait()
