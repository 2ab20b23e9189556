"""Averages of the master weights, on shards: the bytes and the arithmetic, slice by slice.

`AverageShards` is to an average what `MasterShard` is to the masters. Made and driven by `ema.ShardedEMA`;
the checkpoint reads and writes it. Updating needs no other rank. It must not know the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.errors import ShardingError
from zero_strategy.precision import Masters

CHUNK_NUMEL = 1 << 22  # elements worked on at a time: temporaries stay at 16 MiB


class AverageShards:
    """One average of what this rank's optimizers train.

    Attributes:
        num_updates: How many weights have gone into it; 0: there is none yet.
        shards: [owned_numel] by bucket, in the masters' dtype. While `is_in_place`, the weights' own values.
        is_in_place: Whether the model's weights are the average at this moment.
    """

    def __init__(self) -> None:
        self.num_updates = 0
        self.shards: dict[Bucket, Tensor] = {}
        self.is_in_place = False
        self._rounded: dict[Bucket, Tensor] = {}  # 16-bit shards as they were, while the average is in place

    def start(self, buckets: Iterable[Bucket], masters: Masters, *, untrained: bool = False) -> None:
        """Let the average of buckets that have none begin at their weights. No communication.

        Args:
            buckets: The engine's; of frozen ones there is none, their average being what they are.
            masters: What is averaged.
            untrained: Also of buckets that no optimizer trains, as where an average is only evaluated.
        """
        for bucket in buckets:
            find = masters.of if untrained else masters.existing
            master = find(bucket) if bucket.trainable else None
            if master is not None and bucket not in self.shards:
                with torch.inference_mode(False):
                    self.shards[bucket] = master.weights.detach().clone()

    def update(self, buckets: Iterable[Bucket], masters: Masters, decay: float) -> None:
        """Take the weights as they are now into the average; the first time they are the average.

        The order of roundings is that of torch's `get_ema_avg_fn`. No communication.

        Args:
            buckets: The engine's.
            masters: What is averaged.
            decay: Weight of the average so far; the present weights get the rest.

        Shapes:
            average, weights [owned_numel], any part of them: average * decay + weights * (1 - decay)
        """
        begun = list(self.shards.items()) if self.num_updates else []
        if not begun:
            self.shards.clear()
        for bucket, average in begun:
            for mean, weights in _chunks(average, masters.of(bucket).weights):
                mean.mul_(decay).add_(weights * (1 - decay))
        self.start(buckets, masters)
        self.num_updates += 1

    def exchange(self, masters: Masters) -> None:
        """Put the average where the weights are and the other way round; twice gives back every bit.

        The shards alone are written: whole parameters must be published afterwards.
        """
        for bucket, average in self.shards.items():
            master = masters.of(bucket)
            if master.weights is not bucket.param_shard and not self.is_in_place:
                self._rounded[bucket] = bucket.param_shard.clone()
            for held, weights in _chunks(average, master.weights):
                kept = weights.clone()
                weights.copy_(held)
                held.copy_(kept)
            if bucket in self._rounded and self.is_in_place:
                bucket.param_shard.copy_(self._rounded.pop(bucket))
            else:
                master.round_into_shard()
        self.is_in_place = not self.is_in_place

    def slices(self, bucket: Bucket) -> Tensor | None:
        """Return a bucket's averages, [owned_numel]; None if it has none."""
        return self.shards.get(bucket)

    def memory(self) -> MemoryUse:
        """Return the bytes held, padding included and named."""
        use = MemoryUse()
        for bucket, average in self.shards.items():
            used_numel = sum(piece.numel for piece in bucket.slices)
            use.averages += average.nbytes
            use.padding += (average.numel() - used_numel) * average.element_size()
        use.averages += sum(shard.nbytes for shard in self._rounded.values())
        return use


class Averages:
    """All averages of an engine.

    Attributes:
        all: In the order in which they were begun, which is how a checkpoint tells them apart.
    """

    def __init__(self, masters: Masters) -> None:
        self._masters = masters
        self.all: list[AverageShards] = []

    def exchange(self, old: Bucket, new: Sequence[tuple[Bucket, object]]) -> None:
        """Follow parameters that were frozen and begin to be trained: until now each was its own average."""
        for average in self.all:
            if average.num_updates:
                average.start([bucket for bucket, _ in new], self._masters, untrained=True)

    def require_out(self) -> None:
        """Refuse to train, save or load weights while an average is in their place, which it is on all ranks.

        Raises:
            ShardingError: One is.
        """
        if not any(average.is_in_place for average in self.all):
            return
        raise ShardingError(
            what="The weights are an average at this moment, not what is trained.",
            why="A step would train the average, and a checkpoint would hold it in the place of the weights.",
            fix="Call swap_out() on the ShardedEMA first, on all ranks (an exception inside `swapped()` "
            "leaves the average in place, since it may have met one rank only). Its full_state_dict() "
            "exports the average.",
        )

    def memory(self) -> MemoryUse:
        """Return the bytes held, padding included and named."""
        use = MemoryUse()
        for average in self.all:
            use.add(average.memory())
        return use


def _chunks(first: Tensor, second: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(first.split(CHUNK_NUMEL), second.split(CHUNK_NUMEL), strict=True)
