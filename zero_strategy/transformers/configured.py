"""The optimizer and the schedule that a ds_config.json describes, made for a Trainer.

"auto" is what the `TrainingArguments` say, as with DeepSpeed; a number must be the same as theirs. Where the
config has no such block, the Trainer makes its own. The functions stand in for methods of `Trainer`; see
methods.py.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

from zero_strategy.accelerate.dummies import build_optimizer, build_scheduler
from zero_strategy.accelerate.gradients import engine_of
from zero_strategy.config_keys import AUTO
from zero_strategy.config_source import Setting, Settings, error_of
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.upstream import Stock
from zero_strategy.transformers.plugin import TrainerPlugin, compare


def create_optimizer(trainer: Any, stock: Stock, *args: Any) -> Any:
    """Make the optimizer, unless the trainer has one: the config's, or the Trainer's own.

    Args:
        trainer: Whose optimizer.
        stock: Makes the Trainer's own.
        *args: As for `Trainer`: a model, or nothing.

    Returns:
        The optimizer.

    Raises:
        ConfigError: There is one in the config and one was given.
    """
    target = next((model for model in args if model is not None), trainer.model)
    block = _plugin_of(trainer).optimizer_block
    if trainer.optimizer is None:
        engine = engine_of(target)
        if engine is not None:
            engine.forget_optimizers()  # of a former run, which nobody steps any more
        if block:
            trainer.optimizer = build_optimizer(block, _dummy_of(trainer.args, target))
    elif block and not hasattr(trainer.optimizer, "_is_accelerate_prepared"):
        raise _twice("an optimizer", trainer.optimizer, block)
    return trainer.optimizer if block else stock(*args)


def create_scheduler(trainer: Any, stock: Stock, num_training_steps: int, optimizer: Any = None) -> Any:
    """Make the schedule, unless the trainer has one: the config's, or the Trainer's own.

    Args:
        trainer: Whose schedule.
        stock: Makes the Trainer's own.
        num_training_steps: Optimizer steps of the run.
        optimizer: As for `Trainer`.

    Returns:
        The schedule.

    Raises:
        ConfigError: There is one in the config and one was given, or its numbers are not the arguments'.
    """
    block = _plugin_of(trainer).scheduler_block
    if not block:
        return stock(num_training_steps, **({} if optimizer is None else {"optimizer": optimizer}))
    if trainer.lr_scheduler is not None:
        raise _twice("a scheduler", trainer.lr_scheduler, block)
    arguments = trainer.args
    num_warmup_steps = max(1, arguments.get_warmup_steps(num_training_steps))
    known = {
        "params.total_num_steps": (num_training_steps, "steps of the run"),
        "params.warmup_num_steps": (num_warmup_steps, "warmup_steps"),
        "params.warmup_max_lr": (arguments.learning_rate, "learning_rate"),
    }
    faults = compare(block, known, "scheduler.")
    if faults:
        raise error_of(faults)
    completed = {
        key: Setting(known[key][0], setting.origin) if key in known and setting.value == AUTO else setting
        for key, setting in block.items()
    }
    optimizer = trainer.optimizer if optimizer is None else optimizer
    dummy = DummyScheduler(optimizer, total_num_steps=num_training_steps, warmup_num_steps=num_warmup_steps)
    trainer.lr_scheduler = build_scheduler(completed, dummy, optimizer, 1)
    trainer._created_lr_scheduler = True
    return trainer.lr_scheduler


# -- helpers --


def _plugin_of(trainer: Any) -> TrainerPlugin:
    plugin: TrainerPlugin = trainer.accelerator.zero_plugin
    return plugin


def _dummy_of(arguments: Any, model: nn.Module) -> DummyOptim:
    return DummyOptim(
        [param for param in model.parameters() if param.requires_grad],
        lr=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        betas=(arguments.adam_beta1, arguments.adam_beta2),
        eps=arguments.adam_epsilon,
    )


def _twice(name: str, given: Any, block: Settings) -> ConfigError:
    origin = next(iter(block.values())).origin
    return ConfigError(
        what=f"There is {name} in the config (from {origin}), and the Trainer was given a "
        f"{type(given).__name__}.",
        why="Only one of them could have an effect.",
        fix="Remove the block from the config, or pass none.",
    )
