"""Accelerate: `ZeroAccelerator` in the place of its `Accelerator`, `ZeroPlugin` for what is to be sharded.

A script that is changed imports them from here; one that is not is started by `zero_strategy.run`, which puts
`ZeroAccelerator` under Accelerate's own name first (rebinding.py). Nothing here is imported or patched by
`import zero_strategy`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero_strategy.accelerate.accelerator import ZeroAccelerator
    from zero_strategy.accelerate.plugin import ZeroPlugin

__all__ = ["ZeroAccelerator", "ZeroPlugin"]

_HOMES = {
    "ZeroAccelerator": "zero_strategy.accelerate.accelerator",
    "ZeroPlugin": "zero_strategy.accelerate.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
