"""ZeRO as a small, exact, readable library on `torch.distributed`: public names, nothing else."""

from __future__ import annotations

from typing import Any

from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError, ConfigError, OffloadError, ShardingError, ZeroError
from zero_strategy.lightning import register as _register_with_lightning
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "OffloadError",
    "ShardedOptimizer",
    "ShardingError",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroError",
    "ZeroStrategy",
]

_register_with_lightning()


def __getattr__(name: str) -> Any:
    # Lightning is optional: its class exists only where somebody asks for it.
    if name == "ZeroStrategy":
        from zero_strategy.lightning import strategy_class

        return strategy_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
