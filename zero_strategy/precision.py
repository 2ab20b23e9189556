"""Master weights: the fp32 copy of a 16-bit shard that the optimizer updates.

One `MasterShard` per trainable bucket, kept in `Masters`, which the engine owns. fp32 (and fp64) parameters
are their own master: the same class, no copy. Source: Micikevicius et al., arXiv:1710.03740, section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import has_masters
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.config import ZeroConfig
from zero_strategy.layout import ShardSlice


def unrounded(weight: Tensor, master: Tensor) -> Tensor:
    """Return, element by element, the master where it rounds to the weight, else the weight.

    The weight may have been written since it was rounded. A master that still rounds to it says the same,
    more precisely.

    Shapes:
        weight [...], master [...] -> [...] in the master's dtype
    """
    return torch.where(master.to(weight.dtype) == weight, master, weight.to(master.dtype))


class MasterShard:
    """What the optimizer updates of one bucket, slice by slice.

    Attributes:
        weights: [owned_numel] fp32 (the parameters' dtype where that is wider, or its own master).
        slices: One view of `weights` per slice of the bucket, in the bucket's order; the tensors that the
            optimizer's state is keyed by.
        is_copy: Whether they are fp32 copies of 16-bit parameters.
    """

    def __init__(self, bucket: Bucket, wide: Tensor | None, *, is_copy: bool) -> None:
        """Make the masters of a bucket.

        Args:
            bucket: The bucket.
            wide: [owned_numel] fp32, the values the shard was rounded from, if it was.
            is_copy: Whether they are fp32 copies; else the shard is its own master.
        """
        self._bucket = bucket
        self.is_copy = is_copy
        if wide is not None and self.is_copy:
            self.weights = wide
        else:
            self.weights = bucket.param_shard.float() if self.is_copy else bucket.param_shard
        self.slices = [self._slice(piece) for piece in bucket.slices]
        self._slices_of: dict[int, list[tuple[ShardSlice, Tensor]]] = {}
        for piece, weight in zip(bucket.slices, self.slices, strict=True):
            self._slices_of.setdefault(piece.param_index, []).append((piece, weight))
        self._weights_of = {index: [w for _, w in slices] for index, slices in self._slices_of.items()}

    def slices_of(self, index: int) -> list[tuple[ShardSlice, Tensor]]:
        """Return the slices of one of the bucket's parameters, each with its master weights."""
        return self._slices_of.get(index, [])

    def weights_of(self, index: int) -> list[Tensor]:
        """Return the master weights of one of the bucket's parameters, slice by slice."""
        return self._weights_of.get(index, [])

    def round_into_shard(self) -> None:
        """Write the masters, rounded to the nearest, into the parameter shard."""
        if self.is_copy:
            self._bucket.param_shard.copy_(self.weights)

    def take_from_shard(self) -> None:
        """Take the parameter shard's values, after somebody else has written them. See `unrounded`."""
        if self.is_copy:
            self.weights.copy_(unrounded(self._bucket.param_shard, self.weights))

    def _slice(self, piece: ShardSlice) -> Tensor:
        part = self.weights[piece.shard_start : piece.shard_start + piece.numel]
        # torch's optimizers keep 0-d state for a 0-d parameter, so its slice is 0-d too.
        return part.view(()) if self._bucket.layout.params[piece.param_index].shape == () else part

    def memory(self) -> MemoryUse:
        """Return the bytes of the copy, padding included and named."""
        if not self.is_copy:
            return MemoryUse()
        used_numel = sum(piece.numel for piece in self._bucket.slices)
        padding = (self.weights.numel() - used_numel) * self.weights.element_size()
        return MemoryUse(master=self.weights.nbytes, padding=padding)


class Masters:
    """The master weights of an engine, made when the first optimizer asks for a bucket's."""

    def __init__(self, config: ZeroConfig) -> None:
        self._config = config
        self._unrounded: dict[Bucket, Tensor] = {}
        self._shards: dict[Bucket, MasterShard] = {}

    def keep(self, bucket: Bucket, unrounded: Tensor) -> None:
        """Keep the values that a shard was rounded from until a master is made of them.

        Args:
            bucket: One that trains.
            unrounded: [owned_numel] fp32.
        """
        if self._is_copied(bucket):
            self._unrounded[bucket] = unrounded

    def of(self, bucket: Bucket) -> MasterShard:
        """Return the masters of a bucket."""
        if bucket not in self._shards:
            unrounded = self._unrounded.pop(bucket, None)
            self._shards[bucket] = MasterShard(bucket, unrounded, is_copy=self._is_copied(bucket))
        return self._shards[bucket]

    def existing(self, bucket: Bucket) -> MasterShard | None:
        """Return the masters of a bucket, if an optimizer has asked for them or its values were rounded."""
        return self.of(bucket) if bucket in self._unrounded else self._shards.get(bucket)

    def weights_of(self, bucket: Bucket) -> Tensor | None:
        """Return the master weights of a bucket, [owned_numel], if there are any."""
        shard = self.existing(bucket)
        return None if shard is None else shard.weights

    def take_params(self) -> None:
        """Take over the parameters' values after somebody else has written them."""
        for bucket in list(self._unrounded):
            self.of(bucket)
        for shard in self._shards.values():
            shard.take_from_shard()

    def follow_writes(self) -> None:
        """Take over what modules have written into their weights in place. See `unrounded`."""
        for bucket, shard in self._shards.items():
            if shard.is_copy and bucket.pop_written():
                shard.take_from_shard()

    def _is_copied(self, bucket: Bucket) -> bool:
        return has_masters(bucket.param_shard.dtype, self._config)

    def memory(self) -> MemoryUse:
        """Return the bytes held, padding included and named."""
        use = MemoryUse()
        for shard in self._shards.values():
            use.add(shard.memory())
        use.master += sum(values.nbytes for values in self._unrounded.values())
        return use
