"""Learning rate schedulers that wait while steps are skipped.

Lightning steps a scheduler with `interval="step"` after every optimizer step, applied or not: a warm-up would
be half over before the first update. The strategy has such schedulers wait. Schedulers stepped once an epoch,
and those a module steps itself, are left alone. Must not know scalers.
"""

from __future__ import annotations

import copyreg
from typing import Any

from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

_STEPPED = "_class_without_waiting"


def wait_for_updates(scheduler: Any, optimizer: ShardedOptimizer) -> None:
    """Make `scheduler.step()` do nothing where the optimizer's last step was skipped.

    Args:
        scheduler: Of any class. It gets a subclass of it, of the same name: an attribute of the object itself
            would end up in `scheduler.state_dict()`.
        optimizer: The one whose steps count.
    """
    # One that was kept from a former run asks the optimizer of this one from now on.
    cls: Any = getattr(type(scheduler), _STEPPED, type(scheduler))

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if optimizer.step_was_skipped else cls.step(self, *args, **kwargs)

    # The class has no importable name: a pickled scheduler is one of the user's class.
    def reduce(self: Any) -> tuple[Any, ...]:
        return copyreg.__newobj__, (cls,), dict(vars(self))  # type: ignore[attr-defined]

    names = {
        "step": step,
        "__reduce__": reduce,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        _STEPPED: cls,
    }
    scheduler.__class__ = type(cls.__name__, (cls,), names)
