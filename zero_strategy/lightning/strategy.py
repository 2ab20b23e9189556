"""`ZeroStrategy`: the engine behind the hooks that Lightning's Trainer calls.

Stands on the `DDPStrategy` of a Lightning namespace: launching, process groups, samplers and
`reduce`/`broadcast`/`barrier` are DDP's; the model is never wrapped in DDP. What Fabric needs as well is in
`base.py`, checkpoints are in `checkpoints.py`. This file only translates: when the engine is built and in
which scope a step runs. It knows nothing of buckets or shards.

[Note: The model stays where it is]
Stock strategies move the module and the optimizer state between devices (`setup`,
`load_optimizer_state_dict`, `teardown`). Parameters here alias flat buffers that the engine owns, so every
such move is left out: after `fit` the engine is as usable as before, and `trainer.save_checkpoint()` still
works. Where parameters are whole, gradients are left to others from then on, so that another strategy or a
plain loop can train the module; the next run takes them again, and begins with the values that are there.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ShardingError
from zero_strategy.front_ends.engines import find_engine
from zero_strategy.lightning.base import ZeroStrategyBase, reusable_engine
from zero_strategy.lightning.batches import require_as_many_batches
from zero_strategy.lightning.checkpoints import CheckpointHooks
from zero_strategy.lightning.endings import SignalStops
from zero_strategy.lightning.precision import to_zero_plugin
from zero_strategy.lightning.schedulers import wait_for_updates
from zero_strategy.lightning.settings import compare_batch_size, resolve_for_trainer
from zero_strategy.lightning.stock_callbacks import find_writers, other_rank_refuses, refuse_at_stage_3
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class TrainerHooks(CheckpointHooks, ZeroStrategyBase):
    """ZeRO stages 1, 2 and 3 for Lightning's Trainer; `ZeroStrategy` is this on top of a `DDPStrategy`.

    Example:
        trainer = Trainer(strategy="zero3", devices=2, accelerator="cpu")
        trainer = Trainer(strategy=ZeroStrategy(stage=3, config="ds_config.json", overlap_comm=False))
        trainer.fit(model)
        trainer.strategy.engine.ledger.report()

    The surprises: evaluation alone (`trainer.test`) shards the model too, and the module stays on its device,
    sharded, when a run ends. A second run finds the engine of the first.

    Args:
        stage: 1, 2 or 3. By default what `config` says, else 3.
        config: A `ZeroConfig`, a dict or the path of a JSON file in the schema of `ds_config.json`.
        state_dict_type: What a checkpoint is: "full", one file that plain Lightning loads too, or "sharded",
            a folder into which every rank writes its part. By default files, but folders where the whole
            state is above 10 GiB (and it goes to a local path through Lightning's own `CheckpointIO`). Either
            is loaded, whatever this says.
        async_save: With "sharded": saves during `fit` return when the state has been copied, and a process
            beside each rank writes it while training goes on. What goes wrong is raised by the next step.
            A checkpoint that ModelCheckpoint deletes stays until the new one is complete; the end of the run
            waits.
        **keywords: Settings of `ZeroConfig`, which beat `config`; and these of Lightning's `DDPStrategy`:
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method. `param_init_fn` is the engine's, for modules on meta
            that have no `reset_parameters`.

    Raises:
        ConfigError: A setting is unknown or cannot be honoured, or processes would be spawned at stage 3.
    """

    strategy_name = "zero"
    precision_keyword = "precision_plugin"
    optimizers: Any  # DDPStrategy's property: a list

    def __init__(self, stage: int | None = None, config: Any = None, **keywords: Any) -> None:
        self._engine: ZeroEngine | None = None
        self._takes_writes = False  # whether a callback writes weights behind the engine's back
        self._stops: SignalStops | None = None
        self._is_fitting = False
        super().__init__(stage, config, **keywords)

    # -- what Lightning configures before a run --

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which clips, scales and unscales on shards."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else to_zero_plugin(plugin, self.namespace)

    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Create the model on the root device; at stage 3 on meta if `empty_init`, else on the CPU."""
        return self._creating_model(super().tensor_init_context(empty_init), empty_init)

    # -- runtime, in the order of a run --

    def setup_environment(self) -> None:
        """Join the process group, and refuse callbacks that cannot work on shards before they run."""
        super().setup_environment()
        trainer = self.lightning_module.trainer
        self._takes_writes = bool(find_writers(trainer, self.namespace))
        error = refuse_at_stage_3(trainer, self.namespace) if self._zero_config.shards_params else None
        if self.reduce_boolean_decision(error is not None, all=False):
            raise error or other_rank_refuses()

    def setup(self, trainer: Any) -> None:
        """Shard the module, and for `fit` its new optimizers. Runs with each fit, validate, test, predict."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = self._is_fitting = trainer.state.fn == "fit"
        self._stops = SignalStops(self.namespace)
        precision = str(self.precision_plugin.precision)
        config = resolve_for_trainer(self._zero_config, trainer, precision, self.world_size)
        self._engine = self._engine_for(config, precision, fitting)
        self.precision_plugin.loss_scaler = self._engine.loss_scaler
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
            self._begin_saves()
        self.setup_precision_plugin()
        self._end_early_watch()

    def _engine_for(self, config: ZeroConfig, precision: str, fitting: bool) -> ZeroEngine:
        """Return the engine a former run left on the module if it does what this one asks, else a new one."""
        module = self.lightning_module
        assert module is not None
        former = find_engine(module)
        if former is not None and former is not self._engine:
            former.watch.forgive()  # it is another Trainer's, whose last run may have failed
        engine = reusable_engine(module, config, precision)
        if engine is not None:
            return engine
        if fitting and self._layer_sync:
            # Not reverted after the run: the reverse would build new modules, without the engine's hooks.
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        return self._new_engine(module, config)

    def model_to_device(self) -> None:
        """Move what the engine does not hold: metrics, and what the module says is its device."""
        module = self.lightning_module
        assert module is not None
        self._move_rest(module)

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the user's optimizers and schedulers, and shard each optimizer."""
        self._reset_optimizers_and_schedulers()
        self.engine.forget_optimizers()
        super().setup_optimizers(trainer)
        plain = self.optimizers
        # Lightning puts a stand-in where `configure_optimizers` returns None; it holds none of the module's
        # parameters.
        self.optimizers = [
            optimizer
            if type(optimizer).__name__ == "_MockOptimizer"
            else self.engine.shard_optimizer(optimizer)
            for optimizer in plain
        ]
        if trainer.lightning_module.automatic_optimization and self._may_skip_steps():
            for config in self.lr_scheduler_configs:
                sharded = dict(zip(plain, self.optimizers, strict=True)).get(config.scheduler.optimizer)
                if config.interval == "step" and isinstance(sharded, ShardedOptimizer):
                    wait_for_updates(config.scheduler, sharded)

    def _may_skip_steps(self) -> bool:
        scaler = getattr(self.precision_plugin, "scaler", None)
        checks = self.engine.config.bf16.check_grad_overflow
        return scaler is not None or self.engine.loss_scaler.is_active or checks

    def on_train_start(self) -> None:
        """Compare the loaders with the config and with one another, and take signals from here on."""
        super().on_train_start()
        trainer = self.lightning_module.trainer
        error = compare_batch_size(self._zero_config, trainer, self.world_size)
        self.engine.collectives.agree(error)
        self._begin_loop("training", [trainer.num_training_batches])

    def on_validation_start(self) -> None:
        """As `on_train_start`; under manual optimization steps are within forwards, and buffers still due."""
        super().on_validation_start()
        self.engine.module_buffers.broadcast_due()
        self._begin_loop("validation", self.lightning_module.trainer.num_val_batches)

    def on_test_start(self) -> None:
        """As `on_train_start`."""
        super().on_test_start()
        self._begin_loop("test", self.lightning_module.trainer.num_test_batches)

    def on_predict_start(self) -> None:
        """As `on_train_start`."""
        super().on_predict_start()
        self._begin_loop("predict", self.lightning_module.trainer.num_predict_batches)

    def _begin_loop(self, kind: str, num_batches: Sequence[float]) -> None:
        self._take_signals()  # Lightning has installed its own handlers just before
        if kind == "training" or self._zero_config.shards_params:
            require_as_many_batches(kind, num_batches, self.engine.collectives)

    def _take_signals(self) -> None:
        if not getattr(self.cluster_environment, "auto_requeue", False):  # SLURM's have another meaning
            assert self._stops is not None, "made by setup"
            self._stops.install(self.engine.stop if self._is_fitting else None, self.engine.watch)

    def _raise_agreed_stop(self) -> None:
        assert self._stops is not None, "made by setup"
        self._stops.raise_agreed()

    def _engines_now(self) -> list[ZeroEngine]:
        return [] if self._engine is None else [self._engine]

    def _is_agreed(self, error: BaseException) -> bool:
        return self._stops is not None and error is self._stops.raised

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as one forward of the root module."""
        self._raise_agreed_stop()
        with self.engine.forward_scope():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `validation_step` as one forward of the root module."""
        with self.engine.forward_scope():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `test_step` as one forward of the root module."""
        with self.engine.forward_scope():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `predict_step` as one forward of the root module."""
        with self.engine.forward_scope():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate without a boundary; Lightning enters it for all but the last micro-batch of a window."""
        with self.engine.no_sync():
            yield

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """At the start of an epoch, take over what callbacks wrote at the end of the one before."""
        super().on_train_batch_start(batch, batch_idx)
        if batch_idx == 0:
            self._take_writes()

    def on_validation_end(self) -> None:
        """Take over what callbacks wrote."""
        super().on_validation_end()
        self._take_writes()

    def on_train_end(self) -> None:
        """Take over what callbacks wrote; stop if a rank was asked to in the last step."""
        super().on_train_end()
        self._take_writes()
        self._raise_agreed_stop()

    def _take_writes(self) -> None:
        """Let masters and shards follow weights that a callback has written or bound to other memory."""
        if self._takes_writes:
            with self.engine.unsharded_params(writeback=True):
                pass

    def teardown(self) -> None:
        """End a run and keep the engine. See [Note: The model stays where it is]."""
        if self._stops is not None:
            self._stops.remove()
        self._end_saves(is_agreed=self._stops is not None and self._stops.raised is not None)
        if self._engine is not None:
            self._engine.rest()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- queries --

    @property
    def engine(self) -> ZeroEngine:
        """The engine of the last module that was set up; also after the run.

        Raises:
            ShardingError: Nothing has been set up yet.
        """
        if self._engine is None:
            raise ShardingError(
                what="This strategy has no engine yet.",
                why="The engine is built when the Trainer sets a model up: in fit, validate, ...",
                fix="Read trainer.strategy.engine in a hook (on_fit_start or later) or after the run.",
            )
        return self._engine
