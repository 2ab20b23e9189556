"""A checkpoint of a running engine is written: by every rank what it owns.

Nothing is gathered. Every rank stores its range of every parameter and of its state, as named runs of
elements; rank 0 also buffers and extra state. Called by the engine; the format is `format`'s business, and
reading is `opened`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from zero_strategy.checkpoint import averages
from zero_strategy.checkpoint.folders import lock_folder
from zero_strategy.checkpoint.format import (
    dtype_name,
    encode_extra,
    file_metadata,
    model_tensor_name,
    new_checkpoint_id,
    optim_tensor_name,
    rank_file_name,
    write_rank_file,
)
from zero_strategy.checkpoint.full_weights import module_extra_states
from zero_strategy.checkpoint.parts import MODULES_KEY, Parts, manifest_of, own_pieces, persistent_buffers
from zero_strategy.comm.together import agreed
from zero_strategy.errors import CheckpointError
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class Run(NamedTuple):
    """A run of elements of one named tensor that this rank stores."""

    name: str
    shape: tuple[int, ...]
    start: int
    values: Tensor  # 1-D


class _Stored(NamedTuple):
    """What one rank has to write."""

    runs: list[Run]
    plain_states: list[dict[str, dict[str, Any]]]  # of each optimizer: FQN -> key -> value that is no tensor
    extra: Any  # as JSON; of rank 0


def save(parts: Parts, path: str, extra: Any) -> None:
    """Write a checkpoint. See `ZeroEngine.save_checkpoint`."""
    collectives = parts.collectives
    folder = Path(path)
    is_first = collectives.rank == 0
    stored = agreed(collectives, lambda: _what_to_store(parts, extra))
    agreed(collectives, (lambda: _make_folder(folder)) if is_first else _nothing)
    checkpoint_id = collectives.broadcast_json(new_checkpoint_id())
    file = folder / rank_file_name(collectives.rank, collectives.world_size, checkpoint_id)
    metadata = file_metadata(collectives.rank, collectives.world_size, checkpoint_id)
    lock = agreed(collectives, (lambda: lock_folder(folder)) if is_first else _nothing)
    try:
        table = agreed(collectives, lambda: _write_file(file, stored, metadata))
        tables = collectives.gather_json(table)
        commit = _commit(parts, folder, checkpoint_id, tables, stored.extra) if is_first else _nothing
        agreed(collectives, commit)
    except CheckpointError:
        # All ranks know that nothing was committed. After any other error rank 0 may have committed already,
        # and the file stays; if it did not, the next save removes it.
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


# -- writing --


def _what_to_store(parts: Parts, extra: Any) -> _Stored:
    runs = list(_own_runs(parts))
    plain_states: list[dict[str, dict[str, Any]]] = [{} for _ in parts.optimizers]
    for number, optimizer in enumerate(parts.optimizers):
        _collect_state(number, optimizer, parts.collectives.rank, runs, plain_states[number])
    runs += [Run(*run) for run in averages.runs_of(parts)]
    if parts.collectives.rank != 0:
        return _Stored(runs, plain_states, None)
    runs += _buffer_runs(parts.model)
    encoded, tensors = _encode_extra(parts.model, extra)
    runs += [Run(name, tuple(t.shape), 0, t.detach().reshape(-1)) for name, t in tensors.items()]
    return _Stored(runs, plain_states, encoded)


def _own_runs(parts: Parts) -> Iterator[Run]:
    """Yield this rank's range of the weights: of the masters where there are any."""
    for bucket in parts.buckets:
        master = parts.masters.existing(bucket)
        source = master.weights if master is not None else bucket.param_shard
        for piece, first in own_pieces(bucket, parts.collectives.rank):
            spec = bucket.layout.params[piece.param_index]
            values = source[first : first + piece.numel]
            yield Run(model_tensor_name(spec.fqn), spec.shape, piece.param_start, values)


def _collect_state(
    number: int,
    optimizer: ShardedOptimizer,
    rank: int,
    runs: list[Run],
    plain: dict[str, dict[str, Any]],
) -> None:
    """Add this rank's range of an optimizer's state: tensors to `runs`, other values to `plain`."""
    for param in optimizer.params():
        bucket, index = optimizer.place_of(param)
        spec = bucket.layout.params[index]
        wanted = [piece for piece, _ in own_pieces(bucket, rank) if piece.param_index == index]
        is_start = any(part.param_start == 0 for part in wanted)
        for piece, weight in optimizer.slices_of(param):
            for key, value in optimizer.state.get(weight, {}).items():
                name = optim_tensor_name(number, spec.fqn, key)
                kind = full_state.describe_kind(value, piece.numel, f"The state {key!r} of {spec.fqn!r}")
                if kind[0] == "elements":
                    for part in wanted:
                        start = part.param_start - piece.param_start
                        values = value.reshape(-1)[start : start + part.numel]
                        runs.append(Run(name, spec.shape, part.param_start, values))
                elif kind[0] == "scalar" and is_start:
                    runs.append(Run(name, (), 0, value.reshape(1)))
                elif is_start:
                    plain.setdefault(spec.fqn, {})[key] = kind[1]


def _write_file(file: Path, stored: _Stored, metadata: dict[str, str]) -> list[Any]:
    """Write this rank's file and return what rank 0 needs for the manifest, as JSON."""
    written = write_rank_file(file, [(run.name, run.values) for run in stored.runs], metadata)
    table = [
        [run.name, run.shape, dtype_name(run.values.dtype), run.start, run.values.numel(), record.checksum]
        for run, record in zip(stored.runs, written.tensors, strict=True)
    ]
    record = {"num_bytes": written.num_bytes, "header_checksum": written.header_checksum}
    return [file.name, record, table, stored.plain_states]


def _buffer_runs(model: nn.Module) -> list[Run]:
    return [
        Run(model_tensor_name(names[0]), tuple(buffer.shape), 0, buffer.detach().reshape(-1))
        for buffer, names in persistent_buffers(model)
    ]


def _encode_extra(model: nn.Module, extra: Any) -> tuple[Any, dict[str, Tensor]]:
    """Encode the user's extra state, and with it what modules return from `get_extra_state`."""
    encoded, tensors = encode_extra(extra)  # first, for a message that begins where the user's own begins
    of_modules = module_extra_states(model)
    if not of_modules:
        return encoded, tensors
    encoded, tensors = encode_extra({"user": extra, "modules": of_modules})
    return {MODULES_KEY: encoded}, tensors


def _commit(
    parts: Parts, folder: Path, checkpoint_id: str, tables: list[Any], extra: Any
) -> Callable[[], None]:
    return lambda: manifest_of(parts, checkpoint_id, tables, extra).write(folder)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            what=f"The folder {folder} could not be made: {error.strerror or error}.",
            why="A checkpoint is a folder.",
            fix="Choose another path, or remove the file that is in the way.",
        ) from error


def _nothing() -> None:
    return None
