"""Where every parameter lies in a flat buffer, and which part of it belongs to which rank: integers only.

`BucketLayout.build` is the one place that decides boundaries. Buckets, optimizers and checkpoints ask it and
never compute an offset themselves. It knows names, shapes and sizes; it has never seen a tensor.

[Note: Alignment]
Every shard ends at a multiple of 16 elements and of 64 bytes, and every parameter starts at one of 256 bytes.
Matrix kernels give other bits on operands that are not aligned, and vectorised optimizers treat the elements
of a vector's tail differently, so an unaligned cut would make the numbers depend on the world size. The room
between is declared as padding and counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

ALIGN_NUMEL = 16  # elements: the widest vector a fused optimizer uses (16 fp32 lanes of AVX-512)
ALIGN_BYTES = 64  # bytes: a cache line, and the alignment of torch's own CPU allocations
START_BYTES = 256  # bytes: up to here cuBLAS chooses its kernel by an operand's alignment

T = TypeVar("T")


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a bucket.

    Attributes:
        fqn: Fully qualified name; of a tied parameter, the first of its names.
        shape: Shape of the whole parameter.
        numel: Its number of elements.
        start: Its first element in the flat buffer.
    """

    fqn: str
    shape: tuple[int, ...]
    numel: int
    start: int


@dataclass(frozen=True)
class ShardSlice:
    """The part of one parameter that lies inside one shard.

    Attributes:
        param_index: Which parameter of the bucket.
        param_start: First element within the flattened parameter.
        shard_start: First element within the shard.
        numel: Number of elements.
    """

    param_index: int
    param_start: int
    shard_start: int
    numel: int


class OwnPart(NamedTuple):
    """What a rank owns of a bucket: updates, and keeps the optimizer's state of.

    Attributes:
        elements: Of the whole flat buffer.
        slices: Of the parameters, `shard_start` counted from the first of `elements`.
    """

    elements: range
    slices: tuple[ShardSlice, ...]


@dataclass(frozen=True)
class BucketLayout:
    """An immutable description of one flat buffer cut into equal shards.

    Attributes:
        params: The parameters in the order in which they lie.
        num_shards: Number of shards the buffer is cut into (the world size).
        padded_numel: Elements of the whole flat buffer, padding included.
        align_numel: Elements every start and every shard end is a multiple of.
    """

    params: tuple[ParamSpec, ...]
    num_shards: int
    padded_numel: int
    align_numel: int

    @staticmethod
    def build(
        names_and_shapes: Sequence[tuple[str, tuple[int, ...]]], num_shards: int, itemsize: int
    ) -> BucketLayout:
        """Lay parameters out one after the other and cut the result into `num_shards` equal, aligned shards.

        Args:
            names_and_shapes: FQN and shape of each parameter, in order.
            num_shards: World size of the shard group.
            itemsize: Bytes of one element of the parameters' dtype.

        Returns:
            The layout. An empty parameter takes no room and has no slice.
        """
        align_numel = max(ALIGN_NUMEL, ALIGN_BYTES // itemsize)
        params: list[ParamSpec] = []
        end = 0
        for fqn, shape in names_and_shapes:
            numel = _product(shape)
            params.append(ParamSpec(fqn, shape, numel, end))
            end += round_up(numel, max(align_numel, START_BYTES // itemsize))
        padded_numel = round_up(end, align_numel * num_shards)
        return BucketLayout(tuple(params), num_shards, padded_numel, align_numel)

    @property
    def shard_numel(self) -> int:
        """Elements of one shard."""
        return self.padded_numel // self.num_shards

    @property
    def numel(self) -> int:
        """Elements of the parameters alone."""
        return sum(param.numel for param in self.params)

    @property
    def padding_numel(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.padded_numel - self.numel

    def gaps(self) -> list[tuple[int, int]]:
        """Return the padding as (first element, number of elements), in order."""
        gaps = []
        end = 0
        for param in self.params:
            if param.start > end:
                gaps.append((end, param.start - end))
            end = param.start + param.numel
        if self.padded_numel > end:
            gaps.append((end, self.padded_numel - end))
        return gaps

    def own_part(self, rank: int, *, is_cut: bool) -> OwnPart:
        """Return what a rank owns.

        Args:
            rank: The rank.
            is_cut: Whether it owns its shard only; else everything, where the optimizer state is whole.
        """
        first, count = (rank, 1) if is_cut else (0, self.num_shards)
        elements = range(first * self.shard_numel, (first + count) * self.shard_numel)
        return OwnPart(elements, self.slices(first, count))

    def slices(self, first_shard: int, num_shards: int = 1) -> tuple[ShardSlice, ...]:
        """Return the parts of the parameters that lie in `num_shards` neighbouring shards.

        Args:
            first_shard: Index of the first shard; `shard_start` counts from its first element.
            num_shards: How many shards; all of them, where the optimizer state is whole (stage 0).
        """
        begin = first_shard * self.shard_numel
        end = begin + num_shards * self.shard_numel
        slices = []
        for index, param in enumerate(self.params):
            low = max(begin, param.start)
            high = min(end, param.start + param.numel)
            if low < high:
                slices.append(ShardSlice(index, low - param.start, low - begin, high - low))
        return tuple(slices)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def _product(shape: tuple[int, ...]) -> int:
    numel = 1
    for size in shape:
        numel *= size
    return numel


def nth_part(items: Sequence[T], sizes: Sequence[int], rank: int, world_size: int) -> Iterator[T]:
    """Yield a rank's part of some items: neighbours, that have as many bytes as any other rank's.

    Args:
        items: The same on all ranks.
        sizes: Of each, in bytes; one of no bytes may be nobody's.
        rank: This one.
        world_size: How many there are.

    Yields:
        Items that no other rank is given.
    """
    total_bytes, before_bytes = max(1, sum(sizes)), 0
    for item, num_bytes in zip(items, sizes, strict=True):
        if before_bytes * world_size // total_bytes == rank:
            yield item
        before_bytes += num_bytes
