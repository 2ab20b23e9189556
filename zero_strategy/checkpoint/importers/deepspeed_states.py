"""The contents of DeepSpeed's files, checked and under names of our own.

Called by `deepspeed` and `deepspeed_runs`. A file is mapped, not loaded: only the tensors that somebody looks
at are read. Whatever a file says is checked here for its type, so that a damaged or foreign one ends in an
error that names it. Source: the keys as DeepSpeed 0.19.8 writes them (runtime/engine.py,
runtime/bf16_optimizer.py, runtime/zero/stage_1_and_2.py and stage3.py: `state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from zero_strategy.checkpoint.importers.deepspeed_layout import Shape
from zero_strategy.checkpoint.restricted_pickle import StandIn, load_pickled
from zero_strategy.errors import CheckpointError

# DeepSpeed's own classes in its files. None of them is needed to do anything.
STAND_INS: Mapping[str, Any] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": StandIn,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": StandIn,
    "deepspeed.utils.tensor_fragment.fragment_address": StandIn,
}
BY_PARAM = 3  # the stage that cuts parameters one by one; the others cut param groups as a whole

T = TypeVar("T")


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


def read_rank(path: Path) -> RankState:
    """Read one rank's optimizer file.

    Raises:
        CheckpointError: It is damaged, or not such a file.
    """
    content = _load(path)
    own = field(path, content, "optimizer_state_dict", dict)
    # BF16_Optimizer, which stage 1 uses for bf16 with gradients in fp32, does not say its stage.
    zero_stage = int(own.get("zero_stage", 1))
    by_param = zero_stage == BY_PARAM
    weights = field(path, own, "fp32_flat_groups" if by_param else "single_partition_of_fp32_groups", list)
    base = field(path, own, "optimizer_state_dict" if by_param else "base_optimizer_state", dict | list)
    if not all(isinstance(tensor, Tensor) and tensor.dim() == 1 for tensor in weights):
        raise malformed(path, "its weights are no flat tensors")
    if isinstance(base, dict):
        states, groups = field(path, base, "state", dict), field(path, base, "param_groups", list)
    else:  # elastic checkpoints have no param groups
        states, groups = dict(enumerate(base)), []
    count = own.get("partition_count")
    counts = set(count if isinstance(count, list) else [count])
    if len(counts) != 1 or not all(type(number) is int and number > 0 for number in counts):
        raise malformed(path, f"its partition_count is {count!r}, not one number of ranks")
    config = content.get("ds_config")
    scaler = own.get("loss_scaler")
    return RankState(
        path=path,
        zero_stage=zero_stage,
        world_size=counts.pop(),
        version=str(content.get("ds_version", "unknown")),
        config=config if isinstance(config, dict) else {},
        weights=weights,
        paddings=_paddings(path, own, weights, is_cut_off="zero_stage" in own and not by_param),
        gaps=_gaps(path, own, len(weights)),
        state=[states.get(number, {}) for number in range(len(weights))],
        groups=groups,
        scaler=scaler.attributes if isinstance(scaler, StandIn) else {},
    )


def read_model(path: Path) -> ModelState:
    """Read a file of model states.

    Raises:
        CheckpointError: It is damaged, or not such a file, or of a save without ZeRO.
    """
    content = _load(path)
    if content.get("mp_world_size", 1) != 1:
        raise malformed(
            path, f"it is of {content['mp_world_size']!r} ranks of tensor or pipeline parallelism"
        )
    return ModelState(
        path=path,
        content=content,
        module=field(path, content, "module", dict),
        shapes=[_shapes(path, group) for group in field(path, content, "param_shapes", list)],
        buffer_names=field(path, content, "buffer_names", list),
        frozen_shapes=_shapes(path, content.get("frozen_param_shapes") or {}),
        frozen=dict(content.get("frozen_param_fragments") or {}),
        shared=dict(content.get("shared_params") or {}),
    )


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


def _load(path: Path) -> dict[str, Any]:
    content = load_pickled(path, STAND_INS)
    if not isinstance(content, dict):
        raise malformed(path, f"it holds {type(content).__name__}, not a dict")
    return content


def _paddings(path: Path, own: Mapping[str, Any], weights: list[Tensor], *, is_cut_off: bool) -> list[int]:
    """Return the elements that were cut off the end of each flat tensor when it was saved."""
    if not is_cut_off:
        return [0] * len(weights)
    paddings = field(path, own, "group_paddings", list)
    if len(paddings) != len(weights) or not all(type(number) is int and number >= 0 for number in paddings):
        raise malformed(path, f"its group_paddings are {paddings!r:.100}, for {len(weights)} groups")
    return list(paddings)


def _gaps(path: Path, own: Mapping[str, Any], num_groups: int) -> list[list[int]]:
    gaps = own.get("param_alignment_paddings")
    if gaps is None:
        return [[] for _ in range(num_groups)]
    flat = [number for group in gaps for number in group]
    if len(gaps) != num_groups or not all(type(number) is int and number >= 0 for number in flat):
        raise malformed(path, f"its param_alignment_paddings are {gaps!r:.100}, for {num_groups} groups")
    return [list(group) for group in gaps]


def _shapes(path: Path, group: object) -> dict[str, Shape]:
    if not isinstance(group, dict):
        raise malformed(path, f"its shapes are {type(group).__name__}, not a dict")
    for name, shape in group.items():
        is_shape = isinstance(shape, tuple) and all(type(size) is int and size >= 0 for size in shape)
        if not isinstance(name, str) or not is_shape:
            raise malformed(path, f"the shape of {name!r} is {shape!r:.100}")
    return {name: tuple(shape) for name, shape in group.items()}
