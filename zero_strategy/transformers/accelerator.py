"""`TrainerAccelerator`: the Accelerator that a `Trainer` makes. It must not know how a Trainer saves."""

from __future__ import annotations

from typing import Any

from zero_strategy.accelerate.accelerator import ZeroAccelerator
from zero_strategy.accelerate.settings import Facts
from zero_strategy.transformers.plugin import TrainerPlugin
from zero_strategy.transformers.upstream import TESTED


class TrainerAccelerator(ZeroAccelerator):
    """`ZeroAccelerator` for whom the Trainer counts micro-batches and keeps the optimizer."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what a Trainer passes.

        Args:
            *args: As for `Accelerator`.
            **kwargs: As for `ZeroAccelerator`.

        Raises:
            ConfigError: This version of transformers was not tested, or see `ZeroAccelerator`.
        """
        TESTED.require("Trainer on sharded models")
        super().__init__(*args, **kwargs)

    def _facts(self) -> Facts:
        facts = super()._facts()
        if not isinstance(self.zero_plugin, TrainerPlugin):
            return facts
        plugin = self.zero_plugin
        return facts._replace(
            num_micro_batches=plugin.num_micro_batches, batch_sizes=[plugin.batch_size], split_batches=False
        )

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, but leave optimizers their states.

        A Trainer calls this when a run begins, and goes on with the optimizer of its last run if it has one.

        Args:
            *objects: As for `Accelerator`.
        """
        self._engines.clear()
        # Not by Accelerate's name, under which ours may stand when this is imported.
        return super(ZeroAccelerator, self).free_memory(*objects)
