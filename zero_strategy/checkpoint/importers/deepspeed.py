"""A checkpoint of DeepSpeed (ZeRO stage 1, 2 or 3) as an `Imported`: records of all that is in it.

Which files there are is `deepspeed_files`' business, what they say `deepspeed_states`', where elements lie
`deepspeed_layout`'s, the optimizer's class and settings `deepspeed_optimizer`'s, and what each rank has saved
`deepspeed_runs`'. DeepSpeed is neither imported nor needed.

[Note: Where weights come from]
Trained weights come from the fp32 masters of the optimizer files. Frozen ones, which have no master, from
`frozen_param_fragments` (whole at stage 2, a part a rank at stage 3) or, at stage 1, from the module's state
dict; so do buffers, and parameters that no optimizer had. At stage 3 the state dict holds empty placeholders
for what is sharded, and serves for names, their order and dtypes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue
from torch import Tensor

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.extra import encode_extra
from zero_strategy.checkpoint.full_weights import EXTRA_STATE
from zero_strategy.checkpoint.hf import read_config
from zero_strategy.checkpoint.importers.deepspeed_files import Files, check_complete, find_files
from zero_strategy.checkpoint.importers.deepspeed_layout import Shape
from zero_strategy.checkpoint.importers.deepspeed_optimizer import find_class, settings_of, state_of
from zero_strategy.checkpoint.importers.deepspeed_runs import RankReader, group_of, kind_of
from zero_strategy.checkpoint.importers.deepspeed_states import (
    ModelState,
    RankState,
    is_plain,
    malformed,
    naming,
    read_model,
    read_rank,
)
from zero_strategy.checkpoint.importers.imported import Imported, files_id
from zero_strategy.checkpoint.records import BufferRecord, HFRecord, OptimizerRecord, ParamRecord
from zero_strategy.errors import CheckpointError
from zero_strategy.optim.full_state import as_json

# What DeepSpeed itself puts into the model's states; the rest is the user's client_state.
_OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "csr_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_config",
    "ds_version",
}
_KEPT_KEYS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_DTYPE_BLOCKS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}  # of a config -> dtype


class Wanted(NamedTuple):
    """What the user says of the optimizer, and of what else there is.

    Attributes:
        optimizer: The class of the optimizer; None: as the checkpoint says.
        weights_only: Leave the optimizer out.
        drop_unknown: Leave out objects that are neither tensors nor plain containers.
    """

    optimizer: str | None = None
    weights_only: bool = False
    drop_unknown: bool = False


def read_deepspeed(folder: Path, wanted: Wanted) -> Imported:
    """Describe a checkpoint of DeepSpeed.

    Args:
        folder: Of the tag.
        wanted: By the user.

    Raises:
        CheckpointError: Files are missing, damaged, of several saves, or of another parallelism.
    """
    files = find_files(folder)
    first = read_rank(min(files.optim.items())[1], drop_unknown=wanted.drop_unknown)
    check_complete(files, first.world_size, is_model_sharded=first.cuts_by_param)
    model = read_model(files.model[0], drop_unknown=wanted.drop_unknown)
    with naming(folder):
        return _describe(files, first, model, wanted)


def _describe(files: Files, first: RankState, model: ModelState, wanted: Wanted) -> Imported:
    notes: list[str] = []
    aliases = _aliases(model)
    whole = _whole_params(first, model, aliases, notes)
    buffers = {name: model.module[name] for name in model.buffer_names}
    _check_names(model, {**whole, **buffers})
    params = _param_records(first, model, whole, aliases)
    record = None if wanted.weights_only else _optimizer_record(first, model, wanted.optimizer, notes)
    class_name = None if record is None else record.class_name
    reader = RankReader(
        files, first, model, {**whole, **buffers}, class_name, drop_unknown=wanted.drop_unknown
    )
    is_fp16 = any(param.dtype == "float16" for param in params.values())
    return Imported(
        source={
            "format": "deepspeed",
            "version": first.version,
            "stage": first.zero_stage,
            "world_size": first.world_size,
            "tag": files.folder.name,
            "files_id": files_id(files.all),
        },
        world_size=first.world_size,
        stage=first.zero_stage,
        params=params,
        buffers={
            name: BufferRecord(shape=tuple(buffer.shape), dtype=dtype_name(buffer.dtype))
            for name, buffer in buffers.items()
        },
        optimizers=() if record is None else (record,),
        loss_scaler=_scaler(first, model) if is_fp16 and record is not None else None,
        extra=_extra(model, notes),
        module_states=_module_states(model, notes if wanted.drop_unknown else None),
        hf=_hf_record(files.folder.parent),
        runs_of=reader.runs_of,
        notes=notes,
    )


# -- the model --


def _aliases(model: ModelState) -> dict[str, tuple[str, ...]]:
    """Return the other names of tied parameters, by their names.

    DeepSpeed finds ties by address, and takes empty parameters for tied; those have shapes of their own.
    """
    stored = {name for group in (*model.shapes, model.frozen_shapes) for name in group}
    found: dict[str, tuple[str, ...]] = {}
    for alias, name in model.shared.items():
        if alias not in stored:
            found[name] = (*found.get(name, ()), alias)
    return found


def _whole_params(
    first: RankState, model: ModelState, aliases: Mapping[str, tuple[str, ...]], notes: list[str]
) -> dict[str, Tensor]:
    """Return the parameters that were saved whole. See [Note: Where weights come from]."""
    known = {name for group in model.shapes for name in group} | set(model.buffer_names)
    known |= {alias for others in aliases.values() for alias in others}
    whole: dict[str, Tensor] = {}
    if first.cuts_by_param:
        known |= set(model.frozen_shapes)
    else:
        whole |= {name: model.frozen[name] for name in model.frozen_shapes}
    lost = []
    for name, value in model.module.items():
        if name in known or name in whole or not isinstance(value, Tensor) or name.endswith(EXTRA_STATE):
            continue
        if first.cuts_by_param and value.numel() == 0:
            lost.append(name)
        else:
            whole[name] = value
    if lost:
        notes.append(
            f"The source holds no values of {len(lost)} parameters that no optimizer had (first: {lost[:3]})."
        )
    return whole


def _check_names(model: ModelState, whole: Mapping[str, object]) -> None:
    """Check that everything that has a name is a tensor, and has one place."""
    for name, value in whole.items():
        if not is_plain(value):
            raise malformed(model.path, f"{name!r} is {type(value).__name__}, and not a plain tensor")
    names = [*chain.from_iterable(model.shapes), *{*model.frozen_shapes, *whole}]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise malformed(model.path, f"it has {twice[0]!r} in two places")


def _param_records(
    first: RankState, model: ModelState, whole: Mapping[str, Tensor], aliases: Mapping[str, tuple[str, ...]]
) -> dict[str, ParamRecord]:
    """Return the records of all parameters, in the order of the model's state dict."""
    trained: dict[str, Shape] = {name: shape for group in model.shapes for name, shape in group.items()}
    shapes = trained | model.frozen_shapes | {name: tuple(value.shape) for name, value in whole.items()}
    in_order = [name for name in model.module if name in shapes]
    blocks = [dtype for key, dtype in _DTYPE_BLOCKS.items() if _is_enabled(first.config, key)]
    default = blocks[0] if blocks else "float32"
    return {
        name: ParamRecord(
            shape=shapes[name],
            dtype=dtype_name(model.module[name].dtype) if name in model.module else default,
            trainable=name in trained,
            aliases=aliases.get(name, ()),
        )
        for name in dict.fromkeys((*in_order, *shapes))
    }


