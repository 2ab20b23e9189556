"""What `ZeroStrategy` is for the Trainer and for Fabric alike: one body of code for both.

Owns the constructor (config, DDP's keywords, what is refused), where tensors of a new model are created, the
search for an engine a module has already, and moving what no engine holds. `strategy.py` adds the Trainer's
hooks and `fabric.py` Fabric's. Must not know either's hooks, nor buckets and shards.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_strategy.comm.links import Links
from zero_strategy.comm.topology import watch_ranks
from zero_strategy.comm.watch import Watch
from zero_strategy.config import ZeroConfig
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends import engines
from zero_strategy.front_ends.engines import find_engine, move_rest
from zero_strategy.front_ends.generation import let_ranks_wait
from zero_strategy.front_ends.settings import load_config
from zero_strategy.lightning.checkpoint_files import check_async_save, check_type
from zero_strategy.lightning.endings import refuse_port, reporting
from zero_strategy.lightning.other_strategies import refuse_others_keywords
from zero_strategy.lightning.settings import note_uncast_batches
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.materialize import InitFn

# What is written here stands in front of a `DDPStrategy`; which one is known in `strategy_class` only.
_Base: Any = object

# A Trainer's package and the Fabric it is built on.
FABRIC_OF = {"lightning.pytorch": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}

# What precisions make of parameters; the others leave them alone.
_DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}

# Keywords of every DDPStrategy that mean the same here; the others are settings of DDP's own wrapper.
DDP_KEYWORDS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
)


class ZeroStrategyBase(_Base):  # type: ignore[misc]
    """The common part of both strategies. Subclasses say what the precision plugin's keyword is."""

    namespace: str  # of the Lightning package the class derives from
    precision_keyword: str

    def __init__(self, stage: int | None = None, config: Any = None, **keywords: Any) -> None:
        wanted = (*DDP_KEYWORDS, self.precision_keyword)
        ddp_keywords = {name: keywords.pop(name) for name in wanted if name in keywords}
        self._state_dict_type: str | None = keywords.pop("state_dict_type", None)
        check_type(self._state_dict_type)
        self._async_save: bool = keywords.pop("async_save", False)
        check_async_save(self._async_save, self._state_dict_type)
        self._param_init_fn: InitFn | None = keywords.pop("param_init_fn", None)
        refuse_others_keywords(keywords)
        self._zero_config: ZeroConfig = load_config(stage, config, keywords)
        _refuse_spawn(self._zero_config, ddp_keywords.get("start_method", "popen"))
        self._early_watch: Watch | None = None
        super().__init__(**ddp_keywords)

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            reporting(self._launcher, self._watches, self._is_agreed)

    def setup_environment(self) -> None:
        """Refuse what cannot work, then begin as `DDPStrategy` does."""
        kind = type(self.checkpoint_io).__name__
        if self._state_dict_type == "sharded" and kind != "TorchCheckpointIO":
            raise ConfigError(
                what=f"state_dict_type='sharded' cannot be used with the CheckpointIO {kind}.",
                why="A CheckpointIO writes one file from rank 0; here every rank writes its own part.",
                fix="Leave the plugin out, or use state_dict_type='full'.",
            )
        try:
            super().setup_environment()
        except dist.DistNetworkError as error:
            raise refuse_port(error) from error
        # Until there is an engine, which has a watch of its own.
        self._end_early_watch()
        self._early_watch = watch_ranks("launch", Links())

    def _end_early_watch(self) -> None:
        if self._early_watch is not None:
            self._early_watch.close()
        self._early_watch = None

    def _watches(self) -> list[Watch]:
        """Return what to report a failure of this rank to."""
        early = [] if self._early_watch is None else [self._early_watch]
        return early + [engine.watch for engine in self._engines_now()]

    def _engines_now(self) -> list[ZeroEngine]:
        raise NotImplementedError

    def _is_agreed(self, error: BaseException) -> bool:
        """Tell whether an exception is raised by all ranks together."""
        return False

    @property
    def _is_sharded(self) -> bool:
        """Whether checkpoints are written as folders; files if nobody has said so."""
        return self._state_dict_type == "sharded"

    @contextmanager
    def _creating_model(
        self, context: AbstractContextManager[Any], empty_init: bool | None
    ) -> Iterator[None]:
        """Enter the stock context for a new model; at stage 3 it is created on meta, or on the CPU.

        A model that needs stage 3 need not fit on one device whole, nor in a rank's memory if it is to be
        empty: the engine moves it there shard by shard, and fills what is on meta bucket by bucket.
        """
        with context:
            if not self._zero_config.shards_params:
                yield
            else:
                with torch.device("meta" if empty_init else "cpu"):  # the innermost device context counts
                    yield

    def _new_engine(
        self, module: nn.Module, config: ZeroConfig, loss_scaler: LossScaler | None = None
    ) -> ZeroEngine:
        # What is made under the user's own inference_mode could not be trained later.
        with torch.inference_mode(False):
            engine = ZeroEngine(
                module,
                config,
                device=self.root_device,
                param_init_fn=self._param_init_fn,
                loss_scaler=loss_scaler,
            )
        let_ranks_wait(engine)
        return engine

    def _move_rest(self, module: nn.Module) -> None:
        """Move what the engine does not hold: metrics, and what the module says is its device."""
        fabric = FABRIC_OF.get(self.namespace, self.namespace)
        mixin = importlib.import_module(f"{fabric}.utilities.device_dtype_mixin")
        mixin._update_properties(module, device=self.root_device)
        move_rest(module, self.root_device)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no importable name, and `spawn` launches (stages 1 and 2) pickle the strategy.
        return _empty_strategy, (self.namespace,), self.__getstate__()


def derive(hooks: type, namespace: str, name: str) -> Any:
    """Build a strategy class: hooks in front of a namespace's `DDPStrategy`.

    Args:
        hooks: `TrainerHooks` or `FabricHooks`.
        namespace: A Lightning package with a `strategies` module.
        name: Of the new class, under which `zero_strategy.lightning` has it.

    Returns:
        The class. Its base counts: the Trainer decides by it that samplers are distributed and that logged
        values are reduced.
    """
    base = importlib.import_module(f"{namespace}.strategies").DDPStrategy
    names = {"__doc__": hooks.__doc__, "__module__": "zero_strategy.lightning", "namespace": namespace}
    return type(name, (hooks, base), names)


def reusable_engine(module: nn.Module, config: ZeroConfig, precision: str) -> ZeroEngine | None:
    """Return the engine a former run left on a module if it does what this one asks for.

    Args:
        module: Any module; an engine that is of no more use is taken off it.
        config: Resolved.
        precision: Of the precision plugin, such as "bf16-true".

    Returns:
        The engine, or None if a new one must be built.

    Raises:
        ConfigError: The module is sharded at stage 3 with other settings.
    """
    engine = find_engine(module)
    if engine is None:
        note_uncast_batches(module, precision)
        return None
    asked = f"stage={config.stage}, precision={precision!r}"
    return engines.reusable_engine(engine, config, dtype=_DTYPES.get(precision), asked=asked)


def _empty_strategy(namespace: str) -> Any:
    from zero_strategy.lightning import strategy_class

    cls = strategy_class(namespace)
    return cls.__new__(cls)


def _refuse_spawn(config: ZeroConfig, start_method: str) -> None:
    if not config.shards_params or start_method == "popen":
        return
    raise ConfigError(
        what=f"start_method={start_method!r} cannot be used at stage 3.",
        why="That launcher sends the model back to the process that started it; here no rank holds it whole.",
        fix='Use start_method="popen" (the default) or torchrun; in a notebook, stage=2 works.',
    )
