"""`DummyOptim` and `DummyScheduler`: what a script passes where its ds_config.json describes the real ones.

Real ones take their place when they are prepared. Called by `ZeroAccelerator.prepare`. It must not know the
engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zero_strategy.accelerate import config_schedules
from zero_strategy.config_keys import AUTO
from zero_strategy.config_source import Settings
from zero_strategy.errors import ConfigError

_ADAM = ("adam", "adamw")
# DeepSpeed's own; what is not named here is looked up in torch.optim, as there.
_NOT_IN_TORCH = (
    "lamb",
    "lion",
    "muon",
    "muadam",
    "muadamw",
    "musgd",
    "onebitadam",
    "zerooneadam",
    "onebitlamb",
)
_CHOICES = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")  # parameters that choose an implementation


class Stood(NamedTuple):
    """What stands in a dummy's place."""

    dummy: Any
    real: Any


class Dummies:
    """The dummies that have been met, with what took their places."""

    def __init__(self, optimizer: Settings, scheduler: Settings) -> None:
        """Take the blocks of the config.

        Args:
            optimizer: The block `optimizer`, empty if there is none.
            scheduler: The block `scheduler`, likewise.
        """
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._stood: list[Stood] = []

    def replace(self, objects: tuple[Any, ...], num_processes: int) -> tuple[Any, ...]:
        """Return objects to prepare, with real ones in the places of dummies.

        Args:
            objects: What was passed to `prepare`.
            num_processes: By which the total number of steps is divided, as Accelerate does.

        Raises:
            ConfigError: An optimizer or scheduler is both in the script and in the config, or in neither.
        """
        optimizers, schedulers = (Optimizer, DummyOptim), (LRScheduler, DummyScheduler)
        found = [self._real_optimizer(o) if isinstance(o, optimizers) else o for o in objects]
        return tuple(
            self._real_scheduler(o, num_processes) if isinstance(o, schedulers) else o for o in found
        )

    def has_made(self, scheduler: Any) -> bool:
        """Whether a scheduler stands in the place of a dummy; those step once per optimizer step."""
        return any(stood.real is scheduler for stood in self._stood)

    def real_of(self, thing: Any) -> Any:
        """Return what stands in the place of a dummy; anything else itself."""
        return next((stood.real for stood in self._stood if stood.dummy is thing), thing)

    # -- helpers --

    def _real_optimizer(self, given: Any) -> Any:
        if not isinstance(given, DummyOptim):
            if self._optimizer and not getattr(given, "_is_accelerate_prepared", False):
                raise _twice("optimizer", type(given).__name__, "DummyOptim", self._optimizer)
            return given
        real = self.real_of(given)
        if real is not given:
            return real
        if not self._optimizer:
            raise _nowhere("optimizer", "DummyOptim")
        real = build_optimizer(self._optimizer, given)
        self._stood.append(Stood(given, real))
        return real

    def _real_scheduler(self, given: Any, num_processes: int) -> Any:
        if not isinstance(given, DummyScheduler):
            if self._scheduler and not self.has_made(given) and not hasattr(given, "_is_accelerate_prepared"):
                raise _twice("scheduler", type(given).__name__, "DummyScheduler", self._scheduler)
            return given
        real = self.real_of(given)
        if real is not given:
            return real
        optimizer = self.real_of(given.optimizer)
        # What was prepared before is Accelerate's wrapper around ours around the user's.
        while not isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
            optimizer = getattr(optimizer, "optimizer", None)
            if optimizer is None:
                raise _nowhere("optimizer", "DummyOptim")
        if given.lr_scheduler_callable is not None:
            real = given.lr_scheduler_callable(optimizer)
        elif self._scheduler:
            real = build_scheduler(self._scheduler, given, optimizer, num_processes)
        else:
            raise _nowhere("scheduler", "DummyScheduler")
        self._stood.append(Stood(given, real))
        return real