# -- the optimizer --


def _optimizer_record(
    first: RankState, model: ModelState, wanted: str | None, notes: list[str]
) -> OptimizerRecord:
    if not first.groups:
        raise CheckpointError(
            what=f"{first.path} holds no param groups: it was saved with elastic_checkpoint.",
            why="So the settings of the optimizer are not in it.",
            fix="Import the weights alone (--weights-only), or save it again without elastic_checkpoint.",
        )
    found = find_class(first.groups, first.config, wanted)
    notes += [found.note] if found.note else []
    order = {name: position for position, name in enumerate(model.module)}
    groups: list[dict[str, JsonValue]] = []
    for group in first.groups:
        names: list[JsonValue] = [name for number in group["params"] for name in model.shapes[number]]
        if _is_round_robin(first):
            names.sort(key=lambda name: order.get(str(name), 0))
        if names:  # a group of frozen parameters only is empty
            groups.append({**settings_of(group, found.name), "params": names})
    plain: dict[str, dict[str, JsonValue]] = {}
    for number, shapes in enumerate(model.shapes):
        state = _plain_state(first, number, found.name, notes)
        plain |= {name: state for name in shapes if state}
    return OptimizerRecord(class_name=found.name, param_groups=tuple(groups), plain_state=plain)


def _plain_state(first: RankState, number: int, class_name: str, notes: list[str]) -> dict[str, JsonValue]:
    """Return what is no tensor in the state of a flat tensor; note what cannot be kept."""
    found: dict[str, JsonValue] = {}
    for key, value in state_of(first.state[number], group_of(first, number), class_name).items():
        kind = kind_of(value, first.weights[number].numel(), first.part_numel(number))
        try:
            if kind == "plain":
                found[key] = as_json(value, f"The state {key!r}")
        except CheckpointError:
            kind = "other"
        note = f"The state {key!r} of the optimizer is left out: it is no value, nor one for each element."
        if kind == "other" and note not in notes:
            notes.append(note)
    return found


