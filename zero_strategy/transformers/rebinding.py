"""Puts ours under transformers' names, for scripts that are not changed. Nothing happens until `install`.

What is rebound stands in `upstream.REBOUND`. Called by `zero_strategy.run` before the script is run; where
the script imports transformers' Trainer later, that is when it happens. Who never does pays nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zero_strategy.front_ends.importing import call_when_imported
from zero_strategy.transformers import upstream

_ARGUMENTS, _TRAINER = "transformers.training_args", "transformers.trainer"


def install() -> None:
    """Rebind transformers' names, now or when they are imported. May be called any number of times."""
    for name, rebind in ((_ARGUMENTS, _rebind_arguments), (_TRAINER, _rebind_trainer)):
        call_when_imported(name, rebind)


def _rebind_arguments(module: ModuleType) -> None:
    from zero_strategy.transformers.arguments import complete_arguments

    if upstream.TESTED.covers_installed():
        _stand_in(module.TrainingArguments, "__post_init__", complete_arguments)


def _rebind_trainer(module: ModuleType) -> None:
    from zero_strategy.transformers.accelerator import TrainerAccelerator
    from zero_strategy.transformers.methods import BODIES

    module.Accelerator = TrainerAccelerator  # type: ignore[attr-defined]
    if upstream.TESTED.covers_installed():  # a TrainerAccelerator says so if not
        for name, body in BODIES.items():
            _stand_in(module.Trainer, name, body)


def _stand_in(cls: Any, name: str, body: Callable[..., Any]) -> None:
    """Let a method call a body for objects of ours, and be what it was for others."""
    stock = getattr(cls, name)
    if hasattr(stock, "__wrapped__"):
        return

    @functools.wraps(stock)
    def method(owner: Any, *args: Any, **kwargs: Any) -> Any:
        return body(owner, functools.partial(stock, owner), *args, **kwargs)

    setattr(cls, name, method)
