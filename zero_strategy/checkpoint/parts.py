"""The parts of an engine that a checkpoint is made of, and what the manifest says of them.

Called by `save`, `opened` and `fits`. It describes; it reads and writes no file and talks to no other rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from zero_strategy.average import AverageShards
from zero_strategy.bucket import Bucket
from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.full_weights import module_extra_states, names_in
from zero_strategy.checkpoint.hf import hf_record
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.records import (
    BufferRecord,
    FileRecord,
    HFRecord,
    OptimizerRecord,
    ParamRecord,
    Piece,
    TensorEntry,
    model_tensor_name,
)
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError
from zero_strategy.layout import ShardSlice
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim import full_state
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer
from zero_strategy.precision import Masters


class Parts(NamedTuple):
    """The parts of an engine that a checkpoint is made of."""

    model: nn.Module
    buckets: Sequence[Bucket]
    masters: Masters
    optimizers: Sequence[ShardedOptimizer]
    loss_scaler: LossScaler
    averages: Sequence[AverageShards]
    collectives: Collectives
    stage: int
    rng_device: torch.device | None  # the device's generators are stored beside the host's; None: none are
    reshard_idle: Callable[[], None]  # to be called after weights have been written


class Description(NamedTuple):
    """What a manifest says beside what is in the files: of an engine as it was when the save began."""

    world_size: int
    stage: int
    params: dict[str, ParamRecord]
    buffers: dict[str, BufferRecord]
    frozen_left_out: tuple[str, ...]
    optimizers: list[OptimizerRecord]  # without state that is no tensor, which comes with the files
    loss_scaler: dict[str, float | int] | None
    extra: Any  # the user's, as JSON
    hf: HFRecord | None


def describe(parts: Parts, extra: Any) -> Description:
    """Describe an engine for a manifest.

    Args:
        parts: The engine.
        extra: The user's, as JSON.

    Raises:
        CheckpointError: A param group holds what JSON cannot.
    """
    return Description(
        world_size=parts.collectives.world_size,
        stage=parts.stage,
        params=param_records(parts),
        buffers=buffer_records(parts.model),
        frozen_left_out=_left_out(parts),
        optimizers=[_optimizer_record(optimizer) for optimizer in parts.optimizers],
        loss_scaler=parts.loss_scaler.state_dict() if parts.loss_scaler.is_active else None,
        extra=extra,
        hf=hf_record(parts.model),
    )


def manifest_of(description: Description, checkpoint_id: str, tables: list[Any]) -> Manifest:
    """Build the manifest of a save.

    Args:
        description: Of the engine.
        checkpoint_id: The save's.
        tables: Of every rank: its file's name and record, what it holds, and of each optimizer the state that
            is no tensor. None at all gives a manifest that only shows whether the rest can be described.

    Raises:
        CheckpointError: A name or a value is none that a manifest can have.
    """
    try:
        return _manifest_of(description, checkpoint_id, tables)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise CheckpointError(
            what=f"The state cannot be described: {'/'.join(map(str, problem['loc']))}: {problem['msg']}.",
            why=f"Found {problem['input']!r:.80}, and a manifest holds names, and values as JSON has them.",
            fix="Leave it out, or make plain numbers, strings, lists and dicts of it.",
        ) from error


def _manifest_of(description: Description, checkpoint_id: str, tables: list[Any]) -> Manifest:
    pieces: dict[str, list[Piece]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    shared = {row[0] for _, _, table, _ in tables for row in table if not row[1]}
    for file_name, _, table, _ in tables:
        for name, shape, dtype, start, numel, checksum in table:
            if name in shared and shape:
                # One value for all elements, of a rank whose slice has one: it could not tell which it is.
                continue
            kinds[name] = (tuple(shape), dtype)
            piece = Piece(file=file_name, key=name, file_start=0, start=start, numel=numel, checksum=checksum)
            pieces.setdefault(name, []).append(piece)
    for fqn, empty in (*description.params.items(), *description.buffers.items()):
        if not empty.numel:  # no rank has an element of it
            kinds.setdefault(model_tensor_name(fqn), (empty.shape, empty.dtype))
    return Manifest(
        checkpoint_id=checkpoint_id,
        world_size=description.world_size,
        stage=description.stage,
        files={file_name: FileRecord(**record) for file_name, record, _, _ in tables},
        params=description.params,
        buffers=description.buffers,
        frozen_left_out=description.frozen_left_out,
        tensors={
            name: TensorEntry(name=name, shape=shape, dtype=dtype, pieces=tuple(pieces.get(name, ())))
            for name, (shape, dtype) in kinds.items()
        },
        optimizers=tuple(
            _with_plain_state(optimizer, [states[number] for *_, states in tables if states])
            for number, optimizer in enumerate(description.optimizers)
        ),
        loss_scaler=description.loss_scaler,
        extra=description.extra,
        hf=description.hf,
    )


def own_pieces(bucket: Bucket, rank: int) -> list[tuple[ShardSlice, int]]:
    """Return this rank's range of a bucket as slices, each with its first element in `param_shard`.

    Where the state is whole (stage 0) every rank has everything, and each still stores its range only.
    """
    offset = 0 if bucket.policy.shard_optim else rank * bucket.layout.shard_numel
    return [(piece, offset + piece.shard_start) for piece in bucket.layout.slices(rank)]


def persistent_buffers(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return every buffer of `model.state_dict()` once, with all its names."""
    others = {id(param) for param in model.parameters()}
    extra_names = set(module_extra_states(model))
    found: dict[int, tuple[Tensor, list[str]]] = {}
    for name, value in names_in(model).items():
        if isinstance(value, Tensor) and id(value) not in others and name not in extra_names:
            found.setdefault(id(value), (value, []))[1].append(name)
    return list(found.values())


def buffer_records(model: nn.Module) -> dict[str, BufferRecord]:
    """Return the records of the model's persistent buffers."""
    return {
        names[0]: BufferRecord(
            shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype), aliases=tuple(names[1:])
        )
        for buffer, names in persistent_buffers(model)
    }


def param_records(parts: Parts) -> dict[str, ParamRecord]:
    """Return the records of the model's parameters as they are here."""
    names: dict[int, list[str]] = {}
    for name, param in parts.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {
        spec.fqn: ParamRecord(
            shape=spec.shape,
            dtype=dtype_name(bucket.flat.dtype),
            trainable=bucket.trainable,
            aliases=tuple(name for name in names[id(param)] if name != spec.fqn),
        )
        for bucket in parts.buckets
        for spec, param in zip(bucket.layout.params, bucket.params, strict=True)
    }


# -- helpers --


def _left_out(parts: Parts) -> tuple[str, ...]:
    """Return the names of parameters that are in none of the buckets that are saved."""
    saved = {id(param) for bucket in parts.buckets for param in bucket.params}
    named = parts.model.named_parameters(remove_duplicate=False)
    return tuple(name for name, param in named if id(param) not in saved)


def _optimizer_record(optimizer: ShardedOptimizer) -> OptimizerRecord:
    groups = full_state.groups_as_json(optimizer.param_groups)
    for group, params in zip(groups, (group["params"] for group in optimizer.param_groups), strict=True):
        group["params"] = [full_state.fqn_of(optimizer, param) for param in params]
    return OptimizerRecord(class_name=optimizer.user_class, param_groups=tuple(groups))


def _with_plain_state(
    record: OptimizerRecord, plain_of_ranks: list[dict[str, dict[str, Any]]]
) -> OptimizerRecord:
    plain_state = {fqn: state for plain in plain_of_ranks for fqn, state in plain.items()}
    return record.model_copy(update={"plain_state": plain_state})
