"""What this rank owns, read from a checkpoint into where it is held: weights, buffers, optimizer state.

Called by `opened`, once everything has been found to fit and to be whole. No communication.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zero_strategy.checkpoint.fits import OptimizerMatch
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.parts import Parts, persistent_buffers
from zero_strategy.checkpoint.records import model_tensor_name, optim_tensor_name
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


def read_params(parts: Parts, reader: CheckpointReader, sources: Mapping[str, str]) -> None:
    """Read this rank's ranges of the parameters, into shards and masters.

    Args:
        parts: The engine.
        reader: The checkpoint.
        sources: Names of parameters here -> names there; one that is not in it keeps its values.

    Shapes:
        stored [param_numel] -> this rank's range of it, in `param_shard` and the masters [owned_numel]
    Raises:
        CheckpointError: A file cannot be read any more.
    """
    for bucket in parts.buckets:
        master = parts.masters.existing(bucket)
        for piece in bucket.slices:
            source = sources.get(bucket.layout.params[piece.param_index].fqn)
            if source is None:
                continue
            part = slice(piece.shard_start, piece.shard_start + piece.numel)
            held = bucket.param_shard if master is None else master.weights
            _read_to(held[part], reader, model_tensor_name(source), piece.param_start)
            if held is not bucket.param_shard:
                bucket.param_shard[part].copy_(held[part])


def read_buffers(parts: Parts, reader: CheckpointReader, sources: Mapping[str, str]) -> None:
    """Read the model's buffers; `sources` as for `read_params`."""
    for buffer, names in persistent_buffers(parts.model):
        if names[0] in sources:
            buffer.data.copy_(reader.read_tensor(model_tensor_name(sources[names[0]])))


def read_optimizers(parts: Parts, reader: CheckpointReader, matches: Sequence[OptimizerMatch]) -> None:
    """Read this rank's slices of the optimizers' states, and their hyper-parameters.

    Args:
        parts: The engine.
        reader: The checkpoint.
        matches: For each optimizer, what in the checkpoint is its.

    Shapes:
        stored [param_numel] or [] of each parameter -> [slice_numel] or [] of each slice
    Raises:
        CheckpointError: A file cannot be read any more.
    """
    keys = _state_keys(reader)
    for number, (optimizer, match) in enumerate(zip(parts.optimizers, matches, strict=True)):
        plain = reader.manifest.optimizers[number].plain_state
        if match.groups is not None:
            full_state.load_groups(optimizer, match.groups)
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for param in group["params"]:
                source = match.sources.get(full_state.fqn_of(optimizer, param))
                if source is None:
                    continue
                for key in keys.get((number, source), ()):
                    _read_state(optimizer, param, group, reader, optim_tensor_name(number, source, key))
                for _, weight in optimizer.slices_of(param):
                    optimizer.state[weight].update(copy.deepcopy(plain.get(source, {})))


# -- helpers --


def _state_keys(reader: CheckpointReader) -> dict[tuple[int, str], list[str]]:
    """Return which state there is of each parameter of each optimizer, by its number and the name."""
    keys: dict[tuple[int, str], list[str]] = {}
    for name in reader.manifest.tensors:
        if name.startswith("optim/"):
            _, position, rest = name.split("/", 2)
            fqn, _, key = rest.rpartition("/")
            keys.setdefault((int(position), fqn), []).append(key)
    return keys


def _read_to(out: Tensor, reader: CheckpointReader, name: str, start: int) -> None:
    """Read elements of a tensor from `start` on into memory that is there, directly where that can be.

    Shapes:
        out [numel], contiguous, any dtype and device
    """
    if out.device.type == "cpu" and out.dtype == reader.entry(name).torch_dtype:
        reader.read_into(name, start, out)
    else:
        out.copy_(reader.read(name, start, start + out.numel()))


def _read_state(
    optimizer: ShardedOptimizer,
    param: nn.Parameter,
    group: dict[str, Any],
    reader: CheckpointReader,
    name: str,
) -> None:
    """Read one tensor of a parameter's state into this rank's slices of it."""
    key = name.rpartition("/")[2]
    is_shared = reader.entry(name).shape == ()
    saved_dtype = reader.entry(model_tensor_name(name.split("/", 2)[2].rpartition("/")[0])).torch_dtype
    for piece, weight in optimizer.slices_of(param):
        if is_shared:
            value = reader.read_tensor(name)
        else:
            value = reader.read(name, piece.param_start, piece.param_start + piece.numel)
        value = full_state.beside(weight, key, value, group)
        # Moments follow what is optimized only where that has another dtype than when they were saved: an
        # optimizer may have chosen one of its own for them.
        if weight.dtype != saved_dtype:
            value = full_state.in_dtype_of(weight, key, value)
        optimizer.state[weight][key] = value
