"""The contents of DeepSpeed's files, checked and under names of our own.

Called by `deepspeed` and `deepspeed_runs`. A file is mapped, not loaded: only the tensors that somebody looks
at are read. Whatever a file says is checked here for its type, so that a damaged or foreign one ends in an
error that names it. Source: the keys as DeepSpeed 0.19.8 writes them (runtime/engine.py,
runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py and stage3.py: `state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from zero_strategy.checkpoint.importers.deepspeed_layout import Shape
from zero_strategy.checkpoint.restricted_pickle import StandIn, load_pickled
from zero_strategy.errors import CheckpointError, ZeroError, first_line

# DeepSpeed's own classes in its files. None of them is needed to do anything.
STAND_INS: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": StandIn,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": StandIn,
    "deepspeed.utils.tensor_fragment.fragment_address": StandIn,
}
BY_PARAM = 3  # the stage that cuts parameters one by one; the others cut param groups as a whole


class RankState(NamedTuple):
    """What one rank's optimizer file holds. A flat tensor is a param group's, at stage 3 a part of one's."""

    path: Path
    zero_stage: int
    world_size: int
    version: str
    config: Mapping[str, Any]  # {} where it was given as the name of a file
    weights: list[Tensor]  # of each flat tensor: [its numel without the padding at its end] masters
    paddings: list[int]  # of each flat tensor: elements cut off at its end
    gaps: list[list[int]]  # of each flat tensor: elements between its parameters; [] for none
    state: list[dict[str, Any]]  # of each flat tensor: the optimizer's
    groups: list[dict[str, Any]]  # param groups; "params" are numbers of flat tensors
    scaler: dict[str, Any]  # attributes of the loss scaler; {} without one

    @property
    def cuts_by_param(self) -> bool:
        """Whether each parameter is cut by itself."""
        return self.zero_stage == BY_PARAM

    def part_numel(self, number: int) -> int:
        """Elements of a flat tensor on this rank, padding included."""
        return self.weights[number].numel() + self.paddings[number]


class ModelState(NamedTuple):
    """What a file of model states holds."""

    path: Path
    content: dict[str, Any]  # all of it
    module: dict[str, Any]  # the state dict; at stage 3 with placeholders
    shapes: list[dict[str, Shape]]  # of each flat tensor: its parameters, in their order
    buffer_names: list[str]
    frozen_shapes: dict[str, Shape]
    frozen: dict[str, Tensor]  # whole, or this rank's part of each
    shared: dict[str, str]  # other name of a tied parameter -> its name


def read_rank(path: Path, *, drop_unknown: bool = False) -> RankState:
    """Read one rank's optimizer file.

    Args:
        path: The file.
        drop_unknown: See `load_pickled`.

    Raises:
        CheckpointError: It is damaged, or not such a file.
    """
    content = _load(path, drop_unknown)
    with naming(path):
        return _rank_state(path, content)


def read_model(path: Path, *, drop_unknown: bool = False) -> ModelState:
    """Read a file of model states.

    Args:
        path: The file.
        drop_unknown: See `load_pickled`.

    Raises:
        CheckpointError: It is damaged, or not such a file, or of a save without ZeRO.
    """
    content = _load(path, drop_unknown)
    with naming(path):
        if content.get("mp_world_size", 1) != 1:
            of_ranks = f"{content['mp_world_size']!r:.100} ranks of tensor or pipeline parallelism"
            raise malformed(path, f"it is of {of_ranks}")
        return ModelState(
            path=path,
            content=content,
            module=_by_name(path, {"module": field(path, content, "module", dict)}, "module", object),
            shapes=[_shapes(path, group) for group in field(path, content, "param_shapes", list)],
            buffer_names=_names(path, content, "buffer_names"),
            frozen_shapes=_shapes(path, content.get("frozen_param_shapes") or {}),
            frozen=_by_name(path, content, "frozen_param_fragments", Tensor),
            shared=_by_name(path, content, "shared_params", str),
        )


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have whatever goes wrong with the content of a file end in an error that names the file.

    What a file says is checked where it is read; this is for what nobody has thought of.

    Raises:
        CheckpointError: In the place of any other error.
    """
    try:
        yield
    except ZeroError:
        raise
    except Exception as error:
        raise malformed(path, f"{type(error).__name__}: {first_line(error)[:200]}") from error


def field(path: Path, content: Mapping[str, Any], key: str, kind: Any) -> Any:
    """Return an entry of a file.

    Raises:
        CheckpointError: It is missing, or of another type.
    """
    if not isinstance(content.get(key), kind):
        found = type(content[key]).__name__ if key in content else "missing"
        raise malformed(path, f"its {key!r} is {found}")
    return content[key]


def malformed(path: Path, why: str) -> CheckpointError:
    """Return the error of a file that does not hold what it should."""
    return CheckpointError(
        what=f"{path} is not a file of a checkpoint of DeepSpeed's ZeRO that can be imported.",
        why=f"Checked on reading: {why}.",
        fix="Use the files as DeepSpeed's save_checkpoint has written them, with ZeRO stage 1, 2 or 3.",
    )


# -- helpers --


def _load(path: Path, drop_unknown: bool) -> dict[str, Any]:
    content = load_pickled(path, STAND_INS, drop_unknown=drop_unknown)
    if not isinstance(content, dict):
        raise malformed(path, f"it holds {type(content).__name__}, not a dict")
    return content


def _rank_state(path: Path, content: Mapping[str, Any]) -> RankState:
    own = field(path, content, "optimizer_state_dict", dict)
    # BF16_Optimizer, which stage 1 uses for bf16 with gradients in fp32, does not say its stage.
    zero_stage = own.get("zero_stage", 1)
    if type(zero_stage) is not int or zero_stage not in (1, 2, BY_PARAM):
        raise malformed(path, f"its zero_stage is {zero_stage!r:.100}")
    by_param = zero_stage == BY_PARAM
    weights = field(path, own, "fp32_flat_groups" if by_param else "single_partition_of_fp32_groups", list)
    if not all(is_plain(tensor) and tensor.dim() == 1 and tensor.is_floating_point() for tensor in weights):
        raise malformed(path, "its weights are no flat tensors")
    base = field(path, own, "optimizer_state_dict" if by_param else "base_optimizer_state", dict | list)
    if isinstance(base, dict):
        states, groups = field(path, base, "state", dict), _groups(path, base, len(weights))
    else:  # elastic checkpoints have no param groups
        states, groups = dict(enumerate(base)), []
    config, scaler = content.get("ds_config"), own.get("loss_scaler")
    return RankState(
        path=path,
        zero_stage=zero_stage,
        world_size=_world_size(path, own.get("partition_count")),
        version=str(content.get("ds_version", "unknown")),
        config=config if isinstance(config, dict) else {},
        weights=weights,
        paddings=_paddings(path, own, weights, is_cut_off="zero_stage" in own and not by_param),
        gaps=_gaps(path, own, len(weights)),
        state=[_by_name(path, states, number, object) for number in range(len(weights))],
        groups=groups,
        scaler=scaler.attributes if isinstance(scaler, StandIn) else {},
    )


def is_plain(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor with elements in memory, as those that DeepSpeed writes are."""
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return False
    return value.layout is torch.strided and not value.is_quantized


