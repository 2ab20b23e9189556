"""Optimizer state between this rank's slices and torch's own format of whole tensors.

`gather` and `scatter` are the two directions; both move one bucket, or one tensor, at a time. Called by
`ShardedOptimizer`; the checkpoint format does not come through here, it stores slices as they are.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.bucket import Bucket
from zero_strategy.buffers import empty_flat
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.together import agreed
from zero_strategy.errors import CheckpointError
from zero_strategy.layout import ShardSlice
from zero_strategy.optim.places import Place, SlicedOptimizer


def cut(value: Any, param_numel: int, piece: ShardSlice) -> Any:
    """Return a slice's share of a state entry: its range of an element-wise tensor, a copy of anything else.

    Args:
        value: The entry for the whole parameter.
        param_numel: Elements of the parameter.
        piece: The slice.
    """
    if not isinstance(value, Tensor):
        return copy.copy(value)
    share = value.detach()
    if value.dim() and value.numel() == param_numel:
        share = share.reshape(-1)[piece.param_start : piece.param_start + piece.numel]
    return share.clone()


def in_dtype_of(weight: Tensor, key: str, value: Any) -> Any:
    """Return a slice's state entry in the dtype it takes on: as in torch the weights', if it is a moment.

    A step count, and one value for several weights, keep the dtype in which their optimizer made them.

    Shapes:
        weight [numel], or [] of a parameter without dimensions; a moment has the same shape
    """
    is_moment = isinstance(value, Tensor) and value.is_floating_point() and value.shape == weight.shape
    return value.to(weight.dtype) if is_moment and key != "step" else value


def beside(weight: Tensor, key: str, value: Any, group: dict[str, Any]) -> Any:
    """Return a loaded state entry where its optimizer looks for it, by torch's rule: beside the weights.

    Only a step count stays on the CPU, unless a kernel reads it.

    Args:
        weight: The slice's.
        key: The name of the entry.
        value: The slice's share of it; the result may be the same tensor.
        group: The param group.
    """
    if not isinstance(value, Tensor):
        return value
    in_kernel = group.get("capturable") or group.get("fused")
    is_count = key == "step" and not value.dim()
    return value.to("cpu" if is_count and not in_kernel else weight.device)


def fqn_of(optimizer: SlicedOptimizer, param: torch.nn.Parameter) -> str:
    """Return the name of one of an optimizer's parameters."""
    return optimizer.place_of(param).fqn


def gather(optimizer: SlicedOptimizer, collectives: Collectives) -> dict[str, Any]:
    """Return the whole state on rank 0. See `ShardedOptimizer.state_dict`."""
    ids = {param: index for index, param in enumerate(optimizer.params())}
    fqns = {index: fqn_of(optimizer, param) for param, index in ids.items()}
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
            found = _gather_key(optimizer, bucket, key, dtype, is_wanted=collectives.rank == 0)
            for fqn, value in found.items():
                if kinds.get(fqn, {}).get(key, [None])[0] == "elements" and fqn in by_fqn:
                    state[by_fqn[fqn]][key] = value.reshape(shapes[fqn])
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
    # As text: what JSON does not know is found while the others still listen.
    text = agreed(collectives, lambda: json.dumps(_table_of(optimizer, state_dict)) if is_source else "")
    table = json.loads(collectives.broadcast_bytes(text.encode()))
    agreed(collectives, lambda: load_groups(optimizer, table["groups"]))
    optimizer.state.clear()
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for param, group, saved_id in zip(optimizer.params(), groups, table["ids"], strict=True):
        for key, kind in table["state"].get(str(saved_id), {}).items():
            if kind[0] != "elements":
                for _, weight in optimizer.slices_of(param):
                    value = in_dtype_of(weight, key, _scalar(kind))
                    optimizer.state[weight][key] = beside(weight, key, value, group)
                continue
            bucket = optimizer.place_of(param).bucket
            whole = empty_flat(param.numel(), getattr(torch, kind[1]), bucket.flat.device)
            if is_source:
                whole.copy_(state_dict["state"][saved_id][key].detach().reshape(-1))
            collectives.broadcast(whole)
            for piece, weight in optimizer.slices_of(param):
                share = cut(whole, param.numel(), piece)
                optimizer.state[weight][key] = in_dtype_of(weight, key, share)


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


