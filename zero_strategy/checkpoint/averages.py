"""Averages of the weights in a checkpoint folder: each rank's range of each, like the weights' own.

Called by whoever saves and loads the rest. An average is found again by its position among the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.parts import Parts, own_pieces
from zero_strategy.checkpoint.records import average_tensor_name
from zero_strategy.log import log_event


def runs_of(parts: Parts) -> Iterator[tuple[str, tuple[int, ...], int, Tensor]]:
    """Yield what this rank stores of the averages.

    Args:
        parts: The engine.

    Yields:
        The tensor's name and shape, the first element of the run, and its values, 1-D.
    """
    for number, average in enumerate(parts.averages):
        if not average.num_updates:
            continue
        if parts.collectives.rank == 0:
            count = torch.tensor([average.num_updates], dtype=torch.int64, device="cpu")
            yield average_tensor_name(number), (), 0, count
        for bucket, shard in average.shards.items():
            for piece, first in own_pieces(bucket, parts.collectives.rank):
                spec = bucket.layout.params[piece.param_index]
                values = shard[first : first + piece.numel]
                yield average_tensor_name(number, spec.fqn), spec.shape, piece.param_start, values


def read_into(parts: Parts, reader: CheckpointReader) -> None:
    """Take over this rank's slices of every average, after the weights have been read.

    A parameter of which none was stored begins at its weights; an average that was not saved begins anew.

    Args:
        parts: The engine.
        reader: The checkpoint.

    Shapes:
        stored [param_numel] of each parameter -> shards [owned_numel] by bucket, in the masters' dtype
    Raises:
        CheckpointError: A file cannot be read any more.
    """
    stored = reader.manifest.tensors
    for number, average in enumerate(parts.averages):
        average.num_updates = 0
        average.shards.clear()
        if average_tensor_name(number) not in stored:
            log_event(
                f"The checkpoint holds no average of the weights number {number}: the ShardedEMA begins anew."
            )
            continue
        average.num_updates = int(reader.read_tensor(average_tensor_name(number)).item())
        average.start(parts.buckets, parts.masters, untrained=True)
        for bucket, shard in average.shards.items():
            for piece in bucket.slices:
                name = average_tensor_name(number, bucket.layout.params[piece.param_index].fqn)
                if name in stored:
                    values = reader.read(name, piece.param_start, piece.param_start + piece.numel)
                    shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
