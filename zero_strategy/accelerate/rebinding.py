"""Puts ours under Accelerate's names, for scripts that are not changed. Nothing happens until `install`.

What is rebound stands in `upstream.REBOUND`. Called by `zero_strategy.run` before the script is run, so that
`from accelerate import Accelerator` in it gives `ZeroAccelerator`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from accelerate import accelerator as accelerator_module
from accelerate import state as state_module
from accelerate import utils
from accelerate.utils import deepspeed, operations, parse_flag_from_env

from zero_strategy.accelerate.accelerator import ZeroAccelerator
from zero_strategy.accelerate.gradients import gathered_parameters
from zero_strategy.accelerate.upstream import TESTED
from zero_strategy.engine import ZeroEngine


def install() -> None:
    """Rebind Accelerate's names. May be called any number of times.

    Raises:
        ConfigError: This version of Accelerate was not tested.
    """
    TESTED.require("ZeroAccelerator")
    accelerate.Accelerator = accelerator_module.Accelerator = ZeroAccelerator
    utils.GatheredParameters = operations.GatheredParameters = _gathered_parameters
    for name in ("DummyOptim", "DummyScheduler"):  # there with deepspeed only
        setattr(utils, name, getattr(deepspeed, name))
    init = state_module.PartialState.__init__
    if not hasattr(init, "__wrapped__"):
        state_module.PartialState.__init__ = _reading_use_cpu(init)


def was_used() -> bool:
    """Tell whether an Accelerator of ours has been made in this process."""
    return "zero_plugin" in state_module.AcceleratorState._shared_state


def _reading_use_cpu(init: Any) -> Any:
    @functools.wraps(init)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        init(self, cpu or parse_flag_from_env("ACCELERATE_USE_CPU"), **kwargs)

    return __init__


@contextmanager
def _gathered_parameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """Make parameters whole for a block of code; what rank `modifier_rank` writes is kept. Collective."""
    with gathered_parameters(living_engines(), params, modifier_rank, enabled):
        yield


def living_engines() -> list[ZeroEngine]:
    """Return the engines of this process that Accelerators of ours have built and that still exist."""
    references = state_module.AcceleratorState._shared_state.get("zero_engines", [])
    engines = (reference() for reference in references)
    return [engine for engine in engines if engine is not None]
