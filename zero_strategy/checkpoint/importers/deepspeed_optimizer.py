"""What an optimizer of DeepSpeed is called here, and its settings and state as torch's class has them.

Called by `deepspeed` and `deepspeed_runs`. A checkpoint says neither the class of its optimizer nor whether
DeepSpeed's own Adam decouples the weight decay: it holds param groups and a config, from which this finds the
class that goes on. It knows no file.

[Note: Which class]
torch's optimizers have settings of their own: `nesterov` is SGD's, and so on. DeepSpeed's FusedAdam and
DeepSpeedCPUAdam are AdamW unless told otherwise, which the config says where DeepSpeed has built them from it
(`optimizer.type` and `adam_w_mode`); one that the user has built says nothing, and is taken for AdamW.
Source: deepspeed 0.19.8, runtime/engine.py (`_configure_basic_optimizer`), ops/adam.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor

from zero_strategy.errors import CheckpointError
from zero_strategy.optim.full_state import as_json

# A setting that only this class of torch.optim has.
_MARKS = {
    "nesterov": "SGD",
    "momentum_decay": "NAdam",
    "centered": "RMSprop",
    "lr_decay": "Adagrad",
    "rho": "Adadelta",
    "etas": "Rprop",
    "t0": "ASGD",
}
# Of what `optimizer.type` of a config says, in lower case: the class here.
_TYPES = {"adam": "Adam", "adamw": "AdamW", "lion": "Lion", "sgd": "SGD", "adagrad": "Adagrad"}
# How a step is computed, not what: the user's optimizer decides.
_HOW = {"foreach", "fused", "capturable", "differentiable"}
_DROPPED = _HOW | {"params", "param_names", "step", "bias_correction"}


class OptimizerClass(NamedTuple):
    """The class of an optimizer."""

    name: str
    note: str | None = None  # what had to be assumed


def find_class(groups: list[dict[str, Any]], config: Mapping[str, Any], wanted: str | None) -> OptimizerClass:
    """Find out of which class an optimizer was. See [Note: Which class].

    Args:
        groups: Its param groups, as saved.
        config: The ds_config it was saved with.
        wanted: What the user says.

    Raises:
        CheckpointError: Nothing says it.
    """
    if wanted is not None:
        return OptimizerClass(wanted)
    keys = {key for group in groups for key in group}
    for mark, name in _MARKS.items():
        if mark in keys:
            return OptimizerClass(name)
    if "decoupled_weight_decay" in keys and "amsgrad" in keys:
        return OptimizerClass("AdamW" if groups[0]["decoupled_weight_decay"] else "Adam")
    block = config.get("optimizer")
    found = _class_in_config(block) if isinstance(block, Mapping) else None
    if found is not None:
        return OptimizerClass(found)
    if {"betas", "bias_correction"} <= keys:
        decays = any(group.get("weight_decay") for group in groups)
        note = (
            "The optimizer is taken for AdamW, as DeepSpeed's Adam is by default; the checkpoint does not "
            "say. If it was made with adam_w_mode=False, import again with --optimizer Adam."
        )
        return OptimizerClass("AdamW", note if decays else None)
    settings = ", ".join(sorted(keys - {"params"})) or "none"
    raise CheckpointError(
        what="The class of the optimizer cannot be told from the checkpoint.",
        why=f"Its param groups have the settings {settings}, which several classes have, and its config has "
        "no optimizer block.",
        fix="Name the class that you will use here, such as --optimizer AdamW, or leave it out: "
        "--weights-only.",
    )


def settings_of(group: Mapping[str, Any], class_name: str) -> dict[str, JsonValue]:
    """Return the settings of a param group, with torch's defaults for those of its class that are not saved.

    Raises:
        CheckpointError: torch's class has no such setting, or it is no JSON value.
    """
    if group.get("moe"):
        raise CheckpointError(
            what="A param group of the optimizer holds experts, which `zero-strategy import` does not read.",
            why="Expert parallelism splits weights in more ways than over data-parallel ranks.",
            fix="Export whole weights in DeepSpeed, and load them with engine.load_full_state_dict.",
        )
    defaults = _defaults_of(class_name)
    if defaults and group.get("bias_correction", True) is not True:
        raise CheckpointError(
            what=f"The optimizer was made with bias_correction={group['bias_correction']!r}.",
            why=f"torch.optim.{class_name} always corrects the bias, so training would go on differently.",
            fix="Leave the optimizer out (--weights-only), or name a class of your own with --optimizer.",
        )
    settings = {key: value for key, value in (defaults | dict(group)).items() if key not in _DROPPED}
    if "decoupled_weight_decay" in defaults:
        settings["decoupled_weight_decay"] = defaults["decoupled_weight_decay"]
    return {key: as_json(value, f"The setting {key!r} of a param group") for key, value in settings.items()}


def state_of(state: Mapping[str, Any], group: Mapping[str, Any], class_name: str) -> dict[str, Any]:
    """Return the state of a flat tensor under the keys, and of the types, that its class uses here.

    FusedAdam of older versions counts its steps in the param group; torch counts them in a tensor.
    """
    found = dict(state)
    if found and "step" not in found and "step" in group:
        found["step"] = group["step"]
    if "step" in found and _defaults_of(class_name):
        step = found["step"]
        number = step.item() if isinstance(step, Tensor) else step
        found["step"] = torch.tensor(float(number), dtype=torch.float32, device="cpu")
    return found


# -- helpers --


def _class_in_config(block: Mapping[str, Any]) -> str | None:
    name = block.get("type")
    if not isinstance(name, str):
        return None
    if name.lower() == "adam":
        params = block.get("params")
        coupled = isinstance(params, Mapping) and params.get("adam_w_mode", True) is False
        return "Adam" if coupled else "AdamW"
    return _TYPES.get(name.lower(), name)


def _defaults_of(class_name: str) -> dict[str, Any]:
    """Return the settings of a class of torch.optim with their defaults; {} for another class.

    From its signature: to make one imports torch's compiler, which takes seconds.
    """
    found = getattr(torch.optim, class_name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        return {}
    parameters = inspect.signature(found).parameters.values()
    defaults = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
    return defaults | ({"decoupled_weight_decay": True} if class_name == "AdamW" else {})
