"""Accelerate's wrapper around an optimizer, around ours.

Accelerate's own steps at the end of an accumulation window only, moves optimizer state between devices, and
takes a step for skipped if its own scaler says so. State stays where the engine has it, and the engine's loss
scale counts too. It must not know models.
"""

from __future__ import annotations

from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class ZeroOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer that has been prepared.

    Attributes:
        optimizer: A `ShardedOptimizer`; the user's own until the model of its parameters is prepared.
    """

    optimizer: Any

    def __init__(self, optimizer: Optimizer, scaler: Any) -> None:
        """Wrap an optimizer.

        Args:
            optimizer: Sharded, if its model has been prepared.
            scaler: Accelerate's `GradScaler`, or None.
        """
        super().__init__(optimizer, device_placement=False, scaler=scaler)

    @property
    def is_sharded(self) -> bool:
        """Whether the engine of a model updates the parameters."""
        return isinstance(self.optimizer, ShardedOptimizer)

    @property
    def users(self) -> Optimizer:
        """The optimizer that was given to `prepare`."""
        optimizer: Optimizer = self.optimizer.optimizer if self.is_sharded else self.optimizer
        return optimizer

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied because of an overflow."""
        by_engine = self.is_sharded and self.optimizer.step_was_skipped
        return bool(super().step_was_skipped or by_engine)

    def attach(self, sharded: ShardedOptimizer) -> None:
        """Take the sharded form of the optimizer, whose model has just been prepared."""
        super().__init__(sharded, device_placement=False, scaler=self.scaler)