def _world_size(path: Path, count: object) -> int:
    """Return the number of ranks, which is given once or for each param group."""
    first, *others = count if isinstance(count, list) and count else [count]
    if type(first) is not int or first < 1 or any(number != first for number in others):
        raise malformed(path, f"its partition_count is {count!r:.100}, not one number of ranks")
    return first


def _groups(path: Path, base: Mapping[str, Any], num_flat: int) -> list[dict[str, Any]]:
    """Return the param groups, whose parameters are numbers of flat tensors."""
    groups: list[dict[str, Any]] = field(path, base, "param_groups", list)
    for group in groups:
        numbers = group.get("params") if isinstance(group, dict) else None
        if not isinstance(numbers, list) or not all(
            type(number) is int and 0 <= number < num_flat for number in numbers
        ):
            raise malformed(path, f"a param group has the parameters {numbers!r:.100}, of {num_flat}")
    return groups


def _by_name(path: Path, content: Mapping[Any, Any], key: object, kind: type) -> dict[str, Any]:
    """Return an entry that maps names to values of a type; {} if it is missing."""
    entry = content.get(key)
    if entry is None:
        return {}
    if not isinstance(entry, dict):
        raise malformed(path, f"its {key!r} is {type(entry).__name__}, not a dict")
    for name, value in entry.items():
        if not isinstance(name, str) or not name:
            raise malformed(path, f"its {key!r} has the key {name!r:.100}")
        if not isinstance(value, kind):
            raise malformed(path, f"its {key!r} has {name!r}, which is {type(value).__name__}")
        if isinstance(value, Tensor) and not is_plain(value):
            raise malformed(path, f"its {key!r} has {name!r}, a tensor without elements in memory")
    return dict(entry)


def _names(path: Path, content: Mapping[str, Any], key: str) -> list[str]:
    names: list[str] = field(path, content, key, list)
    if not all(isinstance(name, str) for name in names):
        raise malformed(path, f"its {key!r} is {names!r:.100}, not a list of names")
    return names


def _paddings(path: Path, own: Mapping[str, Any], weights: list[Tensor], *, is_cut_off: bool) -> list[int]:
    """Return the elements that were cut off the end of each flat tensor when it was saved."""
    if not is_cut_off:
        return [0] * len(weights)
    paddings = field(path, own, "group_paddings", list)
    if len(paddings) != len(weights) or not all(map(_is_count, paddings)):
        raise malformed(path, f"its group_paddings are {paddings!r:.100}, for {len(weights)} groups")
    return list(paddings)


def _gaps(path: Path, own: Mapping[str, Any], num_groups: int) -> list[list[int]]:
    gaps = own.get("param_alignment_paddings")
    if gaps is None:
        return [[] for _ in range(num_groups)]
    are_lists = isinstance(gaps, list) and all(isinstance(group, list) for group in gaps)
    if not are_lists or len(gaps) != num_groups or not all(map(_is_count, chain.from_iterable(gaps))):
        raise malformed(path, f"its param_alignment_paddings are {gaps!r:.100}, for {num_groups} groups")
    return [list(group) for group in gaps]


def _shapes(path: Path, group: object) -> dict[str, Shape]:
    if not isinstance(group, dict):
        raise malformed(path, f"its shapes are {type(group).__name__}, not a dict")
    for name, shape in group.items():
        is_shape = isinstance(shape, tuple) and all(map(_is_count, shape))
        if not isinstance(name, str) or not name or not is_shape:
            raise malformed(path, f"the shape of {name!r} is {shape!r:.100}")
    return {name: tuple(shape) for name, shape in group.items()}


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
