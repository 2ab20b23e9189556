"""One truth where two places can set the same thing: the config and Lightning's Trainer or Fabric.

Called by the strategies before they build an engine. The Trainer decides precision, accumulation and
clipping, Fabric the precision; a config that says something else is refused rather than one of the two
ignored, and "auto" takes their value. Must not know the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.settings import sizes_of
from zero_strategy.log import log_once


def resolve_for_trainer(config: ZeroConfig, trainer: Any, precision: str, world_size: int) -> ZeroConfig:
    """Complete a config with the Trainer's values.

    Args:
        config: As the user wrote it.
        trainer: The Trainer that is about to run.
        precision: Of the precision plugin, such as "bf16-true".
        world_size: Number of ranks.

    Returns:
        The resolved config, its `gradient_accumulation_steps` the Trainer's.

    Raises:
        ConfigError: Config and Trainer contradict each other.
    """
    num_micro_batches = trainer.accumulate_grad_batches
    batch_size = _loader_batch_size(trainer)
    resolved = config.resolve(
        world_size,
        auto={
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": num_micro_batches,
            "train_batch_size": batch_size * num_micro_batches * world_size,
            "gradient_clipping": float(trainer.gradient_clip_val or 0.0),
            "bf16.enabled": precision == "bf16-true",
            "fp16.enabled": precision == "16-true",
            **sizes_of(config, {}, "Lightning"),
        },
    )
    _check_precision(resolved, precision)
    _check_clipping(resolved, trainer)
    if not trainer.lightning_module.automatic_optimization:
        return resolved  # the module accumulates as it likes
    return _check_accumulation(resolved, num_micro_batches).resolve(world_size)


def resolve_for_fabric(config: ZeroConfig, precision: str, world_size: int) -> ZeroConfig:
    """Complete a config with Fabric's values; the loop, with its batches and clipping, is the user's own.

    Args:
        config: As the user wrote it.
        precision: Of the precision plugin, such as "bf16-true".
        world_size: Number of ranks.

    Returns:
        The resolved config.

    Raises:
        ConfigError: Config and Fabric contradict each other, or batch numbers or clipping are "auto".
    """
    auto = {
        "bf16.enabled": precision == "bf16-true",
        "fp16.enabled": precision == "16-true",
        **sizes_of(config, {}, "Lightning"),
    }
    resolved = config.resolve(world_size, auto=auto)
    _check_precision(resolved, precision)
    return resolved


def compare_batch_size(config: ZeroConfig, trainer: Any, world_size: int) -> ConfigError | None:
    """Compare a config's batch numbers with the training loader, which exists when training starts.

    Args:
        config: As the user wrote it.
        trainer: The Trainer, its training loader set up.
        world_size: Number of ranks.

    Returns:
        The error to raise, or None: also where the loader does not say its batch size.
    """
    size = _batch_size_of(trainer.train_dataloader)
    if size is None:
        return None
    num_micro_batches = trainer.accumulate_grad_batches
    found = {"train_micro_batch_size_per_gpu": (size, "the batch size of the training loader")}
    if trainer.lightning_module.automatic_optimization:
        found["train_batch_size"] = (
            size * num_micro_batches * world_size,
            f"{size} of the training loader x accumulate_grad_batches={num_micro_batches} "
            f"x {world_size} ranks",
        )
    for key, (number, origin) in found.items():
        said = getattr(config, key)
        if config.is_given(key) and key not in config.auto_keys and said != number:
            return ConfigError(
                what=f"The config has {key} = {said} (from {config.origin_of(key)}), and the Trainer trains "
                f"with {number}: {origin}.",
                why="The loader and the Trainer make the batches, so only their numbers can have an effect.",
                fix=f"Set {key} to {number} or 'auto', leave it out, or change the loader or the Trainer.",
            )
    return None


def note_uncast_batches(module: nn.Module, precision: str) -> None:
    """Say that nobody casts the batch for a module in 16 bits, where Lightning is told of fp32.

    Args:
        module: The user's.
        precision: Of the precision plugin, such as "32-true".
    """
    if precision != "32-true":
        return
    for dtype in {param.dtype for param in module.parameters()} & {torch.bfloat16, torch.float16}:
        meant = "bf16-true" if dtype == torch.bfloat16 else "16-true"
        log_once(
            f"{type(module).__name__} has parameters in {str(dtype).removeprefix('torch.')} and Lightning "
            f"precision={precision!r}, so batches stay as they are: the module casts them, or pass "
            f"precision={meant!r}, which does."
        )


def _check_precision(config: ZeroConfig, precision: str) -> None:
    asked = {"bf16.enabled": config.bf16.enabled, "fp16.enabled": config.fp16.enabled}
    for (key, enabled), meaning in zip(asked.items(), ("bf16-true", "16-true"), strict=True):
        if not config.is_given(key) or enabled == (precision == meaning):
            continue
        raise ConfigError(
            what=f"The config has {key} = {str(enabled).lower()} (from {config.origin_of(key)}), and "
            f"Lightning has precision={precision!r}.",
            why=f"{key} means {key.partition('.')[0]} parameters with fp32 masters: Lightning's "
            f"precision={meaning!r}, under which it casts the batches too.",
            fix=f"Pass precision={meaning!r} to the Trainer or to Fabric."
            if enabled
            else f"Set {key} to true, 'auto', or leave it out.",
        )


def _check_clipping(config: ZeroConfig, trainer: Any) -> None:
    value = trainer.gradient_clip_val
    algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", "norm"))
    if value is None:
        return
    if not config.is_given("gradient_clipping"):
        log_once(
            f"The Trainer clips gradients by {algorithm} (gradient_clip_val={value}), and the config's "
            "gradient_clipping, which nobody has set, leaves that to it."
        )
        return
    if value == config.gradient_clipping and algorithm == "norm":
        return
    raise ConfigError(
        what=f"The config has gradient_clipping = {config.gradient_clipping}, and the Trainer has "
        f"gradient_clip_val={value}, gradient_clip_algorithm={algorithm!r}.",
        why="Gradients are clipped once a step, by the norm given in one of the two places.",
        fix="Give one of them, or the same norm in both.",
    )


def _check_accumulation(config: ZeroConfig, num_micro_batches: int) -> ZeroConfig:
    said = config.gradient_accumulation_steps
    if not config.is_given("gradient_accumulation_steps"):
        return ZeroConfig.load(config, gradient_accumulation_steps=num_micro_batches)
    if said == num_micro_batches:
        return config
    raise ConfigError(
        what=f"The config has gradient_accumulation_steps = {said}, and the Trainer has "
        f"accumulate_grad_batches={num_micro_batches}.",
        why="The Trainer counts micro-batches and divides the loss, so only its number can have an effect.",
        fix=f"Pass Trainer(accumulate_grad_batches={said}), or leave the key out of the config.",
    )


def _loader_batch_size(trainer: Any) -> int:
    """Return the batch size of the loader given to `fit`, or 1 if not known yet; only "auto" asks for it."""
    # A loader, or a module or datamodule that makes one later.
    return _batch_size_of(trainer.fit_loop._data_source.instance) or 1


def _batch_size_of(loader: Any) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
