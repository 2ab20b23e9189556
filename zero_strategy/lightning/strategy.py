"""`ZeroStrategy`: the engine behind the hooks that Lightning's Trainer calls.

Built once per Lightning namespace (`make_strategy`), on top of its `DDPStrategy`: launching, process groups,
samplers and `reduce`/`broadcast`/`barrier` are DDP's; the model is never wrapped in DDP. This file only
translates: when the engine is built and in which scope a step runs (checkpoints: `checkpoints.py`). It knows
nothing of buckets or shards.

[Note: The model stays where it is]
Stock strategies move the module and the optimizer state between devices (`setup`,
`load_optimizer_state_dict`, `teardown`). Parameters here alias flat buffers that the engine owns, so every
such move is left out: after `fit` the engine is as usable as before, and `trainer.save_checkpoint()` still
works.
"""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from zero_strategy import root_methods
from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError, ShardingError
from zero_strategy.lightning.checkpoints import CheckpointHooks
from zero_strategy.lightning.precision import to_zero_plugin
from zero_strategy.lightning.settings import load_config, resolve_for_trainer, shards_alike

# What is written below stands in front of a `DDPStrategy`; which one is known in `make_strategy` only.
_Base: Any = object

_FABRIC = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

# Keywords of DDPStrategy that mean the same here; the others are settings of DDP's own wrapper.
DDP_KEYWORDS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)


