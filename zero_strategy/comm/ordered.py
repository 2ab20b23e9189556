"""Collectives built from gloo's simplest pieces, with the bytes of theory and one order of additions.

torch's reduce-scatter on gloo is an all-reduce of a copy and sends twice what is needed; its ring adds in an
order that depends on where an element lies. Here every rank sends each other rank its part once, and adds
what it receives in rank order: (N-1)/N of the buffer per rank, and a sum that does not depend on bucket or
position.

Called by `Collectives` only; the functions have no state. A group of None means that there is nobody else.

[Note: Messages have names]
Every message carries a tag made of its bucket's name. Ranks that have parted and send different buckets then
wait for one another, which the watch finds and reports. Without, gloo would take one bucket for the other,
and end the process where their sizes differ.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

SUM_CHUNK_NUMEL = 1 << 17  # elements summed at a time on the host: a sum stays in the L2 cache, calls are few


class ReceiveBuffer:
    """Host memory that reductions receive into, kept from one reduction of a backward to the next.

    The first touch of fresh pages costs more than the exchange itself (recipes/benchmarks/README.md), and an
    allocation of this size gets fresh pages every time. Device memory is not kept: its allocator recycles.

    Attributes:
        held_bytes: Bytes that exist now, in use or kept.
    """

    def __init__(self) -> None:
        self._kept: Tensor | None = None  # [n] uint8
        self.held_bytes = 0

    def take(self, full: Tensor) -> Tensor:
        """Return memory for the versions of all ranks; what is under way already keeps its own.

        Shapes:
            full [padded_numel] -> [padded_numel], same dtype, uninitialised
        """
        needed_bytes = full.nbytes
        raw, self._kept = self._kept, None
        if raw is not None and (raw.numel() < needed_bytes or raw.device != full.device):
            self.held_bytes -= raw.numel()
            raw = None
        if raw is None:
            raw = torch.empty(needed_bytes, dtype=torch.uint8, device=full.device)
            self.held_bytes += needed_bytes
        return raw[:needed_bytes].view(full.dtype)

    def give_back(self, received: Tensor) -> None:
        """Take memory back when its reduction has finished."""
        raw = torch.empty(0, dtype=torch.uint8, device=received.device).set_(received.untyped_storage())
        if self._kept is None and received.device.type == "cpu":
            self._kept = raw
        else:
            self.held_bytes -= raw.numel()

    def drop(self) -> None:
        """Let go of what is kept."""
        if self._kept is not None:
            self.held_bytes -= self._kept.numel()
            self._kept = None


def as_bytes(flat: Tensor) -> Tensor:
    """Return the same memory as bytes: what is only moved may have a dtype that backends do not know.

    Shapes:
        flat [n], any dtype -> [n * itemsize] uint8
    """
    return flat.view(torch.uint8)


def start_all_gather(
    flat: Tensor, part: range, name: str, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start sending this rank's range of `flat`, or a part of it, to each other rank, and receiving theirs.

    Together that is what an all-gather sends: (N-1)/N of `flat` per rank. See [Note: Messages have names].

    Shapes:
        flat [N * shard_numel]; this rank's range is filled in, of the others the part is written.
    """
    if group is None:
        return []
    shards = [as_bytes(shard[part.start : part.stop]) for shard in flat.chunk(group.size())]
    if flat.device.type != "cpu":  # gloo sends and receives host memory only, but broadcasts any
        works = [dist.broadcast(shard, src=r, group=group, async_op=True) for r, shard in enumerate(shards)]
        return [work for work in works if work is not None]
    own = shards[group.rank()]
    return _start_messages([own] * len(shards), shards, name, group)


def start_gather(
    whole: Tensor | None, own: Tensor, name: str, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start sending this rank's range to rank 0, or on rank 0 receiving those of all others.

    On the host not by torch's gather, which receives into a copy of the whole. See [Note: Messages have
    names].

    Shapes:
        own [shard_numel] -> whole [N * shard_numel] on rank 0, whose own range is left alone; else None
    """
    if group is None:
        return []
    shards = [] if whole is None else [as_bytes(shard) for shard in whole.chunk(group.size())]
    if own.device.type != "cpu":
        work = dist.gather(as_bytes(own), shards or None, group=group, group_dst=0, async_op=True)
        return [] if work is None else [work]
    tag = _tag_of(name)
    if whole is None:
        works = [dist.isend(as_bytes(own), group=group, group_dst=0, tag=tag)]
    else:
        works = [
            dist.irecv(shard, group=group, group_src=peer, tag=tag)
            for peer, shard in enumerate(shards)
            if peer != 0
        ]
    return [work for work in works if work is not None]


def start_exchange(
    full: Tensor, received: Tensor, name: str, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    """Start sending each rank its range of `full`, and receiving the others' versions of this rank's range.

    Shapes:
        full [N * shard_numel] -> received [N * shard_numel], the version of rank r at range r; this rank's
        own version stays in `full`, and whether it is copied is not defined.
    """
    if group is None:
        return []
    if full.device.type != "cpu":  # gloo sends and receives host memory only, but exchanges any
        return [dist.all_to_all_single(received, full, group=group, async_op=True)]
    world_size = group.size()
    return _start_messages(full.chunk(world_size), received.chunk(world_size), name, group)


def _start_messages(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], name: str, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start sending every other rank one tensor of `ours` and receiving one of `theirs`, both by rank."""
    tag = _tag_of(name)
    works: list[dist.Work | None] = []
    for peer, (sent, received) in enumerate(zip(ours, theirs, strict=True)):
        if peer != group.rank():
            works.append(dist.irecv(received, group=group, group_src=peer, tag=tag))
            works.append(dist.isend(sent, group=group, group_dst=peer, tag=tag))
    return [work for work in works if work is not None]


def _tag_of(name: str) -> int:
    return zlib.crc32(name.encode()) & 0x7FFFFFFF  # a tag is not negative


def mean_in_rank_order(full: Tensor, received: Tensor, output: Tensor, *, rank: int, divisor: float) -> None:
    """Write the mean of all versions: summed in rank order in fp32 (fp64 for fp64), divided, rounded once.

    Shapes:
        full [N * shard_numel], of which this rank's range is its own version, and received [N * shard_numel]
        with the others' -> output [shard_numel], any floating dtype; may be this rank's range of `full`.
    """
    numel = output.numel()
    if not numel:
        return
    versions = list(received.split(numel))
    versions[rank] = full[rank * numel : (rank + 1) * numel]
    sum_dtype = torch.float64 if full.dtype == torch.float64 else torch.float32
    # A device has no use for chunks: each would be a handful of launches.
    chunk_numel = min(SUM_CHUNK_NUMEL, numel) if output.device.type == "cpu" else numel
    scratch = torch.empty(chunk_numel, dtype=sum_dtype, device=output.device)
    chunks = (version.split(chunk_numel) for version in versions)
    for target, first, *others in zip(output.split(chunk_numel), *chunks, strict=True):
        # Summed beside the output, which may be one of the versions.
        total = scratch[: target.numel()]
        if others and first.dtype == sum_dtype:
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for version in others:
            total.add_(version)
        torch.div(total, divisor, out=target)
