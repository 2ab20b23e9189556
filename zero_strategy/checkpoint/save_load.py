"""A checkpoint of a running engine: every rank writes what it owns, and reads the ranges it needs.

Nothing is gathered in either direction. Every rank stores its range of every parameter and of its state, as
named runs of elements; rank 0 also buffers and extra state. Loading asks `CheckpointReader` for the runs that
this rank owns now, whatever the world size, stage or bucket size was that wrote them. Called by the engine;
the format is `format`'s business.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_strategy.checkpoint.format import (
    CheckpointReader,
    Manifest,
    decode_extra,
    dtype_name,
    encode_extra,
    file_metadata,
    model_tensor_name,
    new_checkpoint_id,
    optim_tensor_name,
    rank_file_name,
    write_rank_file,
)
from zero_strategy.checkpoint.full_weights import module_extra_states, set_module_extra_states
from zero_strategy.checkpoint.manifest import lock_folder
from zero_strategy.checkpoint.parts import (
    Parts,
    fqn_of,
    manifest_of,
    own_pieces,
    param_records,
    persistent_buffers,
)
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError, ZeroError
from zero_strategy.log import log_event
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

__all__ = ["Parts", "load", "save"]

_MODULES = "$modules"


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
    stored = _agreed(collectives, lambda: _what_to_store(parts, extra))
    _agreed(collectives, (lambda: _make_folder(folder)) if is_first else _nothing)
    checkpoint_id = collectives.broadcast_json(new_checkpoint_id())
    file = folder / rank_file_name(collectives.rank, collectives.world_size, checkpoint_id)
    metadata = file_metadata(collectives.rank, collectives.world_size, checkpoint_id)
    lock = _agreed(collectives, (lambda: lock_folder(folder)) if is_first else _nothing)
    try:
        table = _agreed(collectives, lambda: _write_file(file, stored, metadata))
        tables = collectives.gather_json(table)
        commit = _commit(parts, folder, checkpoint_id, tables, stored.extra) if is_first else _nothing
        _agreed(collectives, commit)
    except CheckpointError:
        # All ranks know that nothing was committed. After any other error rank 0 may have committed already,
        # and the file stays; if it did not, the next save removes it.
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        raise
    finally:
        if lock is not None:
            os.close(lock)


def load(parts: Parts, path: str) -> Any:
    """Read a checkpoint. See `ZeroEngine.load_checkpoint`."""
    collectives = parts.collectives
    is_first = collectives.rank == 0
    # Rank 0 looks into every file; the others check those they read from.
    reader = _agreed(collectives, lambda: CheckpointReader(path, check_files=is_first))
    with reader:
        _check_same(collectives.gather_json([path, reader.manifest.checkpoint_id]))
        collectives.agree(_check_fits(parts, reader.manifest, path))
        if reader.manifest.optimizers and not parts.optimizers:
            log_event(
                f"{path} holds the state of {len(reader.manifest.optimizers)} optimizers, and this engine "
                f"has none: only weights are loaded. To go on training, call shard_optimizer() before "
                f"load_checkpoint()."
            )
        # All of it, before anything is overwritten: a range read for another layout has no checksum.
        _agreed(collectives, lambda: _verify_share(reader, collectives.rank, collectives.world_size))
        with torch.no_grad():
            _agreed(collectives, lambda: _read_weights(parts, reader))
            _agreed(collectives, lambda: _read_optimizers(parts, reader))
        handles = [bucket.start_publish() for bucket in parts.buckets]
        for handle in handles:
            if handle is not None:
                handle.wait()
        return _agreed(collectives, lambda: _read_extra(parts, reader))


# -- writing --


def _what_to_store(parts: Parts, extra: Any) -> _Stored:
    runs = list(_own_runs(parts))
    plain_states: list[dict[str, dict[str, Any]]] = [{} for _ in parts.optimizers]
    for number, optimizer in enumerate(parts.optimizers):
        _collect_state(number, optimizer, parts.collectives.rank, runs, plain_states[number])
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
        for run, record in zip(stored.runs, written, strict=True)
    ]
    return [file.name, file.stat().st_size, table, stored.plain_states]


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
    return {_MODULES: encoded}, tensors  # a key that `encode_extra` itself never makes


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


# -- reading --


def _check_same(paths_and_ids: list[list[str]]) -> None:
    """Raise on all ranks if they have opened different checkpoints."""
    for rank, (other, checkpoint_id) in enumerate(paths_and_ids):
        if checkpoint_id != paths_and_ids[0][1]:
            raise CheckpointError(
                what=f"Rank 0 loads {paths_and_ids[0][0]} and rank {rank} loads {other}, another save.",
                why="Every rank reads its part of the weights, so all must read the same checkpoint.",
                fix="Pass the same path on every rank. Nothing was loaded.",
            )


def _check_fits(parts: Parts, manifest: Manifest, path: str) -> CheckpointError | None:
    here = {spec.fqn: spec.shape for bucket in parts.buckets for spec in bucket.layout.params}
    there = {fqn: record.shape for fqn, record in manifest.params.items()}
    missing = [fqn for fqn in here if fqn not in there]
    unexpected = [fqn for fqn in there if fqn not in here]
    if missing or unexpected:
        return _misfit(
            f"The checkpoint {path} is of another model: {len(missing)} parameters are not in it "
            f"(first: {missing[:3]}), {len(unexpected)} are in it and not in the model (first: "
            f"{unexpected[:3]})."
        )
    wrong = [fqn for fqn in here if tuple(here[fqn]) != tuple(there[fqn])]
    if wrong:
        fqn = wrong[0]
        return _misfit(
            f"{len(wrong)} parameters have other shapes: {fqn!r} is {there[fqn]} there and {here[fqn]} here."
        )
    tied = _tied_otherwise(parts, manifest)
    if tied is not None:
        return tied
    if parts.optimizers and len(manifest.optimizers) != len(parts.optimizers):
        return _misfit(
            f"It holds {len(manifest.optimizers)} optimizers, the engine has {len(parts.optimizers)}."
        )
    for number, (optimizer, record) in enumerate(zip(parts.optimizers, manifest.optimizers, strict=False)):
        own = [[fqn_of(optimizer, param) for param in group["params"]] for group in optimizer.param_groups]
        saved = [list(group["params"]) for group in record.param_groups]  # type: ignore[arg-type]
        if record.class_name != optimizer.user_class:
            return _misfit(
                f"Optimizer {number} is {optimizer.user_class}, in the checkpoint {record.class_name}."
            )
        gap = _incomplete_state(number, manifest)
        if gap is not None:
            return gap
        if own != saved:
            return _misfit(
                f"Optimizer {number} has param groups of {[len(g) for g in own]} parameters here and of "
                f"{[len(g) for g in saved]} in the checkpoint, or the same numbers of other parameters."
            )
    return None


def _incomplete_state(number: int, manifest: Manifest) -> CheckpointError | None:
    keys: dict[str, set[str]] = {}
    for name in manifest.tensors:
        if name.startswith(f"optim/{number}/"):
            fqn, _, key = name.split("/", 2)[2].rpartition("/")
            keys.setdefault(fqn, set()).add(key)
    everything = set().union(*keys.values())
    for fqn, present in keys.items():
        if present != everything:
            return CheckpointError(
                what=f"Of optimizer {number} the state {sorted(everything - present)} of {fqn!r} is missing.",
                why="Other parameters have it, so the manifest was edited or damaged.",
                fix="Use another copy of the checkpoint. Nothing was loaded.",
            )
    return None


def _tied_otherwise(parts: Parts, manifest: Manifest) -> CheckpointError | None:
    for fqn, record in param_records(parts).items():
        there = manifest.params[fqn].aliases
        if sorted(record.aliases) != sorted(there):
            return _misfit(
                f"Parameter {fqn!r} is tied to {sorted(there)} in the checkpoint and to "
                f"{sorted(record.aliases)} here."
            )
    return None


def _misfit(what: str) -> CheckpointError:
    return CheckpointError(
        what=what,
        why="Weights and optimizer state are matched by name.",
        fix="Build the model, the optimizers and their param groups as they were when it was saved. Nothing "
        "was loaded.",
    )


def _verify_share(reader: CheckpointReader, rank: int, world_size: int) -> None:
    """Compare the checksums of this rank's share of the checkpoint: pieces that lie next to one another."""
    pieces = [(entry, piece) for entry in reader.manifest.tensors.values() for piece in entry.pieces]
    pieces.sort(key=lambda pair: (pair[1].file, pair[1].key))
    share = slice(rank * len(pieces) // world_size, (rank + 1) * len(pieces) // world_size)
    for entry, piece in pieces[share]:
        reader.verify_piece(entry, piece)


def _read_weights(parts: Parts, reader: CheckpointReader) -> None:
    for bucket in parts.buckets:
        master = parts.masters.existing(bucket)
        for piece in bucket.slices:
            name = model_tensor_name(bucket.layout.params[piece.param_index].fqn)
            values = reader.read(name, piece.param_start, piece.param_start + piece.numel)
            bucket.param_shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
            if master is not None:
                master.weights[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
    for buffer, names in persistent_buffers(parts.model):
        if names[0] in reader.manifest.buffers:
            buffer.data.copy_(reader.read_tensor(model_tensor_name(names[0])))


def _read_optimizers(parts: Parts, reader: CheckpointReader) -> None:
    keys: dict[tuple[int, str], list[str]] = {}
    for name in reader.manifest.tensors:
        if name.startswith("optim/"):
            _, position, rest = name.split("/", 2)
            fqn, _, key = rest.rpartition("/")
            keys.setdefault((int(position), fqn), []).append(key)
    for number, optimizer in enumerate(parts.optimizers):
        record = reader.manifest.optimizers[number]
        full_state.load_groups(optimizer, [dict(group) for group in record.param_groups])
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for param in group["params"]:
                fqn = fqn_of(optimizer, param)
                for key in keys.get((number, fqn), ()):
                    _read_state(optimizer, param, group, reader, optim_tensor_name(number, fqn, key))
                for _, weight in optimizer.slices_of(param):
                    optimizer.state[weight].update(copy.deepcopy(record.plain_state.get(fqn, {})))


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
    # State follows the dtype of what is optimized where that has changed since it was saved.
    saved_dtype = reader.entry(model_tensor_name(fqn_of(optimizer, param))).torch_dtype
    for piece, weight in optimizer.slices_of(param):
        if is_shared:
            value = full_state.shared_value(reader.read_tensor(name), group, weight)
        else:
            value = reader.read(name, piece.param_start, piece.param_start + piece.numel).to(weight.device)
            if weight.dtype != saved_dtype and value.is_floating_point():
                value = value.to(weight.dtype)
        optimizer.state[weight][key] = value


def _read_extra(parts: Parts, reader: CheckpointReader) -> Any:
    encoded = reader.manifest.extra
    if not (isinstance(encoded, dict) and _MODULES in encoded):
        return decode_extra(encoded, reader.read_tensor)
    both: Any = decode_extra(encoded[_MODULES], reader.read_tensor)
    set_module_extra_states(parts.model, both["modules"])
    return both["user"]


# -- helpers --


def _agreed(collectives: Collectives, work: Callable[[], Any]) -> Any:
    """Do this rank's part of something all ranks do; if any fails, all raise what it raised."""
    result: Any = None
    error: ZeroError | None = None
    cause: Exception | None = None
    try:
        result = work()
    except ZeroError as raised:
        error = raised
    except OSError as raised:
        cause = raised
        error = CheckpointError(
            what=f"{type(raised).__name__}: {raised}",
            why="The file system refused.",
            fix="Check free space, permissions and the path. A checkpoint that was there before still is.",
        )
    except Exception as raised:
        cause = raised
        error = CheckpointError(
            what=f"{type(raised).__name__}: {raised}",
            why="It was raised while a checkpoint was written or read; the traceback above says where.",
            fix="A checkpoint that was there before still is. If the error is not yours, please report it.",
        )
    try:
        collectives.agree(error)
    except ZeroError as agreed:
        raise agreed from cause
    return result


def _nothing() -> None:
    return None
