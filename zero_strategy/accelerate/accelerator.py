"""`ZeroAccelerator`: the engine behind the calls of Accelerate's `Accelerator`.

A subclass that keeps Accelerate's own distributed type, loaders, logging and bookkeeping. Models are not
wrapped: what `prepare` returns is the model that was given, with an engine in place of DDP. This file says
when engines are built and how Accelerate's objects are put around them; gradients are in gradients.py,
checkpoints in checkpoints.py. It must not know buckets or shards.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from accelerate.utils.other import compile_regions_deepspeed
from torch import nn
from torch.utils.data import DataLoader

from zero_strategy.accelerate import settings
from zero_strategy.accelerate.checkpoints import CheckpointMethods
from zero_strategy.accelerate.dummies import Dummies
from zero_strategy.accelerate.gradients import GradientMethods, engine_of
from zero_strategy.accelerate.optimizer import ZeroOptimizer
from zero_strategy.accelerate.plugin import ZeroPlugin
from zero_strategy.accelerate.upstream import TESTED
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError
from zero_strategy.first_weights import attached
from zero_strategy.front_ends.engines import (
    engine_for,
    find_engine,
    leave_out_frozen,
    move_rest,
    reusable_engine,
)
from zero_strategy.front_ends.generation import let_ranks_wait
from zero_strategy.front_ends.grad_scaler import to_zero_scaler
from zero_strategy.log import get_launched_world_size, log_once
from zero_strategy.loss_scaler import LossScaler


class ZeroAccelerator(CheckpointMethods, GradientMethods):
    """Accelerate's `Accelerator` with ZeRO stages 0 to 3 instead of DDP; the same calls.

    Example:
        accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(stage=3))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        accelerator.engine_of(model).ledger.report()

    The surprise: `param.grad` is None; gradients are clipped by `accelerator.clip_grad_norm_`, and looked at
    by `accelerator.engine_of(model).full_grad(param)`.

    Attributes:
        zero_plugin: What is sharded.
    """

    def __init__(self, *args: Any, zero_plugin: ZeroPlugin | None = None, **kwargs: Any) -> None:
        """Take Accelerate's arguments.

        Args:
            *args: As for `Accelerator`.
            zero_plugin: By default that of an earlier `ZeroAccelerator`, or what the launcher was asked for.
            **kwargs: As for `Accelerator`.

        Raises:
            ConfigError: With everything at once in which arguments and config contradict each other; or the
                processes that were launched do not form one group.
        """
        TESTED.require("ZeroAccelerator")
        is_first = not AcceleratorState._shared_state
        earlier = AcceleratorState._shared_state.get("zero_plugin")
        plugin = zero_plugin or earlier or ZeroPlugin.from_environment()
        arguments = dict(inspect.signature(Accelerator.__init__).bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        arguments = settings.agree(plugin.config, arguments, is_first=is_first)
        if get_launched_world_size() > 1 and not torch.accelerator.is_available():
            arguments["cpu"] = True  # Accelerate's word for a process group on CPUs
        super().__init__(**arguments)
        self._require_together()
        self.zero_plugin = plugin
        self._config = settings.with_ddp_settings(plugin.config, arguments)
        self.state.zero_plugin = plugin
        self._engines: list[weakref.ref[ZeroEngine]] = []  # in the order of `prepare`; models may go
        self._loss_scaler: LossScaler | None = None
        self._dummies = Dummies(plugin.optimizer, plugin.scheduler)
        self._batch_sizes: list[int] = []  # of the loaders that are being prepared
        self._scale_losses()

    def _require_together(self) -> None:
        launched = get_launched_world_size()
        if self.num_processes == launched:
            where = f"on {self.device.type}"
            log_once(f"Accelerate: {launched} process{'es train together' * (launched > 1)} {where}.")
            return
        raise ConfigError(
            what=f"This is one of {launched} processes, and for Accelerate there is {self.num_processes}.",
            why="Each would train a copy of its own: Accelerate's state was made before, without a process "
            "group, by a PartialState() or Accelerator() that knew of no GPU.",
            fix="Set ACCELERATE_USE_CPU=true and pass cpu=True to whatever is made first, or start the "
            "script by `python -m zero_strategy.run`, which does.",
        )

    def _scale_losses(self) -> None:
        """Have losses scaled under fp16: fp16 parameters by the engine, fp32 ones by torch's GradScaler."""
        if self.mixed_precision != "fp16":
            return
        self.native_amp = True  # Accelerate computes in fp32 on CPUs, without a word
        if settings.stores_in_16_bits(self._config, "fp16"):
            self.scaler = None
            return
        if self.scaler is None:
            kwargs = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self.scaler = torch.amp.GradScaler(self.device.type, **kwargs)
        self.scaler = to_zero_scaler(self.scaler)

    # -- preparing --

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order. Collective.

        Args:
            *args: What to prepare; `DummyOptim` and `DummyScheduler` become what the config describes.
            device_placement: Whether each of them is moved.

        Returns:
            The same number of objects in the same order; one by itself.

        Raises:
            ConfigError: Something cannot be sharded, or is both in the script and in the config.
        """
        objects = self._dummies.replace(args, 1 if self.split_batches else self.num_processes)
        # Optimizers are sharded as their models are, so models come first; Accelerate keeps the order given.
        order = sorted(range(len(objects)), key=lambda place: not isinstance(objects[place], nn.Module))
        placements = device_placement
        if placements is not None and len(placements) == len(order):
            placements = [placements[place] for place in order]
        loaders = [obj for obj in objects if isinstance(obj, DataLoader)] + self._dataloaders
        self._batch_sizes = [size for obj in loaders if isinstance(size := obj.batch_size, int)]
        prepared = super().prepare(*[objects[place] for place in order], device_placement=placements)
        if len(order) == 1:
            return prepared
        back = dict(zip(order, prepared, strict=True))
        return tuple(back[place] for place in range(len(order)))

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard a model, under Accelerate's autocast. Collective.

        Args:
            model: It is changed in place.
            device_placement: Whether to move it.
            evaluation_mode: It is not trained: only stage 3 shards it then.

        Returns:
            The model itself.
        """
        moves = self.device_placement if device_placement is None else device_placement
        is_new = not getattr(model, "_is_accelerate_prepared", False)
        inside = getattr(model, "_orig_mod", model)
        engine_moves = self._config.shards_params or find_engine(inside) is not None
        engine_moves = engine_moves or any(param.is_meta for param in inside.parameters())
        with self._compiling_later():
            # Without DDP, which is what evaluation means to Accelerate.
            model = super().prepare_model(model, moves and not engine_moves, evaluation_mode=True)
        # What is on meta gets its values from an engine, trained or not.
        if not evaluation_mode or self._config.shards_params or any(p.is_meta for p in inside.parameters()):
            self._give_engine(inside, moves)
            if model is not inside:  # the wrapper of torch.compile has a zero_grad of its own
                model.zero_grad = inside.zero_grad  # type: ignore[method-assign]
        if is_new and model is inside:
            self._compile(model)
        return model

    def _give_engine(self, module: nn.Module, moves: bool) -> None:
        config = settings.resolve(self._config, module, self._facts())
        engine = find_engine(module)
        if engine is not None:
            asked = f"by ZeroPlugin, with mixed_precision={self.mixed_precision!r}"
            engine = reusable_engine(engine, config, dtype=None, asked=asked)
        if engine is None:
            _start_adapters(module)
            device = self.device if moves else None
            # What is made under the user's own inference_mode could not be trained later.
            with torch.inference_mode(False):
                engine = ZeroEngine(
                    module,
                    config,
                    device=device,
                    param_init_fn=self.zero_plugin.param_init_fn,
                    loss_scaler=self._loss_scaler,
                )
            if device is not None:
                move_rest(module, device)
            let_ranks_wait(engine)
        _serve_adapters(engine)
        self._share_loss_scale(engine)
        known = [other for other in self.living_engines() if other is not engine]
        self._engines = [weakref.ref(other) for other in [*known, engine]]
        of_process = [ref for ref in getattr(self.state, "zero_engines", []) if ref() not in (None, engine)]
        self.state.zero_engines = [*of_process, weakref.ref(engine)]
        for wrapper in self._optimizers:  # prepared before their model
            if not wrapper.is_sharded and engine_for(wrapper.users, [engine]) is not None:
                leave_out_frozen(wrapper.users, engine)
                wrapper.attach(engine.shard_optimizer(wrapper.users))

    def _share_loss_scale(self, engine: ZeroEngine) -> None:
        if self._loss_scaler is None:
            self._loss_scaler = engine.loss_scaler
        elif engine.loss_scaler is not self._loss_scaler and engine.loss_scaler.is_active:
            raise ConfigError(
                what=f"This {type(engine.model).__name__} has the loss scale of another Accelerator.",
                why="A loss that reaches several models is scaled once: those of an Accelerator share it.",
                fix="Prepare all models with one Accelerator.",
            )

    def _facts(self) -> settings.Facts:
        return settings.Facts(
            world_size=self.num_processes,
            precision=str(self.mixed_precision),
            num_micro_batches=int(self.gradient_accumulation_steps),
            batch_sizes=self._batch_sizes,
            split_batches=bool(self.split_batches),
        )

    @contextmanager
    def _compiling_later(self) -> Iterator[None]:
        """Keep Accelerate from compiling: it would return a copy, which the engine does not know."""
        plugin = self.state.dynamo_plugin
        backend, plugin.backend = plugin.backend, DynamoBackend.NO
        try:
            yield
        finally:
            plugin.backend = backend

    def _compile(self, model: nn.Module) -> None:
        plugin = self.state.dynamo_plugin
        if plugin.backend == DynamoBackend.NO:
            return
        if plugin.use_regional_compilation:
            compile_regions_deepspeed(model, **plugin.to_kwargs())  # in place
        else:
            model.compile(**plugin.to_kwargs())

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Shard an optimizer; one whose model is not prepared yet, when that is. Collective.

        Args:
            optimizer: Over parameters of one model.
            device_placement: Of no effect: its state is where the engine has it.

        Raises:
            ConfigError: It is not element-wise, or its parameters are of several models.
        """
        if getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer)
        engine = engine_for(optimizer, self.living_engines())
        if engine is not None:
            leave_out_frozen(optimizer, engine)
        wrapper = ZeroOptimizer(
            optimizer if engine is None else engine.shard_optimizer(optimizer), self.scaler
        )
        self._optimizers.append(wrapper)
        return wrapper

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Wrap a scheduler as Accelerate does: it moves when its optimizer has been stepped.

        How far is Accelerate's own rule (as many steps as there are processes, unless `split_batches`). A
        schedule of the config moves one step.
        """
        if getattr(scheduler, "_is_accelerate_prepared", False):
            return super().prepare_scheduler(scheduler)
        inner = getattr(scheduler, "optimizer", None)
        owners = [
            wrapper for wrapper in self._optimizers if inner in (wrapper, wrapper.optimizer, wrapper.users)
        ]
        wrapped = AcceleratedScheduler(
            scheduler,
            owners or self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches or self._dummies.has_made(scheduler),
        )
        self._schedulers.append(wrapped)
        return wrapped

    # -- queries --

    def engine_of(self, model: nn.Module) -> ZeroEngine:
        """Return the engine of a model that was prepared.

        Raises:
            ConfigError: It has none.
        """
        engine = engine_of(model)
        if engine is None:
            raise ConfigError(
                what=f"This {type(model).__name__} has no engine.",
                why="A model is sharded when it is prepared; one for evaluation at stage 3 only.",
                fix="Call accelerator.prepare(model) first.",
            )
        return engine

    def living_engines(self) -> list[ZeroEngine]:
        """Return the engines of the models that were prepared and still exist, in that order."""
        engines = (reference() for reference in self._engines)
        return [engine for engine in engines if engine is not None]

    # -- end --

    def free_memory(self, *objects: Any) -> Any:
        """Forget what was prepared, optimizer states included. Models stay as they are, sharded.

        Args:
            *objects: As for `Accelerator`.
        """
        for engine in self.living_engines():
            engine.forget_optimizers()
        self._engines.clear()
        return super().free_memory(*objects)


def _start_adapters(module: nn.Module) -> None:
    """Give adapters their first values that were put around a model whose weights are still in files."""
    if "peft" in sys.modules and attached(module):
        from zero_strategy.peft.starting import start_adapters

        start_adapters(module)


def _serve_adapters(engine: ZeroEngine) -> None:
    """Have calls of PEFT's work that look at gradients and weights, where the model may have adapters."""
    if "peft" in sys.modules:
        from zero_strategy.peft.adalora import serve

        serve(engine)
