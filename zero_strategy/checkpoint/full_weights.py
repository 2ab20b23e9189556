"""Whole weights in the model's own names, gathered to rank 0 and scattered from it, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_strategy.bucket import Bucket
from zero_strategy.buffers import empty_flat
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError
from zero_strategy.precision import Masters


class LoadResult(NamedTuple):
    """What did not match."""

    missing_keys: list[str]  # in the model, not in what was loaded
    unexpected_keys: list[str]  # the other way round


def names_in(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` with the tensors themselves, which works while they are sharded."""
    return model.state_dict(keep_vars=True)


def gather(
    model: nn.Module,
    buckets: Sequence[Bucket],
    collectives: Collectives,
    *,
    dtype: torch.dtype | None,
    trainable_only: bool,
) -> dict[str, Any]:
    """Return whole CPU tensors on rank 0, {} elsewhere. Collective. See `ZeroEngine.full_state_dict`."""
    whole: dict[int, Tensor] = {}
    for bucket in buckets:
        if trainable_only and not bucket.trainable:
            continue
        flat = bucket.flat if bucket.is_whole else bucket.gather_shards(bucket.param_shard)
        if collectives.rank == 0:
            for param, view in zip(bucket.params, bucket.views(flat), strict=True):
                whole[id(param)] = _to_host(view, dtype)
    if collectives.rank != 0:
        return {}
    state: dict[str, Any] = {}
    for name, value in names_in(model).items():
        if id(value) in whole:
            state[name] = whole[id(value)]
        elif not trainable_only and not isinstance(value, nn.Parameter):
            state[name] = _to_host(value, None) if isinstance(value, Tensor) else value
    return state


def scatter(
    model: nn.Module,
    buckets: Sequence[Bucket],
    masters: Masters,
    state_dict: Mapping[str, Any],
    collectives: Collectives,
) -> LoadResult:
    """Take over rank 0's whole weights and buffers. Collective. See `ZeroEngine.load_full_state_dict`."""
    own = names_in(model)
    collectives.agree(_check_shapes(own, state_dict) if collectives.rank == 0 else None)
    given = collectives.broadcast_json(
        [name for name, value in state_dict.items() if isinstance(value, Tensor)]
    )
    present = set(given)
    places = {id(param): (bucket, i) for bucket in buckets for i, param in enumerate(bucket.params)}
    done: set[int] = set()
    for name, value in own.items():
        if name not in present or id(value) in done or not isinstance(value, Tensor):
            continue
        done.add(id(value))
        place = places.get(id(value))
        if place is None:
            whole = _received(state_dict, name, value.dtype, value, collectives)
            value.data.copy_(whole.view_as(value))
        else:
            bucket, index = place
            wide = torch.float32 if value.is_floating_point() and value.element_size() < 4 else value.dtype
            whole = _received(state_dict, name, wide, bucket.flat, collectives, numel=value.numel())
            write_param(bucket, index, whole, masters)
    return LoadResult(
        [name for name, value in own.items() if name not in present and isinstance(value, Tensor)],
        [name for name in given if name not in own],
    )


def write_param(bucket: Bucket, index: int, whole: Tensor, masters: Masters) -> None:
    """Write one parameter's values, known whole on every rank, wherever they are held.

    Shapes:
        whole [param.numel], the master's dtype or the parameter's
    """
    if bucket.is_whole:
        spec = bucket.layout.params[index]
        bucket.flat[spec.start : spec.start + spec.numel].copy_(whole)
    master = masters.existing(bucket)
    for position, piece in enumerate(bucket.slices):
        if piece.param_index == index:
            values = whole[piece.param_start : piece.param_start + piece.numel]
            bucket.param_shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
            if master is not None:
                master.slices[position].copy_(values)


# -- helpers --


def _received(
    state_dict: Mapping[str, Any],
    name: str,
    dtype: torch.dtype,
    like: Tensor,
    collectives: Collectives,
    *,
    numel: int | None = None,
) -> Tensor:
    whole = empty_flat(like.numel() if numel is None else numel, dtype, like.device)
    if collectives.rank == 0:
        whole.copy_(state_dict[name].detach().reshape(-1))
    collectives.broadcast(whole)
    return whole


def _to_host(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", target, copy=True).contiguous()


def _check_shapes(own: Mapping[str, Any], given: Mapping[str, Any]) -> CheckpointError | None:
    wrong = [
        f"{name!r} has shape {tuple(given[name].shape)}, the model's {tuple(value.shape)}"
        for name, value in own.items()
        if isinstance(value, Tensor)
        and isinstance(given.get(name), Tensor)
        and given[name].shape != value.shape
    ]
    if not wrong:
        return None
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    return CheckpointError(
        what=f"{len(wrong)} tensors do not fit the model: " + "; ".join(wrong[:3]) + more + ".",
        why="Weights are matched by name, and a name must mean the same tensor on both sides.",
        fix="Load them into the model they were saved from.",
    )
