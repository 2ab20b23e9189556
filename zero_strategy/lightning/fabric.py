"""`FabricZeroStrategy`: the engine behind the hooks that Lightning's Fabric calls.

Stands on the `DDPStrategy` of a Fabric package, which launches, makes the process group and talks between
ranks; no model is wrapped in DDP. Fabric's user owns the loop, and may set up any number of models and
optimizers in any order: each model has an engine of its own. Must not know buckets or shards.
"""

from __future__ import annotations

import importlib
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError, ShardingError
from zero_strategy.front_ends.engines import engine_for, find_engine
from zero_strategy.lightning.base import ZeroStrategyBase, reusable_engine
from zero_strategy.lightning.fabric_checkpoints import FabricCheckpointHooks
from zero_strategy.lightning.forward_module import ForwardModule, engine_behind, lend_zero_grad
from zero_strategy.lightning.precision import to_zero_plugin
from zero_strategy.lightning.settings import resolve_for_fabric
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class FabricHooks(FabricCheckpointHooks, ZeroStrategyBase):
    """ZeRO stages 1, 2 and 3 for Lightning's Fabric; `FabricZeroStrategy` is this on a `DDPStrategy`.

    Example:
        fabric = Fabric(strategy="zero3", devices=2, accelerator="cpu")
        fabric = Fabric(strategy=FabricZeroStrategy(stage=3, config="ds_config.json", overlap_comm=False))
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)
        fabric.strategy.engine_of(model).ledger.report()

    Models and optimizers may be set up together or one after the other. The surprise: an optimizer belongs to
    one model.

    Args:
        stage: 1, 2 or 3. By default what `config` says, else 3.
        config: A `ZeroConfig`, a dict or the path of a JSON file in the schema of `ds_config.json`.
        **keywords: Settings of `ZeroConfig`, which beat `config`; and these of Fabric's `DDPStrategy`:
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision,
            process_group_backend, timeout, start_method. `param_init_fn` is the engine's, for modules on meta
            that have no `reset_parameters`. `state_dict_type="sharded"` lets `fabric.save` write a folder
            for each model, every rank its part, instead of one file; with `async_save=True` it returns when
            the state has been copied, and a process beside each rank writes it. What goes wrong is raised by
            the next step, save or load of that model; `fabric.load` and the end of the program wait.

    Raises:
        ConfigError: A setting is unknown or cannot be honoured, or processes would be spawned at stage 3.
    """

    precision_keyword = "precision"

    def __init__(self, stage: int | None = None, config: Any = None, **keywords: Any) -> None:
        self._engines: list[weakref.ref[ZeroEngine]] = []  # in the order of setup; models may go
        self._loss_scaler: LossScaler | None = None
        super().__init__(stage, config, **keywords)
        self._backward_sync_control = _BackwardSyncControl()

    # -- what Fabric configures before a run --

    @property
    def precision(self) -> Any:
        """The precision plugin."""
        return super().precision

    @precision.setter
    def precision(self, plugin: Any) -> None:
        self._precision = None if plugin is None else to_zero_plugin(plugin, self.namespace)

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        """Create the model on the root device; at stage 3 on meta if `empty_init`, else on the CPU."""
        return self._creating_model(super().module_init_context(empty_init), empty_init)

    # -- set-up --

    def module_to_device(self, module: nn.Module) -> None:
        """Move a module; at stage 3 only what no engine will move: parameters go there shard by shard."""
        is_empty = any(param.is_meta for param in module.parameters())
        if self._zero_config.shards_params or is_empty or find_engine(module) is not None:
            self._move_rest(module)
        else:
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module. Collective."""
        self._set_up(module)
        return self._wrap(module)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a module and its optimizers. Collective; the scheduler goes on as it is."""
        self._set_up(module).forget_optimizers()  # those of a former run
        sharded = [self.setup_optimizer(optimizer) for optimizer in optimizers]
        return self._wrap(module), sharded, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Shard an optimizer of a module that has been set up. Collective.

        Raises:
            ConfigError: It holds other parameters than those of one such module.
        """
        engines = self._living_engines()
        if not engines:
            raise ConfigError(
                what=f"This {type(optimizer).__name__} is set up before any module.",
                why="An optimizer is sharded as its module's parameters are.",
                fix="Call fabric.setup_module(model) first, or fabric.setup(model, optimizer).",
            )
        # Where parameters are foreign, this engine says so on all ranks.
        return (engine_for(optimizer, engines) or engines[0]).shard_optimizer(optimizer)

    def _set_up(self, module: nn.Module) -> ZeroEngine:
        """Give a module an engine, or find the one it has."""
        precision = str(self.precision.precision)
        config = resolve_for_fabric(self._zero_config, precision, self.world_size)
        engine = reusable_engine(module, config, precision)
        if engine is None:
            # A loss may reach several models (a GAN's): it has one scale.
            engine = self._new_engine(module, config, self._loss_scaler)
        if self._loss_scaler not in (None, engine.loss_scaler):
            raise ConfigError(
                what=f"This {type(module).__name__} has the loss scale of another Fabric.",
                why="A loss that reaches several models is scaled once: those of a Fabric share a scale.",
                fix="Set all models up with one Fabric.",
            )
        self._loss_scaler = engine.loss_scaler
        if hasattr(self.precision, "loss_scaler"):
            self.precision.loss_scaler = engine.loss_scaler
        self._engines = [weakref.ref(known) for known in self._living_engines() if known is not engine]
        self._engines.append(weakref.ref(engine))
        self._end_early_watch()
        return engine

    def _engines_now(self) -> list[ZeroEngine]:
        return self._living_engines()

    def _wrap(self, module: nn.Module) -> ForwardModule:
        forward_module = ForwardModule(module)
        wrappers = importlib.import_module(f"{self.namespace}.wrappers")
        lend_zero_grad(forward_module, wrappers._FabricModule)
        return forward_module

    # -- runtime --

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip the averaged gradients, in the shards, by their global norm. Collective; returns the norm."""
        self.precision.unscale_gradients(optimizer)
        return _sharded(optimizer).clip_grad_norm_(
            max_norm, norm_type=norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip every element of the averaged gradients, in the shards."""
        self.precision.unscale_gradients(optimizer)
        _sharded(optimizer).clip_grad_value_(clip_val)

    # -- queries --

    def engine_of(self, module: nn.Module) -> ZeroEngine:
        """Return the engine of a module, as given to `fabric.setup` or as returned by it.

        Raises:
            ShardingError: It has not been set up.
        """
        engine = engine_behind(module)
        if engine is None:
            raise ShardingError(
                what=f"This {type(module).__name__} has no engine.",
                why="A module is sharded when Fabric sets it up.",
                fix="Call fabric.setup(model, ...) or fabric.setup_module(model) first.",
            )
        return engine

    def _living_engines(self) -> list[ZeroEngine]:
        engines = (reference() for reference in self._engines)
        return [engine for engine in engines if engine is not None]


class _BackwardSyncControl:
    """What `fabric.no_backward_sync` asks."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate without a boundary."""
        engine = engine_behind(module)
        return engine.no_sync() if enabled and engine is not None else nullcontext()


def _sharded(optimizer: Optimizer) -> ShardedOptimizer:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer
    raise ConfigError(
        what=f"This {type(optimizer).__name__} has not been set up, so its gradients cannot be clipped.",
        why="Gradients are in shards, which the optimizer that fabric.setup returned knows.",
        fix="Pass what fabric.setup or fabric.setup_optimizers returned.",
    )