def check_groups(optimizer: SlicedOptimizer, saved: list[dict[str, Any]]) -> None:
    """Check that `load_groups` can write saved hyper-parameters.

    Args:
        optimizer: Theirs.
        saved: Of each param group, or of none.

    Raises:
        CheckpointError: A setting that is a tensor here is no number there.
    """
    for number, (group, values) in enumerate(zip(optimizer.param_groups, saved, strict=False)):
        for key, value in values.items():
            if isinstance(group.get(key), Tensor) and not isinstance(value, int | float):
                raise CheckpointError(
                    what=f"The setting {key!r} of param group {number} is {value!r} in the checkpoint.",
                    why="Here it is a tensor of one element, which takes a number.",
                    fix="Make the optimizer with a plain setting, as when it was saved. Nothing was loaded.",
                )


def groups_as_json(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return param groups without their parameters, as JSON; tensors (a capturable lr) become numbers.

    Raises:
        CheckpointError: A group holds something else than JSON values and tensors of one element.
    """
    return [
        {
            key: as_json(value, f"The setting {key!r} of a param group")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for group in groups
    ]


def as_json(value: Any, subject: str) -> Any:
    """Return a value as JSON has it: tuples become lists, tensors of one element numbers.

    Raises:
        CheckpointError: It is something else than JSON values and tensors of one element.
    """
    try:
        return json.loads(json.dumps(value, default=Tensor.item))
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            what=f"{subject} is {value!r}, which cannot be saved: {error}.",
            why="Optimizers are stored as JSON and tensors, without pickle, so that loading never runs code.",
            fix="Keep numbers, strings, lists, None and tensors in optimizers only.",
        ) from error


def describe_kind(value: Any, numel: int, subject: str) -> list[Any]:
    """Say what a state entry is, as JSON: ["elements", dtype], ["scalar", dtype, value], ["plain", value].

    Args:
        value: The entry.
        numel: Elements of the parameter, or of the slice, that it belongs to.
        subject: What it is, for the message.

    Raises:
        CheckpointError: It is none of these.
    """
    if not isinstance(value, Tensor):
        return ["plain", as_json(value, subject)]
    dtype = str(value.dtype).removeprefix("torch.")
    if value.dim() and value.numel() == numel:
        return ["elements", dtype]
    if value.numel() != 1:
        raise CheckpointError(
            what=f"{subject} has shape {tuple(value.shape)}, and there are {numel} elements to update.",
            why="State is either one value for each element, which can be cut, or one for all of them.",
            fix="Use an element-wise optimizer, and load state into the parameters it was saved of.",
        )
    return ["scalar", dtype, value.item()]


def describe_optimizer(optimizer: Optimizer, places: Mapping[nn.Parameter, Place]) -> list[str]:
    """Return a line for everything about an optimizer that ranks must agree on.

    Args:
        optimizer: Any optimizer over parameters that are all in `places`.
        places: Where the parameters lie, for their names.
    """
    lines = [f"class {type(optimizer).__name__}"]
    for number, group in enumerate(optimizer.param_groups):
        lines += [
            f"param group {number}: {key}={json.dumps(value, default=_text_of)}"
            for key, value in group.items()
            if key not in ("params", "param_names")
        ]
        lines += [f"param group {number}: parameter {places[param].fqn}" for param in group["params"]]
    return lines


# -- helpers --


def _text_of(value: Any) -> str:
    """Return what a setting says, and of an object its class only: an address would differ between ranks."""
    return str(value.tolist()) if isinstance(value, Tensor) else type(value).__name__


def _scalar(kind: list[Any]) -> Any:
    return (
        kind[1] if kind[0] == "plain" else torch.tensor(kind[2], dtype=getattr(torch, kind[1]), device="cpu")
    )


def _agree_on_kinds(optimizer: SlicedOptimizer, collectives: Collectives) -> dict[str, dict[str, list[Any]]]:
    """Learn what state each parameter has on whichever ranks hold a slice of it."""
    mine = agreed(collectives, lambda: _own_kinds(optimizer))
    everybody: dict[str, dict[str, list[Any]]] = {}
    for theirs in reversed(collectives.gather_json(mine)):
        for fqn, kinds in theirs.items():
            known = everybody.setdefault(fqn, {})
            for key, kind in kinds.items():
                # Where a slice has one element, one value for all cannot be told from a value for each.
                if kind[0] != "elements" or known.get(key, kind)[0] == "elements":
                    known[key] = kind
    return everybody


def _own_kinds(optimizer: SlicedOptimizer) -> dict[str, dict[str, list[Any]]]:
    mine: dict[str, dict[str, list[Any]]] = {}
    for entry in optimizer.slice_states():
        subject = f"The state {entry.key!r} of {entry.fqn!r}"
        mine.setdefault(entry.fqn, {})[entry.key] = describe_kind(entry.value, entry.piece.numel, subject)
    return mine


def _element_keys(
    bucket: Bucket, kinds: dict[str, dict[str, list[Any]]]
) -> Iterator[tuple[str, torch.dtype]]:
    keys: dict[str, torch.dtype] = {}
    for spec in bucket.layout.params:
        for key, kind in kinds.get(spec.fqn, {}).items():
            if kind[0] == "elements":
                keys[key] = getattr(torch, kind[1])
    yield from sorted(keys.items())


def _gather_key(
    optimizer: SlicedOptimizer, bucket: Bucket, key: str, dtype: torch.dtype, *, is_wanted: bool
) -> dict[str, Tensor]:
    """Gather one state of a bucket and let go of it before the next; return copies on the host by FQN."""
    whole = bucket.gather_shards_to_first(_shard_of_state(optimizer, bucket, key, dtype))
    if whole is None or not is_wanted:
        return {}
    pairs = zip(bucket.layout.params, bucket.views(whole), strict=True)
    return {spec.fqn: view.detach().to("cpu", copy=True) for spec, view in pairs}


def _shard_of_state(optimizer: SlicedOptimizer, bucket: Bucket, key: str, dtype: torch.dtype) -> Tensor:
    shard = empty_flat(bucket.owned_numel, dtype, bucket.flat.device).zero_()
    for param in optimizer.params():
        if optimizer.place_of(param).bucket is bucket:
            for piece, weight in optimizer.slices_of(param):
                value = optimizer.state.get(weight, {}).get(key)
                if value is not None:
                    shard[piece.shard_start : piece.shard_start + piece.numel].copy_(value)
    return shard


def _table_of(optimizer: SlicedOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return everything but the element-wise tensors as JSON.

    Raises:
        CheckpointError: It is no optimizer state, or that of other param groups or parameters.
    """
    try:
        return _read_table(optimizer, state_dict["param_groups"], state_dict["state"])
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(
            what=f"This is no optimizer state: {type(error).__name__}: {error}.",
            why="torch's own format is a dict with 'state' and 'param_groups'; rank 0 must pass it.",
            fix="Pass what `optimizer.state_dict()` returned on rank 0.",
        ) from error


def _read_table(optimizer: SlicedOptimizer, groups: Any, state: Any) -> dict[str, Any]:
    saved = [len(group["params"]) for group in groups]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if saved != here:
        raise CheckpointError(
            what=f"The saved optimizer has param groups of {saved} parameters, this one of {here}.",
            why="State is matched to parameters by their position in the groups.",
            fix="Build the optimizer as it was when the state was saved: the same param groups and "
            "parameters, those added later (add_param_group) included.",
        )
    ids = [index for group in groups for index in group["params"]]
    return {
        "groups": groups_as_json(groups),
        "ids": ids,
        "state": {
            str(index): {
                key: _describe_saved(
                    value, param.numel(), f"The saved state {key!r} of {fqn_of(optimizer, param)!r}"
                )
                for key, value in state[index].items()
            }
            for index, param in zip(ids, optimizer.params(), strict=True)
            if index in state
        },
    }


def _describe_saved(value: Any, numel: int, subject: str) -> list[Any]:
    """As `describe_kind`, of an entry that can be copied: one that cannot must not be met half-way."""
    kind = describe_kind(value, numel, subject)
    if kind[0] == "elements":
        try:
            first = value.detach().reshape(-1)[:1]
            torch.empty(first.shape, dtype=first.dtype, device="cpu").copy_(first)
        except (RuntimeError, NotImplementedError) as error:
            raise CheckpointError(
                what=f"{subject} cannot be copied: {str(error).partition(chr(10))[0]}",
                why="State is sent from rank 0 as plain tensors. Nothing has been loaded.",
                fix="Pass dense tensors that hold values, as `optimizer.state_dict()` returned them.",
            ) from error
    return kind
