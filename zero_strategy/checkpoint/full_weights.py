"""Whole weights in the model's own names, gathered to rank 0 and scattered from it, piece by piece.

Called by the engine, for `full_state_dict` and `load_full_state_dict`, and by `parts`, `save` and `opened`
for what modules keep beside parameters and buffers. It knows buckets and masters, and must not know the files
of a checkpoint, optimizers or the stage.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_strategy.bucket import Bucket
from zero_strategy.buffers import empty_flat
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.together import agreed
from zero_strategy.errors import CheckpointError
from zero_strategy.precision import Masters, unrounded

EXTRA_STATE = "_extra_state"  # torch's own name for it in a state dict


class LoadResult(NamedTuple):
    """What did not match."""

    missing_keys: list[str]  # in the model, not in what was loaded
    unexpected_keys: list[str]  # the other way round


class MorePreciseWeights(Mapping[str, Any]):
    """Weights with the masters of some of them, in fp32, each computed when somebody asks for it.

    A whole model in fp32 beside the 16-bit one it comes from may be more than a rank can hold.
    """

    def __init__(self, weights: Mapping[str, Any], master_of: Callable[[str], Tensor | None]) -> None:
        """Keep what there is to compute from.

        Args:
            weights: May have been edited since the masters were stored. See `precision.unrounded`.
            master_of: Returns a weight's master, or None; one of another shape does not count.
        """
        self._weights = weights
        self._master_of = master_of

    def __getitem__(self, name: str) -> Any:
        weight = self._weights[name]
        master = self._master_of(name) if isinstance(weight, Tensor) else None
        if master is None or master.shape != weight.shape:
            return weight
        return unrounded(weight, master)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def names_in(model: nn.Module) -> dict[str, Any]:
    """Return `model.state_dict()` with the tensors themselves, which works while they are sharded."""
    return model.state_dict(keep_vars=True)


def module_extra_states(model: nn.Module) -> dict[str, Any]:
    """Return what modules keep beside parameters and buffers, by its name in `state_dict()`.

    Those are the modules that override `get_extra_state`, as torch offers it to them.
    """
    return {
        f"{prefix}.{EXTRA_STATE}" if prefix else EXTRA_STATE: module.get_extra_state()
        for prefix, module in model.named_modules(remove_duplicate=False)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def set_module_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give modules back what `module_extra_states` returned."""
    for name, state in states.items():
        model.get_submodule(name[: -len(EXTRA_STATE)].rstrip(".")).set_extra_state(state)


def gather(
    model: nn.Module,
    buckets: Sequence[Bucket],
    collectives: Collectives,
    values_of: Callable[[Bucket], Tensor | None] | None = None,
    *,
    dtype: torch.dtype | None,
    trainable_only: bool,
) -> dict[str, Any]:
    """Return whole CPU tensors on rank 0, {} elsewhere. Collective. See `ZeroEngine.full_state_dict`.

    Args:
        model: Whose names.
        buckets: Where its parameters are.
        collectives: For the gathers.
        values_of: Gives other values than the parameters' for a bucket, [owned_numel]: masters, averages.
        dtype: Of the result; None: the parameters' own.
        trainable_only: Leave out frozen parameters and buffers.
    """
    whole: dict[int, Tensor] = {}
    for bucket in buckets:
        if trainable_only and not bucket.trainable:
            continue
        whole.update(_gather_bucket(bucket, collectives.rank == 0, values_of, dtype))
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
    *,
    strict: bool = False,
) -> LoadResult:
    """Take over rank 0's whole weights and buffers. Collective. See `ZeroEngine.load_full_state_dict`."""
    own = names_in(model)
    extra_names = module_extra_states(model).keys()
    is_source = collectives.rank == 0
    agreed(collectives, lambda: require_fit(own, extra_names, state_dict) if is_source else None)
    given: list[str] = collectives.broadcast_json(names_given(state_dict) if is_source else None)
    present = set(given)
    result = LoadResult(
        [name for name in own if name not in present], [name for name in given if name not in own]
    )
    if strict:
        require_names(result)
    places = {id(param): (bucket, i) for bucket in buckets for i, param in enumerate(bucket.params)}
    done: set[int] = set()
    for name, value in own.items():
        if name not in present or id(value) in done or name in extra_names or not isinstance(value, Tensor):
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
    for bucket in buckets:
        bucket.state.note_write(bucket.is_whole)
    of_modules = {name: state_dict[name] for name in extra_names if name in state_dict} if is_source else {}
    set_module_extra_states(model, _broadcast_states(of_modules, collectives))
    return result


