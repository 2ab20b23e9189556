"""Optimizer state between this rank's slices and torch's own format of whole tensors.

`gather` and `scatter` are the two directions; both move one bucket, or one tensor, at a time. Called by
`ShardedOptimizer`; the checkpoint format does not come through here, it stores slices as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.buffers import empty_flat
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import CheckpointError
from zero_strategy.layout import ShardSlice
from zero_strategy.optim.places import SlicedOptimizer


def cut(value: Any, param_numel: int, piece: ShardSlice) -> Any:
    """Return a slice's share of a state entry: its range of element-wise tensors, a copy of the rest."""
    if not isinstance(value, Tensor):
        return value
    if value.dim() and value.numel() == param_numel:
        return value.detach().reshape(-1)[piece.param_start : piece.param_start + piece.numel].clone()
    return value.detach().clone()


def gather(optimizer: SlicedOptimizer, collectives: Collectives) -> dict[str, Any]:
    """Return the whole state on rank 0. See `ShardedOptimizer.state_dict`."""
    ids = {param: index for index, param in enumerate(optimizer.params())}
    fqns = {index: _fqn(optimizer, param) for param, index in ids.items()}
    kinds = _agree_on_kinds(optimizer, collectives)
    state: dict[int, dict[str, Any]] = {}
    if collectives.rank == 0:
        state = {
            index: {key: _scalar(kind) for key, kind in kinds[fqn].items() if kind[0] != "elements"}
            for index, fqn in fqns.items()
            if fqn in kinds
        }
    by_fqn = {fqn: index for index, fqn in fqns.items()}
    shapes = {fqns[index]: tuple(param.shape) for param, index in ids.items()}
    for bucket in optimizer.buckets:
        for key, dtype in _element_keys(bucket, kinds):
            whole = bucket.gather_shards(_shard_of_state(optimizer, bucket, key, dtype))
            if collectives.rank == 0:
                for spec, view in zip(bucket.layout.params, bucket.views(whole), strict=True):
                    if kinds.get(spec.fqn, {}).get(key, [None])[0] == "elements" and spec.fqn in by_fqn:
                        value = view.detach().to("cpu", copy=True).reshape(shapes[spec.fqn])
                        state[by_fqn[spec.fqn]][key] = value
    groups = [
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [ids[p] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def scatter(optimizer: SlicedOptimizer, state_dict: dict[str, Any], collectives: Collectives) -> None:
    """Take over rank 0's whole state. See `ShardedOptimizer.load_state_dict`."""
    is_source = collectives.rank == 0
    collectives.agree(_check_fits(optimizer, state_dict) if is_source else None)
    table = collectives.broadcast_json(_table_of(state_dict) if is_source else None)
    load_groups(optimizer, table["groups"])
    optimizer.state.clear()
    for param, saved_id in zip(optimizer.params(), table["ids"], strict=True):
        for key, kind in table["state"].get(str(saved_id), {}).items():
            if kind[0] != "elements":
                for _, weight in optimizer.slices_of(param):
                    optimizer.state[weight][key] = _scalar(kind)
                continue
            bucket = optimizer.place_of(param).bucket
            whole = empty_flat(param.numel(), getattr(torch, kind[1]), bucket.flat.device)
            if is_source:
                whole.copy_(state_dict["state"][saved_id][key].detach().reshape(-1))
            collectives.broadcast(whole)
            for piece, weight in optimizer.slices_of(param):
                value = cut(whole, param.numel(), piece)
                # As torch does: moments follow the dtype of what is optimized, here the master.
                optimizer.state[weight][key] = value.to(weight.dtype) if value.is_floating_point() else value


def load_groups(optimizer: SlicedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Write saved hyper-parameters into the param groups; JSON's lists become tuples again."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            if key == "params":
                continue
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def groups_as_json(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups without their parameters, tensors (a capturable lr) as numbers."""
    return [
        {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in groups
    ]


def describe_kind(value: Any, numel: int) -> list[Any]:
    """Say what a state entry is, as JSON: ["elements", dtype], ["scalar", dtype, value], ["plain", value]."""
    if not isinstance(value, Tensor):
        return ["plain", value]
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() and value.numel() == numel:
        return ["elements", dtype]
    return ["scalar", dtype, value.item()]


# -- helpers --


def _scalar(kind: list[Any]) -> Any:
    return kind[1] if kind[0] == "plain" else torch.tensor(kind[2], dtype=getattr(torch, kind[1]))


def _fqn(optimizer: SlicedOptimizer, param: torch.nn.Parameter) -> str:
    return optimizer.place_of(param).fqn


def _agree_on_kinds(optimizer: SlicedOptimizer, collectives: Collectives) -> dict[str, dict[str, list[Any]]]:
    """Learn what state each parameter has on whichever ranks hold a slice of it."""
    mine: dict[str, dict[str, list[Any]]] = {}
    for entry in optimizer.slice_states():
        mine.setdefault(entry.fqn, {})[entry.key] = describe_kind(entry.value, entry.piece.numel)
    everybody: dict[str, dict[str, list[Any]]] = {}
    for theirs in reversed(collectives.gather_json(mine)):
        everybody.update(theirs)
    return everybody


def _element_keys(
    bucket: Bucket, kinds: dict[str, dict[str, list[Any]]]
) -> Iterator[tuple[str, torch.dtype]]:
    keys: dict[str, torch.dtype] = {}
    for spec in bucket.layout.params:
        for key, kind in kinds.get(spec.fqn, {}).items():
            if kind[0] == "elements":
                keys[key] = getattr(torch, kind[1])
    yield from sorted(keys.items())


def _shard_of_state(optimizer: SlicedOptimizer, bucket: Bucket, key: str, dtype: torch.dtype) -> Tensor:
    shard = empty_flat(bucket.owned_numel, dtype, bucket.flat.device).zero_()
    for param in optimizer.params():
        if optimizer.place_of(param).bucket is bucket:
            for piece, weight in optimizer.slices_of(param):
                value = optimizer.state.get(weight, {}).get(key)
                if value is not None:
                    shard[piece.shard_start : piece.shard_start + piece.numel].copy_(value)
    return shard


def _table_of(state_dict: dict[str, Any]) -> dict[str, Any]:
    groups = state_dict["param_groups"]
    numels = {index: _numel(entry) for index, entry in state_dict["state"].items()}
    return {
        "groups": groups_as_json(groups),
        "ids": [index for group in groups for index in group["params"]],
        "state": {
            str(index): {key: describe_kind(value, numels[index]) for key, value in entry.items()}
            for index, entry in state_dict["state"].items()
        },
    }


def _numel(entry: dict[str, Any]) -> int:
    return max(
        (value.numel() for value in entry.values() if isinstance(value, Tensor) and value.dim()), default=-1
    )


def _check_fits(optimizer: SlicedOptimizer, state_dict: dict[str, Any]) -> CheckpointError | None:
    fix = "Build the optimizer as it was when the state was saved, with the same param groups."
    try:
        saved = [len(group["params"]) for group in state_dict["param_groups"]]
        state = state_dict["state"]
    except (KeyError, TypeError) as error:
        return CheckpointError(
            what=f"This is no optimizer state: {error!r}.", why="It lacks torch's own keys.", fix=fix
        )
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        return CheckpointError(
            what=f"The saved optimizer has param groups of {saved} parameters, this one of {here}.",
            why="State is matched to parameters by their position in the groups.",
            fix=fix,
        )
    ids = [index for group in state_dict["param_groups"] for index in group["params"]]
    for index, param in zip(ids, optimizer.params(), strict=True):
        numel = _numel(state.get(index, {}))
        if numel not in (-1, param.numel()):
            return CheckpointError(
                what=f"The saved state of {_fqn(optimizer, param)!r} has {numel} elements, the parameter "
                f"{param.numel()}.",
                why="State is matched to parameters by their position in the groups.",
                fix=fix,
            )
    return None
