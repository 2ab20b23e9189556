"""What stands in for methods of `Trainer`: one table, from which a class is patched, or a mixin is made.

Each body is called with the trainer and the method that it stands in for, bound to it, before the method's
own arguments. Called by rebinding.py and trainer.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from zero_strategy.accelerate.gradients import engine_of
from zero_strategy.front_ends.upstream import Stock
from zero_strategy.transformers import configured, saving
from zero_strategy.transformers.plugin import plugin_for
from zero_strategy.trl.rebinding import install as install_for_trl
from zero_strategy.trl.rebinding import is_of_trl

_ASKED_OF_DDP = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")


def build_accelerator_args(trainer: Any, stock: Stock, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a trainer's Accelerator, with what is to be sharded.

    Raises:
        ConfigError: With everything at once in which config and arguments contradict each other.
    """
    if is_of_trl(trainer):
        install_for_trl()
    arguments: dict[str, Any] = stock(**kwargs)
    if "zero_plugin" not in arguments:
        arguments["zero_plugin"] = plugin_for(trainer.args, getattr(trainer, "zero_plugin", None))
        # A Trainer fills these in for DDP; what nobody has asked for is not worth a line of the log.
        values = {name: getattr(trainer.args, f"ddp_{name}") for name in _ASKED_OF_DDP}
        asked = {name: value for name, value in values.items() if value is not None}
        others = [
            handler
            for handler in arguments["kwargs_handlers"]
            if not isinstance(handler, DistributedDataParallelKwargs)
        ]
        arguments["kwargs_handlers"] = [*others, *([DistributedDataParallelKwargs(**asked)] if asked else [])]
    return arguments


def move_model_to_device(trainer: Any, stock: Stock, model: nn.Module, device: Any) -> None:
    """Move a model to the device, unless it is moved, or read from files, when it is sharded."""
    is_on_meta = any(param.is_meta for param in model.parameters())
    if not (trainer.accelerator.zero_plugin.config.shards_params or is_on_meta):
        stock(model, device)


def evaluation_loop(trainer: Any, stock: Stock, *args: Any, **kwargs: Any) -> Any:
    """Evaluate, on a model that is whole meanwhile if that was asked for and the trainer generates."""
    generates = getattr(trainer.args, "predict_with_generate", False)
    if not (generates and trainer.accelerator.zero_plugin.gathers_to_generate):
        return stock(*args, **kwargs)
    if engine_of(trainer.model) is None:
        trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    engine = engine_of(trainer.model)
    with nullcontext() if engine is None else engine.unsharded_params():
        return stock(*args, **kwargs)


BODIES: dict[str, Callable[..., Any]] = {
    "_build_accelerator_args": build_accelerator_args,
    "_move_model_to_device": move_model_to_device,
    "evaluation_loop": evaluation_loop,
    "create_optimizer": configured.create_optimizer,
    "create_scheduler": configured.create_scheduler,
    "save_model": saving.save_model,
    "_save_optimizer_and_scheduler": saving.save_optimizer_and_scheduler,
    "_load_from_checkpoint": saving.load_from_checkpoint,
    "_load_best_model": saving.load_best_model,
    "_load_optimizer_and_scheduler": saving.load_optimizer_and_scheduler,
}