def write_param(bucket: Bucket, index: int, whole: Tensor, masters: Masters) -> None:
    """Write one parameter's values, known whole on every rank, wherever they are held.

    Shapes:
        whole [param.numel], the master's dtype or the parameter's
    """
    if bucket.is_whole:
        spec = bucket.layout.params[index]
        bucket.flat[spec.start : spec.start + spec.numel].copy_(whole)
    master = masters.existing(bucket)
    for piece in bucket.slices:
        if piece.param_index == index:
            values = whole[piece.param_start : piece.param_start + piece.numel]
            bucket.param_shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)
            if master is not None:
                master.weights[piece.shard_start : piece.shard_start + piece.numel].copy_(values)


def require_fit(own: Mapping[str, Any], extra_names: Collection[str], given: Mapping[str, Any]) -> None:
    """Raise if what rank 0 was given cannot be loaded, before anything is; names need not match.

    Args:
        own: `names_in` the model.
        extra_names: Those of the extra states of modules.
        given: Looked up name by name.

    Raises:
        CheckpointError: It is no mapping, something is no tensor or of another shape, or an extra state
            cannot be sent.
    """
    names_given(given)
    tensors = {name: value for name, value in own.items() if name in given and name not in extra_names}
    wrong = [said for name, value in tensors.items() for said in _misfit(name, given[name], value)]
    if not wrong:
        _packed({name: given[name] for name in extra_names if name in given})
        return
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise CheckpointError(
        what=f"{len(wrong)} tensors do not fit the model: " + "; ".join(wrong[:3]) + more + ".",
        why="Weights are matched by name, and a name must mean the same tensor on both sides.",
        fix="Load them into the model they were saved from. Nothing was loaded.",
    )


def names_given(given: Mapping[str, Any]) -> list[str]:
    """Return the names in what rank 0 was given.

    Raises:
        CheckpointError: It is no mapping, or a key is no name.
    """
    found = f"a {type(given).__name__}" if not isinstance(given, Mapping) else ""
    if not found:
        odd = next((name for name in given if not isinstance(name, str)), None)
        found = "" if odd is None else f"a mapping with the key {odd!r}"
    if found:
        raise CheckpointError(
            what=f"Rank 0 was given {found} instead of a state dict.",
            why="Its values are what all ranks take over.",
            fix="Pass a dict of names and tensors, as `model.state_dict()` returns it, on rank 0 at least.",
        )
    return list(given)


def require_names(result: LoadResult) -> None:
    """Raise if a name has no match, before anything is loaded.

    Args:
        result: What does not match; the same on all ranks.

    Raises:
        CheckpointError: There is a missing or an unexpected name.
    """
    if not result.missing_keys and not result.unexpected_keys:
        return
    raise CheckpointError(
        what=f"The weights do not fit the model: missing {result.missing_keys[:5]}, unexpected "
        f"{result.unexpected_keys[:5]} ({len(result.missing_keys)} and {len(result.unexpected_keys)} names).",
        why="With strict=True every name must have its match. Nothing was loaded.",
        fix="Load them into the model they were saved from, or pass strict=False and look at the result.",
    )