class ZeroStrategyHooks(CheckpointHooks, _Base):  # type: ignore[misc]
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
        **keywords: Settings of `ZeroConfig`, which beat `config`; and these of Lightning's `DDPStrategy`:
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method.

    Raises:
        ConfigError: A setting is unknown or cannot be honoured, or processes would be spawned at stage 3.
    """

    strategy_name = "zero"
    namespace: str  # of the Lightning package this class derives from
    optimizers: Any  # DDPStrategy's property: a list

    def __init__(self, stage: int | None = None, config: Any = None, **keywords: Any) -> None:
        ddp_keywords = {name: keywords.pop(name) for name in DDP_KEYWORDS if name in keywords}
        self._zero_config: ZeroConfig = load_config(stage, config, keywords)
        self._engine: ZeroEngine | None = None
        _refuse_spawn(self._zero_config, ddp_keywords.get("start_method", "popen"))
        super().__init__(**ddp_keywords)

    # -- what Lightning configures before a run --

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, clipping on shards."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else to_zero_plugin(plugin, self.namespace)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create the model's tensors on the root device, or on the CPU at stage 3.

        A model that needs stage 3 need not fit on one device whole: the engine moves it there shard by shard.
        """
        with super().tensor_init_context(empty_init):
            if not self._zero_config.shards_params:
                yield
            else:
                with torch.device("cpu"):  # the innermost device context counts
                    yield

    # -- runtime, in the order of a run --

    def setup(self, trainer: Any) -> None:
        """Shard the module, and for `fit` its new optimizers. Runs with each fit, validate, test, predict."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == "fit"
        precision = str(self.precision_plugin.precision)
        config = resolve_for_trainer(self._zero_config, trainer, precision, self.world_size)
        self._engine = self._engine_for(config, precision, fitting)
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _engine_for(self, config: ZeroConfig, precision: str, fitting: bool) -> ZeroEngine:
        """Return the engine a former run left on the module if it does what this one asks, else a new one."""
        module = self.lightning_module
        assert module is not None
        engine = find_engine(module)
        if engine is not None and not _holds_params_of(engine, module):
            engine.close()  # `configure_model` has built the module anew
        elif engine is not None:
            if shards_alike(engine.config, config) and not _would_convert(module, precision):
                return engine
            _give_up(engine, config, precision)
        if fitting and self._layer_sync:
            # Not reverted after the run: the reverse would build new modules, without the engine's hooks.
            self.model = self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        return ZeroEngine(module, config, device=self.root_device)

    def model_to_device(self) -> None:
        """Move what the engine does not hold: metrics, and what the module says is its device."""
        module = self.lightning_module
        assert module is not None
        fabric = _FABRIC[self.namespace]
        mixin = importlib.import_module(f"{fabric}.utilities.device_dtype_mixin")
        mixin._update_properties(module, device=self.root_device)
        for child in module.modules():
            if next(child.parameters(), None) is None:
                child.to(self.root_device)

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the user's optimizers and schedulers, and shard each optimizer."""
        self._reset_optimizers_and_schedulers()
        self.engine.forget_optimizers()
        super().setup_optimizers(trainer)
        # Lightning puts a stand-in where `configure_optimizers` returns None; it holds none of the module's
        # parameters.
        self.optimizers = [
            optimizer
            if type(optimizer).__name__ == "_MockOptimizer"
            else self.engine.shard_optimizer(optimizer)
            for optimizer in self.optimizers
        ]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's `training_step` as one forward of the root module."""
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

    def teardown(self) -> None:
        """End a run and keep the engine. See [Note: The model stays where it is]."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no importable name, and `spawn` launches (stages 1 and 2) pickle the strategy.
        return _empty_strategy, (self.namespace,), self.__getstate__()


def make_strategy(namespace: str) -> Any:
    """Build the `ZeroStrategy` class of a Lightning namespace. Called once for each, by `strategy_class`.

    Args:
        namespace: "lightning.pytorch" or "pytorch_lightning".

    Returns:
        A subclass of that namespace's `DDPStrategy`: the Trainer decides by this base that samplers are
        distributed and that logged values are reduced.
    """
    base = importlib.import_module(f"{namespace}.strategies").DDPStrategy
    names = {
        "__doc__": ZeroStrategyHooks.__doc__,
        "__module__": "zero_strategy.lightning",
        "namespace": namespace,
    }
    return type("ZeroStrategy", (ZeroStrategyHooks, base), names)


def find_engine(module: torch.nn.Module) -> ZeroEngine | None:
    """Return the engine that shards a module, whichever strategy or script built it, or None."""
    engine = root_methods.owner_of(module)
    return engine if isinstance(engine, ZeroEngine) else None


def _holds_params_of(engine: ZeroEngine, module: torch.nn.Module) -> bool:
    held = {id(param) for bucket in engine.buckets for param in bucket.params}
    return held == {id(param) for param in module.parameters()}


def _give_up(engine: ZeroEngine, config: ZeroConfig, precision: str) -> None:
    """Take an engine off a module that this run wants sharded otherwise, if that leaves it whole."""
    if not engine.config.shards_params:
        engine.close()
        return
    raise ConfigError(
        what=f"This {type(engine.model).__name__} is sharded at stage 3 by a former run, with other settings "
        f"than this one's (stage={config.stage}, precision={precision!r}).",
        why="Another engine needs it whole on every rank first, which stage 3 promises never to do.",
        fix="Run with the settings of the former run, or save a checkpoint and load it into a new module.",
    )


def _would_convert(module: torch.nn.Module, precision: str) -> bool:
    """Whether the precision plugin would change the dtype of a parameter, which must not be sharded then."""
    dtype = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision)
    return dtype is not None and any(p.is_floating_point() and p.dtype != dtype for p in module.parameters())


def _empty_strategy(namespace: str) -> Any:
    from zero_strategy.lightning import strategy_class

    cls = strategy_class(namespace)
    return cls.__new__(cls)


def _refuse_spawn(config: ZeroConfig, start_method: str) -> None:
    if not config.shards_params or start_method == "popen":
        return
    raise ConfigError(
        what=f"start_method={start_method!r} cannot be used at stage 3.",
        why="That launcher sends the model back to the process that called fit; here no rank holds it whole.",
        fix='Use start_method="popen" (the default) or torchrun; in a notebook, ZeroStrategy(stage=2) works.',
    )
