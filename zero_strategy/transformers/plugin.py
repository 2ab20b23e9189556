"""`TrainerPlugin`: what is sharded for a `Trainer`, agreed with its `TrainingArguments`.

The config and the arguments can set the same things: batch numbers, clipping, precision, the optimizer. Here
they are compared, all at once, before an Accelerator is made, by the table of transformers' own DeepSpeed
integration (transformers 5.24, integrations/deepspeed.py:136-263). The Trainer counts micro-batches, clips
and makes optimizers, so its numbers are what counts. It must not know the engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zero_strategy.accelerate import environment
from zero_strategy.accelerate.launch_block import DEFAULT_ORIGIN, settings_of_block
from zero_strategy.accelerate.plugin import ZeroPlugin
from zero_strategy.config import ZeroConfig, settings_of
from zero_strategy.config_keys import AUTO
from zero_strategy.config_source import BATCH_KEYS, Fault, Settings, error_of
from zero_strategy.errors import ConfigError

CLIPPING = "gradient_clipping"
Known = Mapping[str, tuple[object, str]]  # dotted key -> the arguments' value, and where they have it


class TrainerPlugin(ZeroPlugin):
    """What is to be sharded, with the batch numbers of a Trainer's arguments.

    Attributes:
        batch_size: Samples of one rank and micro-batch.
        num_micro_batches: For each optimizer step.
        optimizer_block: The block `optimizer` of the config, which the Trainer builds from.
        scheduler_block: The block `scheduler`, likewise.
    """

    def __init__(self, plugin: ZeroPlugin, arguments: Any) -> None:
        """Agree on what both set.

        Args:
            plugin: As the user has it.
            arguments: The `TrainingArguments`.

        Raises:
            ConfigError: With everything at once in which they contradict each other, or that cannot be had.
        """
        settings = settings_of(plugin.config)
        faults = [
            *compare(settings, _known_of_config(arguments)),
            *compare(plugin.optimizer, _known_of_optimizer(arguments), "optimizer."),
            *compare(
                plugin.scheduler,
                {"params.warmup_max_lr": (arguments.learning_rate, "learning_rate")},
                "scheduler.",
            ),
            *_precision_faults(settings, str(arguments.mixed_precision)),
            *_refusals(arguments),
        ]
        if faults:
            raise error_of(faults)
        # The Accelerator of a Trainer is told one micro-batch; these numbers come back by `Facts`.
        keywords: dict[str, Any] = dict.fromkeys(BATCH_KEYS, AUTO)
        if CLIPPING in plugin.config.auto_keys:
            keywords[CLIPPING] = float(arguments.max_grad_norm or 0.0)
        self.config = ZeroConfig.load(plugin.config, **keywords)
        self.optimizer, self.scheduler = {}, {}  # not for `DummyOptim`s
        self.optimizer_block, self.scheduler_block = plugin.optimizer, plugin.scheduler
        self.state_dict_type = plugin.state_dict_type
        self.param_init_fn = plugin.param_init_fn
        self.gathers_to_generate = plugin.gathers_to_generate
        self.batch_size = int(arguments.per_device_train_batch_size)
        self.num_micro_batches = int(arguments.gradient_accumulation_steps)


def plugin_for(arguments: Any, given: ZeroPlugin | None) -> TrainerPlugin:
    """Return what is to be sharded for a Trainer.

    Args:
        arguments: Its `TrainingArguments`; what they have as `deepspeed` counts.
        given: What its class or its maker says; None: what the launcher was asked for, or stage 3.

    Raises:
        ConfigError: With everything at once in which they contradict each other.
    """
    if not arguments.deepspeed:
        return TrainerPlugin(given or ZeroPlugin.from_environment(), arguments)
    if given is not None:
        raise ConfigError(
            what="A Trainer was given a zero_plugin, and TrainingArguments with deepspeed=.",
            why="Both say what is to be sharded.",
            fix="Leave one of them out.",
        )
    source = arguments.deepspeed
    if isinstance(source, str) and source.lstrip().startswith("{"):
        source = json.loads(source)
    return TrainerPlugin(ZeroPlugin.of_settings(_with_launch(settings_of(source))), arguments)


def compare(settings: Settings, known: Known, prefix: str = "") -> list[Fault]:
    """Return a fault for each value that the arguments have another one for.

    Args:
        settings: Of the config, or of a block in it.
        known: What the arguments have, by key; "auto" agrees with everything.
        prefix: Of the block, for messages.
    """
    faults = []
    for key, (value, name) in known.items():
        setting = settings.get(key)
        if setting is not None and setting.value not in (AUTO, value):
            faults.append(_mismatch(prefix + key, setting.value, setting.origin, f"{name} = {value}"))
    return faults


# -- helpers --


def _known_of_config(arguments: Any) -> Known:
    micro, steps = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    known: dict[str, tuple[object, str]] = {
        "gradient_accumulation_steps": (steps, "gradient_accumulation_steps"),
        CLIPPING: (arguments.max_grad_norm, "max_grad_norm"),
    }
    if not arguments.auto_find_batch_size:  # which changes it later
        total = micro * steps * arguments.world_size
        known["train_micro_batch_size_per_gpu"] = (micro, "per_device_train_batch_size")
        known["train_batch_size"] = (total, "per_device_train_batch_size * accumulation * world size")
    return known


def _known_of_optimizer(arguments: Any) -> Known:
    return {
        "params.lr": (arguments.learning_rate, "learning_rate"),
        "params.betas": ([arguments.adam_beta1, arguments.adam_beta2], "adam_beta1 and adam_beta2"),
        "params.eps": (arguments.adam_epsilon, "adam_epsilon"),
        "params.weight_decay": (arguments.weight_decay, "weight_decay"),
    }


def _precision_faults(settings: Settings, precision: str) -> list[Fault]:
    faults = []
    for name in ("bf16", "fp16"):
        setting = settings.get(f"{name}.enabled")
        if setting is not None and setting.value is True and precision != name:
            argument = f"mixed_precision = {precision!r} (by bf16, fp16 or the launcher)"
            faults.append(_mismatch(f"{name}.enabled", True, setting.origin, argument))
    return faults


def _mismatch(key: str, value: object, origin: str, argument: str) -> Fault:
    return Fault(
        f"{key} = {value} (from {origin}), and the TrainingArguments have {argument}.",
        "The Trainer acts by its arguments, so another value in the config would have no effect.",
        f"Set {key} to 'auto', or both to the same.",
        key,
    )


def _with_launch(settings: Settings) -> Settings:
    """Return a config's settings, completed by what the launcher was asked for besides.

    Raises:
        ConfigError: With every key that has two values.
    """
    launch = environment.find_launch()
    if launch is None:
        return settings
    launched = {
        key: setting
        for key, setting in settings_of_block(launch.block, launch.origin)[0].items()
        if setting.value != AUTO and setting.origin != DEFAULT_ORIGIN
    }
    faults = [
        Fault(
            f"{key} = {setting.value} (from {setting.origin}, the arguments' deepspeed), and "
            f"{launched[key].value} (from {launched[key].origin}).",
            "The launcher and the script ask for different things.",
            "Say it in one of them.",
            key,
        )
        for key, setting in settings.items()
        if key in launched and setting.value not in (AUTO, launched[key].value)
    ]
    if faults:
        raise error_of(faults)
    return {**settings, **launched}


def _refusals(arguments: Any) -> list[Fault]:
    """Return which arguments cannot be had on sharded models."""
    faults = []
    optimizer = str(getattr(arguments.optim, "value", arguments.optim))
    if "8bit" in optimizer or "4bit" in optimizer:
        faults.append(
            Fault(
                f"optim = {optimizer!r} cannot update shards.",
                "Its state is quantised in blocks of a whole parameter, and a rank has a slice of it.",
                "Use 'adamw_torch' or another optimizer that treats every element alike; sharding divides "
                "its state by the number of ranks.",
            )
        )
    for name in ("bf16_full_eval", "fp16_full_eval"):
        if getattr(arguments, name):
            faults.append(
                Fault(
                    f"{name} = True cannot be had on a sharded model.",
                    "It converts the parameters that the engine holds.",
                    f"Use {name[:4]}=True, whose autocast is there in evaluation too.",
                )
            )
    if arguments.save_on_each_node and arguments.world_size > 1:
        faults.append(
            Fault(
                "save_on_each_node = True cannot be had.",
                "Whole weights and states are gathered to rank 0 alone.",
                "Save to a folder that all nodes see, and leave save_on_each_node out.",
            )
        )
    return faults
