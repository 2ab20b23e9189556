"""The schedules that a ds_config.json describes, as torch schedulers.

Rates at a step are those of DeepSpeed 0.19 (deepspeed/runtime/lr_schedules.py), whose schedules stand one
step before their first: the first optimizer step has the lowest rate, and step n + 2 that of iteration n.
Each curve is a pure function of the iteration. Called by `dummies`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

LOG, LINEAR = "log", "linear"

Curve = Callable[[int], float]  # iteration, from 0 -> share of the way from the lowest to the highest rate


class ConfigSchedule(LRScheduler):
    """A learning rate between two bounds for each param group, by a curve."""

    def __init__(
        self, optimizer: Optimizer, curve: Curve, lowest: list[float] | float, highest: list[float] | None
    ) -> None:
        """Start at the lowest rates.

        Args:
            optimizer: Whose groups get the rates.
            curve: The share of the way.
            lowest: By group, or of all.
            highest: By group; None for the rates that the groups have now.
        """
        groups = optimizer.param_groups
        self._curve = curve
        self._lowest = lowest if isinstance(lowest, list) else [lowest] * len(groups)
        self._highest = [float(group["lr"]) for group in groups] if highest is None else highest
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """Return the rates of the next step."""
        pairs = list(zip(self._lowest, self._highest, strict=True))
        if self.last_epoch == 0:
            return [low for low, _ in pairs]
        share = self._curve(self.last_epoch - 1)
        return [low + (high - low) * share for low, high in pairs]

    def state_dict(self) -> dict[str, Any]:
        """Return where it stands; what it is stands in the config."""
        state: dict[str, Any] = super().state_dict()
        return {key: value for key, value in state.items() if key not in ("_curve", "_lowest", "_highest")}


def warmup(iteration: int, *, num_steps: int, kind: str) -> float:
    """Return the share at an iteration of a warm-up."""
    if iteration >= num_steps:
        return 1.0
    return 1.0 / math.log(num_steps) * math.log(iteration + 1) if kind == LOG else iteration / num_steps


def warmup_decay(iteration: int, *, num_steps: int, kind: str, total: int) -> float:
    """Return the share of a warm-up that a straight line down to zero follows."""
    if iteration < num_steps:
        return warmup(iteration, num_steps=num_steps, kind=kind)
    return max(0.0, (total - iteration) / max(1.0, total - num_steps))


def warmup_cosine(
    iteration: int, *, num_steps: int, kind: str, total: int, first: float, last: float
) -> float:
    """Return the share of a warm-up from `first` that a cosine down to `last` follows."""
    if iteration < num_steps:
        return first + (1.0 - first) * warmup(iteration, num_steps=num_steps, kind=kind)
    progress = min(1.0, (iteration - num_steps + 1) / max(1, total - num_steps))
    return max(0.0, last + (1.0 - last) * (1.0 + math.cos(math.pi * progress)) / 2.0)


# Type -> its parameters and their defaults; ... where one must be given.
PARAMETERS: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": LOG},
    "WarmupDecayLR": {
        "total_num_steps": ...,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": LOG,
    },
    "WarmupCosineLR": {
        "total_num_steps": ...,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": LOG,
    },
}


def build(kind: str, values: dict[str, Any], optimizer: Optimizer) -> ConfigSchedule:
    """Build a schedule.

    Args:
        kind: A key of `PARAMETERS`.
        values: All of its parameters.
        optimizer: Whose groups get the rates.
    """
    num_groups = len(optimizer.param_groups)
    common = {"num_steps": max(2, int(values["warmup_num_steps"])), "kind": values["warmup_type"]}
    if kind == "WarmupCosineLR":
        first, last = float(values["warmup_min_ratio"]), float(values["cos_min_ratio"])
        curve = partial(warmup_cosine, total=int(values["total_num_steps"]), first=first, last=last, **common)
        return ConfigSchedule(optimizer, curve, 0.0, None)
    low, high = (_by_group(values[name], num_groups) for name in ("warmup_min_lr", "warmup_max_lr"))
    if kind == "WarmupLR":
        return ConfigSchedule(optimizer, partial(warmup, **common), low or 0.0, high)
    curve = partial(warmup_decay, total=int(values["total_num_steps"]), **common)
    return ConfigSchedule(optimizer, curve, low or 0.0, high)


def _by_group(value: Any, num_groups: int) -> list[float] | None:
    if value is None:
        return None
    return [float(v) for v in value] if isinstance(value, list) else [float(value)] * num_groups