def scatter_shards(
    model: nn.Module, shards: Mapping[Bucket, Tensor], state_dict: Mapping[str, Any], collectives: Collectives
) -> None:
    """Write rank 0's whole values into shards that are laid out as buckets are. Collective.

    Shapes:
        shards: [owned_numel] each; a parameter that is not in `state_dict` keeps its values.

    Raises:
        CheckpointError: A name is not the model's, or its parameter has another shape; on all ranks.
    """
    is_source = collectives.rank == 0
    own = names_in(model)
    agreed(collectives, lambda: _require_known_and_fit(own, state_dict) if is_source else None)
    given = set(collectives.broadcast_json(list(state_dict) if is_source else None))
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    for bucket, shard in shards.items():
        for index, param in enumerate(bucket.params):
            name = names[id(param)]
            if name not in given:
                continue
            whole = _received(state_dict, name, shard.dtype, shard, collectives, numel=param.numel())
            for piece in bucket.slices:
                if piece.param_index == index:
                    values = whole[piece.param_start : piece.param_start + piece.numel]
                    shard[piece.shard_start : piece.shard_start + piece.numel].copy_(values)


def whole_on_first(bucket: Bucket) -> Tensor | None:
    """Return the parameters of a bucket, whole, on rank 0. Collective where they are sharded.

    Not the whole buffer of a sharded bucket, which may hold what a user has written for a look. The other
    ranks, who need no room for it, get None, or what they have whole anyway.
    """
    if not bucket.policy.shard_params:
        return bucket.flat
    return bucket.gather_shards_to_first(bucket.param_shard)


# -- helpers --


def _gather_bucket(
    bucket: Bucket,
    is_wanted: bool,
    values_of: Callable[[Bucket], Tensor | None] | None,
    dtype: torch.dtype | None,
) -> dict[int, Tensor]:
    """Gather one bucket and let go of it before the next; return copies by the ids of its parameters."""
    values = None if values_of is None else values_of(bucket)
    flat = whole_on_first(bucket) if values is None else bucket.gather_shards_to_first(values)
    if flat is None or not is_wanted:
        return {}
    pairs = zip(bucket.params, bucket.views(flat), strict=True)
    kept = dtype or bucket.flat.dtype  # values of a wider dtype are rounded as parameters are
    return {id(param): _to_host(view, kept) for param, view in pairs}


def _broadcast_states(states: dict[str, Any], collectives: Collectives) -> dict[str, Any]:
    """Return rank 0's states of modules; never unpickles more than tensors and plain values."""
    payload = collectives.broadcast_bytes(_packed(states))
    received: dict[str, Any] = torch.load(io.BytesIO(payload), weights_only=True)
    return received


def _packed(states: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(states, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except (pickle.PickleError, TypeError, AttributeError) as raised:
        raise CheckpointError(
            what=f"The extra state of {sorted(states)} cannot be sent to the other ranks: {raised}",
            why="Only tensors and plain values are unpickled, so that loading runs no code.",
            fix="Let get_extra_state return tensors, numbers, strings, and lists and dicts of these. Nothing "
            "was loaded.",
        ) from raised
    return buffer.getvalue()


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
    is_source = collectives.rank == 0
    # What rank 0 looks up may be read or computed only now, and fail.
    agreed(collectives, lambda: whole.copy_(state_dict[name].detach().reshape(-1)) if is_source else None)
    collectives.broadcast(whole)
    return whole


def _to_host(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype if dtype is not None and value.is_floating_point() else value.dtype
    return value.detach().to("cpu", target, copy=True).contiguous()


def _require_known_and_fit(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    require_fit(own, (), given)
    unknown = [name for name in given if name not in own]
    if unknown:
        raise CheckpointError(
            what=f"The model has no parameters {unknown[:3]} ({len(unknown)} names in all).",
            why="Values are matched by name.",
            fix="Load them into the model they were saved from. Nothing was loaded.",
        )


def _misfit(name: str, found: Any, wanted: Any) -> list[str]:
    """Return what is wrong with one value, if anything."""
    if not isinstance(found, Tensor):
        return [f"{name!r} is a {type(found).__name__}, not a tensor"]
    if found.shape != wanted.shape:
        return [f"{name!r} has shape {tuple(found.shape)}, the model's {tuple(wanted.shape)}"]
    return []
