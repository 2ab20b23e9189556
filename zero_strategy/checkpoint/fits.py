"""Whether what a checkpoint holds fits the engine it is loaded into, and if not, what differs.

Called by `opened`, before anything is overwritten. It compares names and shapes, reads no data, and finds
the same on every rank without asking the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.parts import Parts, param_records
from zero_strategy.checkpoint.records import OptimizerRecord, model_tensor_name
from zero_strategy.errors import CheckpointError
from zero_strategy.optim.full_state import fqn_of
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

_AS_IT_WAS = (
    "Build the model, the optimizers and their param groups as they were when it was saved, those added "
    "later (add_param_group) included."
)
_WEIGHTS_ALONE = "Or load the weights alone: engine.load_checkpoint(path, weights_only=True)."
_NOT_STRICT = (
    "Or load what is found by name, which the log reports: engine.load_checkpoint(path, strict=False)."
)


class OptimizerMatch(NamedTuple):
    """What of a saved optimizer belongs to one here."""

    sources: dict[str, str]  # parameters here -> those saved, whose state they take
    groups: list[dict[str, Any]] | None  # saved hyper-parameters of each group; None: those here stay
    anew: list[str]  # parameters here that were not in it
    unused: list[str]  # its parameters that are not here


# -- weights --


def params_misfit(parts: Parts, manifest: Manifest, path: str) -> CheckpointError | None:
    """Return why the parameters here are not those of a checkpoint, or None."""
    here = {spec.fqn: spec.shape for bucket in parts.buckets for spec in bucket.layout.params}
    there = {fqn: record.shape for fqn, record in manifest.params.items()}
    may_lack = left_out_here(parts, manifest)
    missing = [fqn for fqn in here if fqn not in there and fqn not in may_lack]
    unexpected = [fqn for fqn in there if fqn not in here]
    if missing or unexpected:
        return _other_names(path, missing, unexpected, manifest)
    wrong = [fqn for fqn in here if fqn in there and tuple(here[fqn]) != tuple(there[fqn])]
    if wrong:
        fqn = wrong[0]
        return _misfit(
            f"{len(wrong)} parameters have other shapes: {fqn!r} is {there[fqn]} there and {here[fqn]} here."
        )
    return _tied_otherwise(parts, manifest)


def left_out_here(parts: Parts, manifest: Manifest) -> set[str]:
    """Return the names of frozen parameters that a checkpoint leaves out and that are frozen here too."""
    frozen = {id(param) for bucket in parts.buckets if not bucket.trainable for param in bucket.params}
    named = parts.model.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in frozen} & set(manifest.frozen_left_out)


def shapes_misfit(
    own: Mapping[str, Any], stored: Mapping[str, str], manifest: Manifest
) -> CheckpointError | None:
    """Return which tensors are stored in another shape, or None; `stored` maps names to stored names."""
    shapes = {name: manifest.tensors[model_tensor_name(fqn)].shape for name, fqn in stored.items()}
    wrong = [name for name in shapes if name in own and tuple(own[name].shape) != tuple(shapes[name])]
    if not wrong:
        return None
    return _misfit(
        f"{len(wrong)} tensors have other shapes: {wrong[0]!r} is {list(shapes[wrong[0]])} there and "
        f"{list(own[wrong[0]].shape)} here."
    )


# -- optimizers --


def match_optimizers(
    parts: Parts, manifest: Manifest, *, by_position: bool, strict: bool
) -> list[OptimizerMatch]:
    """Find what of the saved optimizers belongs to those here.

    Args:
        parts: The engine.
        manifest: Of the checkpoint.
        by_position: Where all names but one's own places are the same, take a parameter for one that was
            renamed.
        strict: Refuse parameters that are in an optimizer on one side only.

    Returns:
        One match an optimizer.

    Raises:
        CheckpointError: They are others than those saved.
    """
    if len(manifest.optimizers) != len(parts.optimizers):
        raise _misfit(
            f"It holds {len(manifest.optimizers)} optimizers, the engine has {len(parts.optimizers)}.",
            _WEIGHTS_ALONE,
        )
    matches = []
    for number, (optimizer, record) in enumerate(zip(parts.optimizers, manifest.optimizers, strict=True)):
        if record.class_name != optimizer.user_class:
            raise _misfit(
                f"Optimizer {number} is {optimizer.user_class}, in the checkpoint {record.class_name}.",
                _WEIGHTS_ALONE,
            )
        match = _match(optimizer, record, manifest, by_position=by_position)
        if strict and (match.anew or match.unused):
            raise _misfit(
                f"Optimizer {number} has param groups of "
                f"{[len(group['params']) for group in optimizer.param_groups]} parameters here and of "
                f"{list(map(len, saved_groups(record)))} in the checkpoint, of which "
                f"{_some(match.anew)} are here only and {_some(match.unused)} there only.",
                _NOT_STRICT,
                _WEIGHTS_ALONE,
            )
        matches.append(match)
    return matches


def saved_groups(record: OptimizerRecord) -> list[list[str]]:
    """Return the names of the parameters in each param group of a saved optimizer."""
    return [list(group["params"]) for group in record.param_groups]  # type: ignore[arg-type]


def _match(
    optimizer: ShardedOptimizer, record: OptimizerRecord, manifest: Manifest, *, by_position: bool
) -> OptimizerMatch:
    own = [[fqn_of(optimizer, param) for param in group["params"]] for group in optimizer.param_groups]
    saved = saved_groups(record)
    here, there = list(chain.from_iterable(own)), list(chain.from_iterable(saved))
    settings = [dict(group) for group in record.param_groups]
    if by_position and _are_renamed(optimizer, own, saved, manifest):
        return OptimizerMatch(dict(zip(here, there, strict=True)), settings, [], [])
    order = _same_groups(own, saved)
    known = set(here) & set(there)
    return OptimizerMatch(
        sources={fqn: fqn for fqn in here if fqn in known},
        groups=None if order is None else [settings[number] for number in order],
        anew=[fqn for fqn in here if fqn not in known],
        unused=[fqn for fqn in there if fqn not in known],
    )


def _same_groups(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[int] | None:
    """Return, for each group here, the saved one of the same parameters; None if one of either has none."""
    if sorted(map(sorted, own)) != sorted(map(sorted, saved)):
        return None
    waiting: dict[frozenset[str], list[int]] = {}
    for number, group in enumerate(saved):
        waiting.setdefault(frozenset(group), []).append(number)
    return [waiting[frozenset(group)].pop(0) for group in own]


def _are_renamed(
    optimizer: ShardedOptimizer, own: list[list[str]], saved: list[list[str]], manifest: Manifest
) -> bool:
    """Whether the parameters differ from those saved in names only, and each is in the place it had."""
    if [len(group) for group in own] != [len(group) for group in saved]:
        return False
    here = {fqn for group in own for fqn in group}
    pairs = zip(optimizer.params(), chain.from_iterable(own), chain.from_iterable(saved), strict=True)
    return all(
        tuple(param.shape) == tuple(manifest.params[old].shape) and (new == old or old not in here)
        for param, new, old in pairs
    )


# -- errors --


def _tied_otherwise(parts: Parts, manifest: Manifest) -> CheckpointError | None:
    for fqn, record in param_records(parts).items():
        there = manifest.params[fqn].aliases if fqn in manifest.params else record.aliases
        if sorted(record.aliases) != sorted(there):
            return _misfit(
                f"Parameter {fqn!r} is tied to {sorted(there)} in the checkpoint and to "
                f"{sorted(record.aliases)} here."
            )
    return None


def _other_names(path: str, missing: list[str], unexpected: list[str], manifest: Manifest) -> CheckpointError:
    was_frozen = [fqn for fqn in missing if fqn in manifest.frozen_left_out]
    if was_frozen:
        return _misfit(
            f"{_some(was_frozen)} of the parameters that train here were frozen, and left out, when {path} "
            f"was saved with trainable_only=True.",
            _NOT_STRICT,
        )
    return _misfit(
        f"The checkpoint {path} is of another model: {len(missing)} parameters are not in it "
        f"(first: {missing[:3]}), {len(unexpected)} are in it and not in the model (first: "
        f"{unexpected[:3]}).",
        _NOT_STRICT,
    )


def _some(names: Sequence[str]) -> str:
    return f"{len(names)}" + (f" ({', '.join(map(repr, names[:3]))})" if names else "")


def _misfit(what: str, *ways_out: str) -> CheckpointError:
    return CheckpointError(
        what=what,
        why="Weights and optimizer state are matched by name.",
        fix=" ".join([_AS_IT_WAS, *ways_out, "Nothing was loaded."]),
    )
