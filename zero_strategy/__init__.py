"""ZeRO as a small, exact, readable library on `torch.distributed`: public names, nothing else.

Names are imported when they are first used, so that the command line answers without waiting for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zero_strategy.lightning import register as _register_with_lightning

if TYPE_CHECKING:
    from zero_strategy.config import ZeroConfig
    from zero_strategy.ema import ShardedEMA
    from zero_strategy.engine import ZeroEngine
    from zero_strategy.errors import CheckpointError, ConfigError, OffloadError, ShardingError, ZeroError
    from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

    FabricZeroStrategy: Any
    ZeroEMA: Any
    ZeroStrategy: Any

__all__ = [
    "CheckpointError",
    "ConfigError",
    "FabricZeroStrategy",
    "OffloadError",
    "ShardedEMA",
    "ShardedOptimizer",
    "ShardingError",
    "ZeroConfig",
    "ZeroEMA",
    "ZeroEngine",
    "ZeroError",
    "ZeroStrategy",
]

_HOMES = {
    "ShardedEMA": "zero_strategy.ema",
    "ShardedOptimizer": "zero_strategy.optim.sharded_optimizer",
    "ZeroConfig": "zero_strategy.config",
    "ZeroEngine": "zero_strategy.engine",
}

_OF_LIGHTNING = ("ZeroStrategy", "FabricZeroStrategy", "ZeroEMA")

_register_with_lightning()


def __getattr__(name: str) -> Any:
    if name in _OF_LIGHTNING:  # optional: derived from whichever Lightning is there
        return getattr(importlib.import_module("zero_strategy.lightning"), name)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES.get(name, "zero_strategy.errors")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
