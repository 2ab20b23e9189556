"""Which stored pieces this rank compares the checksums of, before anything of a checkpoint is taken over.

The ranks share the pieces, so that each is compared once, and nobody overwrites anything before all have said
that theirs are whole. A piece is compared by one of the ranks that need some of it, which then reads that out
of its machine's memory. Called by `opened`; it reads no data.
"""

from __future__ import annotations

from typing import NamedTuple

from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.parts import Parts
from zero_strategy.checkpoint.records import Piece, TensorEntry, param_of
from zero_strategy.layout import nth_part


class Stored(NamedTuple):
    """One piece of a stored tensor."""

    entry: TensorEntry
    piece: Piece

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.piece.numel * self.entry.torch_dtype.itemsize


class _Range(NamedTuple):
    """Elements [start, stop) of a parameter, or more, that lie in the shard of a rank now."""

    start: int
    stop: int
    rank: int


def pieces_to_compare(parts: Parts, manifest: Manifest, kinds: tuple[str, ...]) -> list[Stored]:
    """Return this rank's share of the pieces.

    Args:
        parts: The engine.
        manifest: Of the checkpoint.
        kinds: How the names of the tensors begin that may be loaded.

    Returns:
        Over all ranks every piece that holds anything, once.
    """
    rank, world_size = parts.collectives.rank, parts.collectives.world_size
    numels = {spec.fqn: spec.numel for bucket in parts.buckets for spec in bucket.layout.params}
    ranges = _ranges_of_ranks(parts)
    given_bytes = [0] * world_size
    share: list[Stored] = []
    anybodys: list[Stored] = []
    for entry in _in_order(manifest, kinds):
        fqn = param_of(entry.name) or ""
        for stored in (Stored(entry, piece) for piece in entry.pieces if piece.numel):
            if numels.get(fqn) != entry.numel:  # buffers, step counts, extra state, what has no place here
                anybodys.append(stored)
                continue
            chosen = min(_needed_by(stored.piece, ranges[fqn]), key=lambda rank: given_bytes[rank])
            given_bytes[chosen] += stored.num_bytes
            if chosen == rank:
                share.append(stored)
    anybodys.sort(key=lambda stored: (stored.piece.file, stored.piece.key, stored.piece.file_start))
    return share + list(nth_part(anybodys, [stored.num_bytes for stored in anybodys], rank, world_size))


def _in_order(manifest: Manifest, kinds: tuple[str, ...]) -> list[TensorEntry]:
    """Return the entries as all ranks list them."""
    return [manifest.tensors[name] for name in sorted(manifest.tensors) if name.startswith(kinds)]


def _ranges_of_ranks(parts: Parts) -> dict[str, list[_Range]]:
    """Return whose shards each parameter lies in, also where every rank holds all of it."""
    ranges: dict[str, list[_Range]] = {}
    for layout in (bucket.layout for bucket in parts.buckets):
        size = layout.shard_numel
        for spec in layout.params:
            if not spec.numel:  # lies in no shard, and a bucket of nothing else has none
                continue
            ranks = range(spec.start // size, (spec.start + spec.numel - 1) // size + 1)
            ranges[spec.fqn] = [_Range(r * size - spec.start, (r + 1) * size - spec.start, r) for r in ranks]
    return ranges


def _needed_by(piece: Piece, ranges: list[_Range]) -> list[int]:
    return [there.rank for there in ranges if there.start < piece.stop and piece.start < there.stop]