def _is_round_robin(first: RankState) -> bool:
    """Whether parameters lie in another order than in their param group, which is not saved then."""
    block = first.config.get("zero_optimization")
    return isinstance(block, Mapping) and bool(block.get("round_robin_gradients")) and not first.cuts_by_param


def _scaler(first: RankState, model: ModelState) -> dict[str, float | int] | None:
    """Return the state of a loss scaler as ours has it; see [Note: Loss scaling] in loss_scaler.py."""
    if "cur_scale" not in first.scaler:
        return None
    num_steps = int(first.scaler.get("cur_iter", model.content.get("global_steps", 0)))
    last_overflow = int(first.scaler.get("last_overflow_iter", -1))
    return {
        "scale": float(first.scaler["cur_scale"]),
        "num_steps": num_steps,
        "good_steps": num_steps - last_overflow - 1,
        "hysteresis_left": int(first.scaler.get("cur_hysteresis", 1)),
    }


# -- what else there is --


def _extra(model: ModelState, notes: list[str]) -> dict[str, object]:
    """Return what `load_checkpoint` is to return: counters, the scheduler, the user's client_state."""
    kept = {key: model.content[key] for key in _KEPT_KEYS if model.content.get(key) is not None}
    client = {key: value for key, value in model.content.items() if key not in _OWN_KEYS}
    return {**_storable(kept, "", notes), "client_state": _storable(client, "client_state", notes)}


def _module_states(model: ModelState, notes: list[str] | None) -> dict[str, object]:
    """Return what modules keep beside tensors; with notes, what cannot be stored is left out and noted."""
    found = {name: value for name, value in model.module.items() if name.rpartition(".")[2] == EXTRA_STATE}
    return found if notes is None else _storable(found, "module", notes)


def _storable(entries: Mapping[Any, object], where: str, notes: list[str]) -> dict[str, object]:
    """Return the entries that extra state can hold, and note the others."""
    found: dict[str, object] = {}
    for key, value in entries.items():
        try:
            encode_extra({key: value})
        except CheckpointError as error:
            reason = error.what.partition(": ")[2]
            notes.append(f"{where}[{key!r}] is left out, as it is not plain data: {reason}")
        else:
            found[key] = value
    return found


def _hf_record(outer: Path) -> HFRecord | None:
    """Return the configs that a Trainer of transformers leaves beside the folder of a tag."""
    if not (outer / "config.json").is_file():
        return None
    config = read_config(outer / "config.json")
    if "model_type" not in config:
        return None
    generation = outer / "generation_config.json"
    return HFRecord(
        prefix="", config=config, generation_config=read_config(generation) if generation.is_file() else None
    )


def _is_enabled(config: Mapping[str, Any], key: str) -> bool:
    block = config.get(key)
    return isinstance(block, Mapping) and bool(block.get("enabled"))
