"""`ZeroEMA`: Lightning's callback around `ShardedEMA`.

It says when weights are averaged, when the average is evaluated, and what goes into a `.ckpt`. Built once per
Lightning namespace, as `ZeroStrategy` is.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from zero_strategy.ema import ShardedEMA
from zero_strategy.errors import ConfigError, ShardingError
from zero_strategy.log import log_event

# What is written below stands in front of a `Callback`; which one is known in `derive_callback` only.
_Base: Any = object

EMA_KEY = "zero_strategy_ema"  # in a checkpoint file: whole fp32 averages under the names of the state dict


class ZeroEMAHooks(_Base):  # type: ignore[misc]
    """An exponential moving average of the weights, at any stage of `ZeroStrategy`.

    Each rank averages its shard of the masters, in fp32 and without communication. Validation, test and
    prediction see the average as soon as there is one; training goes on with its own weights, bit for bit.
    A `.ckpt` keeps the weights where any strategy looks for them, and the average beside them, whole, under
    the key "zero_strategy_ema"; a run resumed at another world size or stage goes on with it. See
    `ShardedEMA` for buffers and frozen weights.

    Example:
        average = zs.ZeroEMA(decay=0.999)
        trainer = Trainer(strategy="zero3", callbacks=[average])
        trainer.fit(model)
        weights = average.full_state_dict()  # on all ranks

    Args:
        decay: Weight of the average so far, at each update.
        warmup: Let the decay rise over the first updates, as min(decay, (1 + n) / (10 + n)).
        update_every_n_steps: Average after every n-th optimizer step only.
        update_starting_at_step: The first step, counted from 0, after which to average.

    Raises:
        ConfigError: `update_every_n_steps` is not positive.
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        warmup: bool = False,
        update_every_n_steps: int = 1,
        update_starting_at_step: int = 0,
    ) -> None:
        super().__init__()
        if update_every_n_steps < 1:
            raise ConfigError(
                what=f"update_every_n_steps={update_every_n_steps}.",
                why="The average would never be updated.",
                fix="Pass 1 to average after every step, or more.",
            )
        self.decay = decay
        self.warmup = warmup
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self._ema: ShardedEMA | None = None
        self._latest_update_step = 0
        self._loaded: dict[str, Any] | None = None  # what was in the file, until training begins
        self._loaded_into: list[Any] = []  # the engine's buckets at that time

    # -- runtime, in the order of a run --

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse what cannot work, before anything is sharded."""
        error = _check_use(trainer)
        if error is not None:
            raise error

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin an average, or go on with that of a former run on the same module."""
        self._attach(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load the average again, all of it, if finetuning callbacks have unfrozen something since."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and self.ema.engine.buckets != self._loaded_into:
            self.ema.load_state_dict(loaded)
        self._loaded_into = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Average after an optimizer step."""
        step = trainer.global_step - 1  # the number of the last one, from 0
        is_new = trainer.global_step > self._latest_update_step
        if is_new and step >= self.update_starting_at_step and step % self.update_every_n_steps == 0:
            self.ema.update()
            self._latest_update_step = trainer.global_step

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the average in the model's place."""
        self._swap_in(trainer)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model its weights back."""
        self.ema.swap_out()

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the average in the model's place."""
        self._swap_in(trainer)

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model its weights back."""
        self.ema.swap_out()

    def on_predict_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Put the average in the model's place."""
        self._swap_in(trainer)

    def on_predict_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Give the model its weights back."""
        self.ema.swap_out()

    # -- checkpoints --

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the whole average into a checkpoint file. Collective."""
        state = self._attach(trainer).state_dict()
        checkpoint[EMA_KEY] = {**state, "latest_update_step": self._latest_update_step}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Take over the average of a checkpoint file. Collective."""
        if EMA_KEY not in checkpoint:
            log_event("The checkpoint holds no average of ZeroEMA: it begins anew.")
        state = checkpoint.get(EMA_KEY, {"num_updates": 0, "weights": {}, "latest_update_step": 0})
        ema = self._attach(trainer)
        ema.load_state_dict(state)
        self._loaded, self._loaded_into = state, list(ema.engine.buckets)
        self._latest_update_step = state["latest_update_step"]

    # -- queries --

    @property
    def ema(self) -> ShardedEMA:
        """The average of the module that is or was trained.

        Raises:
            ShardingError: No run has begun.
        """
        if self._ema is None:
            raise ShardingError(
                what="This ZeroEMA has no average yet.",
                why="It is made when a run begins, on the module's engine.",
                fix="Use it in a hook (on_fit_start or later) or after the run.",
            )
        return self._ema

    def full_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Gather the averaged weights, with buffers and frozen weights, for export. Collective.

        Args:
            dtype: As for `ShardedEMA.full_state_dict`.

        Returns:
            On rank 0 CPU tensors under the keys of the module's state dict; {} elsewhere.
        """
        return self.ema.full_state_dict(dtype)

    # -- helpers --

    def _attach(self, trainer: Any) -> ShardedEMA:
        """Return the average of the engine's module; an interrupted evaluation is put right."""
        engine = trainer.strategy.engine
        if self._ema is None or self._ema.engine is not engine:
            self._ema = ShardedEMA(engine, self.decay, warmup=self.warmup)
            self._latest_update_step = 0
        self._ema.swap_out()
        return self._ema

    def _swap_in(self, trainer: Any) -> None:
        ema = self._attach(trainer)
        if ema.num_updates:
            ema.swap_in()


def derive_callback(namespace: str) -> Any:
    """Build the `ZeroEMA` class of a Lightning namespace.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning".
    """
    base = importlib.import_module(f"{namespace}.callbacks").Callback
    names = {"__doc__": ZeroEMAHooks.__doc__, "__module__": "zero_strategy.lightning"}
    return type("ZeroEMA", (ZeroEMAHooks, base), names)


def _check_use(trainer: Any) -> ConfigError | None:
    strategy = type(trainer.strategy).__name__
    if strategy != "ZeroStrategy":
        return ConfigError(
            what=f"ZeroEMA was given to a Trainer with {strategy}.",
            why="It averages the shards of ZeroStrategy's engine.",
            fix='Use Trainer(strategy="zero3"), or Lightning\'s EMAWeightAveraging with other strategies.',
        )
    if sum(isinstance(callback, ZeroEMAHooks) for callback in trainer.callbacks) > 1:
        return ConfigError(
            what="The Trainer has more than one ZeroEMA.",
            why="Only one average can be in the model's place when it is evaluated.",
            fix="Keep one; ShardedEMA(trainer.strategy.engine, decay) in a callback of your own makes more.",
        )
    return None