def build_optimizer(block: Settings, dummy: Any) -> Optimizer:
    """Build the optimizer that a block describes.

    Args:
        block: `type` and `params.*`; what is "auto" is the dummy's.
        dummy: Has the parameters.

    Returns:
        A torch optimizer. "Adam" is AdamW unless `adam_w_mode` is false, as in DeepSpeed.

    Raises:
        ConfigError: There is no such optimizer in torch, or it does not take these parameters.
    """
    kind, origin = _type_of(block, "optimizer")
    known = {"lr": dummy.lr, "weight_decay": dummy.weight_decay, **dummy.kwargs}
    values = _params_of(block, known)
    is_decoupled = values.get("adam_w_mode", True) or kind.lower() == "adamw"
    for name in _CHOICES:
        values.pop(name, None)
    if kind.lower() in _ADAM:
        cls: Any = torch.optim.AdamW if is_decoupled else torch.optim.Adam
        values = {"weight_decay": 0.0, **values}  # DeepSpeed's default, which torch's AdamW does not share
    else:
        names = {name.lower(): name for name in dir(torch.optim) if name[0].isupper()}
        cls = getattr(torch.optim, names.get(kind.lower(), ""), None)
    if cls is None or kind.lower() in _NOT_IN_TORCH:
        raise ConfigError(
            what=f"The config's optimizer {kind!r} (from {origin}) is not one of torch's.",
            why="It is built from torch.optim; DeepSpeed's own are not part of this library.",
            fix='Write "type": "AdamW", for example, or build it in the script and remove the block.',
        )
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
    try:
        optimizer: Optimizer = cls(dummy.params, **values)
    except TypeError as error:
        raise ConfigError(
            what=f"The config's optimizer {kind!r} (from {origin}) cannot be built: {error}",
            why=f"Its parameters are passed to torch.optim.{cls.__name__} as they are.",
            fix="Correct optimizer.params.",
        ) from error
    return optimizer


def build_scheduler(block: Settings, dummy: Any, optimizer: Optimizer, num_processes: int) -> LRScheduler:
    """Build the schedule that a block describes.

    Args:
        block: `type` and `params.*`; what is "auto" is the dummy's.
        dummy: Has the numbers of steps.
        optimizer: Whose rates are set.
        num_processes: By which the dummy's total number of steps is divided.

    Raises:
        ConfigError: It is none that is built here, or its parameters are others.
    """
    kind, origin = _type_of(block, "scheduler")
    wanted = config_schedules.PARAMETERS.get(kind)
    if wanted is None:
        raise ConfigError(
            what=f"The config's scheduler {kind!r} (from {origin}) is not built here.",
            why=f"There are {', '.join(config_schedules.PARAMETERS)}.",
            fix="Use one of these, or build the scheduler in the script (or in DummyScheduler's "
            "lr_scheduler_callable) and remove the block.",
        )
    rate = optimizer.param_groups[0]["lr"]
    known = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": rate,
        "warmup_num_steps": max(1, dummy.warmup_num_steps),
    }
    if dummy.total_num_steps is not None:
        known["total_num_steps"] = math.ceil(dummy.total_num_steps / num_processes)
    values = _params_of(block, known)
    unknown = sorted(values.keys() - wanted.keys())
    missing = [name for name, default in wanted.items() if default is ... and name not in values]
    if unknown or missing:
        raise ConfigError(
            what=f"The config's scheduler {kind!r} (from {origin}) "
            + " and ".join(
                [f"has parameters it does not take: {unknown}"] * bool(unknown)
                + [f"lacks {missing}"] * bool(missing)
            )
            + ".",
            why=f"It takes {', '.join(wanted)}.",
            fix="Correct scheduler.params.",
        )
    return config_schedules.build(kind, {**wanted, **values}, optimizer)


def _type_of(block: Settings, name: str) -> tuple[str, str]:
    if "type" not in block or not isinstance(block["type"].value, str):
        raise ConfigError(
            what=f"The block {name!r} of the config has no type.",
            why="It describes what is to be built.",
            fix=f'Write "{name}": {{"type": "...", "params": {{...}}}}.',
        )
    return block["type"].value, block["type"].origin


def _params_of(block: Settings, known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in a block; what is "auto" and not known is left to its default."""
    values: dict[str, Any] = {}
    for key, setting in block.items():
        name = key.removeprefix("params.")
        if name == key or name == "":
            continue
        if setting.value != AUTO:
            values[name] = setting.value
        elif name in known:
            values[name] = known[name]
    return values


def _twice(name: str, kind: str, dummy: str, block: Settings) -> ConfigError:
    origin = next(iter(block.values())).origin
    return ConfigError(
        what=f"There is a {name} in the config (from {origin}) and one in the script, a {kind}.",
        why="Only one of them could have an effect.",
        fix=f"Remove the block, or pass accelerate.utils.{dummy} in the script.",
    )


def _nowhere(name: str, dummy: str) -> ConfigError:
    return ConfigError(
        what=f"{dummy} was prepared, and the config has no block {name!r}.",
        why="It stands for what the config describes.",
        fix=f'Add "{name}": {{"type": ..., "params": {{...}}}} to the config, or build one in the script.',
    )
