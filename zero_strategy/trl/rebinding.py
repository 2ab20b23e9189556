"""Puts ours under TRL's names. Nothing happens until `install`.

Called when a trainer of TRL's makes an Accelerator of ours. What TRL has not imported by then is rebound when
it is. Where a model has no engine, what is rebound does what TRL does.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from zero_strategy.front_ends.importing import call_when_imported
from zero_strategy.front_ends.upstream import Name
from zero_strategy.trl import upstream
from zero_strategy.trl.bodies import BODIES, OF_TRAINERS


def install() -> None:
    """Rebind TRL's names, now or when their modules are imported. May be called any number of times.

    Raises:
        ConfigError: This version of TRL was not tested.
    """
    upstream.TESTED.require("TRL on sharded models")
    for name in dict.fromkeys(name.module for name in upstream.REBOUND):
        call_when_imported(name, _rebind)


def is_of_trl(trainer: Any) -> bool:
    """Whether a trainer's class is TRL's, or made of one that is."""
    return any(kind.__module__.partition(".")[0] == upstream.TESTED.package for kind in type(trainer).__mro__)


def _rebind(module: ModuleType) -> None:
    for name in upstream.REBOUND:
        if name.module == module.__name__:
            _rebind_one(name, module)


def _rebind_one(name: Name, module: ModuleType) -> None:
    owner_name, _, attribute = name.path.rpartition(".")
    owner: Any = getattr(module, owner_name) if owner_name else module
    found = vars(owner)[attribute]
    is_static = isinstance(found, staticmethod)
    stock = found.__func__ if is_static else found
    if hasattr(stock, "__zero_strategy__"):
        return
    make = _standing_for_method if name.path in OF_TRAINERS else _standing_for
    standing = make(stock, BODIES[name.path])
    standing.__zero_strategy__ = True
    setattr(owner, attribute, staticmethod(standing) if is_static else standing)


def _standing_for(stock: Any, body: Any) -> Any:
    @functools.wraps(stock)
    def standing(*args: Any, **kwargs: Any) -> Any:
        return body(stock, *args, **kwargs)

    return standing


def _standing_for_method(stock: Any, body: Any) -> Any:
    @functools.wraps(stock)
    def standing(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return body(functools.partial(stock, trainer), trainer, *args, **kwargs)

    return standing
