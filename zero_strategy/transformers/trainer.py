"""`ZeroTrainerMixin`: the engine behind a `Trainer` of one's own. It must not know how anything is done."""

from __future__ import annotations

from typing import Any

from transformers import trainer as trainer_module

from zero_strategy.accelerate.plugin import ZeroPlugin
from zero_strategy.engine import ZeroEngine
from zero_strategy.transformers.accelerator import TrainerAccelerator
from zero_strategy.transformers.methods import BODIES


class ZeroTrainerMixin:
    """Trains what a `Trainer` trains on sharded models; to stand before it among the bases.

    Example:
        class MyTrainer(ZeroTrainerMixin, Trainer): ...
        trainer = MyTrainer(model, args, train_dataset=data, zero_plugin=ZeroPlugin(stage=3))
        trainer.train()
        trainer.engine.ledger.report()

    The surprise: `param.grad` is None; see `ZeroAccelerator`.

    Attributes:
        zero_plugin: What is sharded; None: what the launcher was asked for, or stage 3.
    """

    accelerator: TrainerAccelerator
    zero_plugin: ZeroPlugin | None = None

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        """Take a Trainer's arguments.

        Args:
            *args: As for `Trainer`.
            zero_plugin: What is to be sharded.
            **kwargs: As for `Trainer`.

        Raises:
            ConfigError: Config and arguments contradict each other, or cannot be honoured.
        """
        if zero_plugin is not None:
            self.zero_plugin = zero_plugin
        super().__init__(*args, **kwargs)

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the model.

        Raises:
            ConfigError: It has none yet: it is sharded when training or evaluating begins.
        """
        return self.accelerator.engine_of(self.model)  # type: ignore[attr-defined]

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, by the name that a `Trainer` looks up in its module."""
        module: Any = trainer_module
        bound, module.Accelerator = module.Accelerator, TrainerAccelerator
        try:
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        finally:
            module.Accelerator = bound


def _method(name: str, body: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return body(self, getattr(super(ZeroTrainerMixin, self), name), *args, **kwargs)

    method.__name__, method.__doc__ = name, body.__doc__
    return method


for _name, _body in BODIES.items():
    setattr(ZeroTrainerMixin, _name, _method(_name, _body))
