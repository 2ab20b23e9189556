"""Whether what a checkpoint holds fits the engine it is loaded into, and if not, what differs.

Called by `opened`, before anything is overwritten. It compares names and shapes, reads no data, and finds
the same on every rank without asking the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from zero_strategy.checkpoint.format import Manifest, OptimizerRecord, model_tensor_name
from zero_strategy.checkpoint.parts import Parts, param_records
from zero_strategy.errors import CheckpointError
from zero_strategy.optim.full_state import fqn_of
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


def params_misfit(parts: Parts, manifest: Manifest, path: str) -> CheckpointError | None:
    """Return why the parameters here are not those of a checkpoint, or None."""
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
    return _tied_otherwise(parts, manifest)


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


def optimizers_misfit(parts: Parts, manifest: Manifest, *, by_position: bool) -> CheckpointError | None:
    """Return why the optimizers here are not the saved ones, or None; `by_position` allows new names."""
    if len(manifest.optimizers) != len(parts.optimizers):
        return _misfit(
            f"It holds {len(manifest.optimizers)} optimizers, the engine has {len(parts.optimizers)}."
        )
    for number, (optimizer, record) in enumerate(zip(parts.optimizers, manifest.optimizers, strict=True)):
        own = [[fqn_of(optimizer, param) for param in group["params"]] for group in optimizer.param_groups]
        saved = saved_groups(record)
        if record.class_name != optimizer.user_class:
            return _misfit(
                f"Optimizer {number} is {optimizer.user_class}, in the checkpoint {record.class_name}."
            )
        gap = _incomplete_state(number, manifest)
        if gap is not None:
            return gap
        if own != saved and not (by_position and _are_renamed(optimizer, own, saved, manifest)):
            return _misfit(
                f"Optimizer {number} has param groups of {[len(g) for g in own]} parameters here and of "
                f"{[len(g) for g in saved]} in the checkpoint, or the same numbers of other parameters."
            )
    return None


def saved_groups(record: OptimizerRecord) -> list[list[str]]:
    """Return the names of the parameters in each param group of a saved optimizer."""
    return [list(group["params"]) for group in record.param_groups]  # type: ignore[arg-type]


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
        fix="Build the model, the optimizers and their param groups as they were when it was saved, those "
        "added later (add_param_group) included. Nothing was loaded.",
    )
