"""One truth where two places can set the same thing: the config, and Accelerate's arguments.

`agree` compares them when a `ZeroAccelerator` is made and returns what Accelerate is to be told; `resolve`
completes the config when a model is prepared, by Accelerate's table for "auto". Sources of that table:
accelerate 1.15, accelerator.py:2179-2356 and utils/dataclasses.py:1267-1446. It must not know the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn

from zero_strategy.accelerate import environment
from zero_strategy.config import ZeroConfig
from zero_strategy.config_source import Fault, error_of
from zero_strategy.front_ends.settings import GATHER_KEY, sizes_of
from zero_strategy.log import log_once

AUTO_CLIPPING = 1.0  # Accelerate's value for gradient_clipping = "auto"
# Accelerate's precision and the block that stores parameters so.
_BLOCKS = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}
_OTHER_PLUGINS = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism",
    "parallelism_config": "a parallelism_config",
}
# Of DDP's own wrapper, which there is none of here.
_IDLE_DDP = (
    "dim",
    "bucket_cap_mb",
    "find_unused_parameters",
    "check_reduction",
    "gradient_as_bucket_view",
    "static_graph",
)


class Facts(NamedTuple):
    """What Accelerate knows when a model is prepared."""

    world_size: int
    precision: str  # "no", "bf16" or "fp16"
    num_micro_batches: int  # per optimizer step
    batch_sizes: Sequence[int]  # of the loaders that are known
    split_batches: bool


def agree(config: ZeroConfig, arguments: Mapping[str, Any], *, is_first: bool) -> dict[str, Any]:
    """Return Accelerate's arguments as the config completes them.

    Args:
        config: As the user wrote it.
        arguments: What `ZeroAccelerator` was given, by name.
        is_first: Whether no other Accelerator has fixed the precision of this process.

    Raises:
        ConfigError: With everything at once in which they contradict each other, or that cannot be had.
    """
    completed = dict(arguments)
    faults = [*_other_plugins(arguments), *_ddp_faults(arguments)]
    precision = str(arguments.get("mixed_precision") or environment.asked_precision())
    faults += _precision_faults(config, precision)
    if is_first and precision == "no":
        asked = [name for name, key in _BLOCKS.items() if key not in config.auto_keys and _is_on(config, key)]
        if asked:
            completed["mixed_precision"] = asked[0]
            log_once(f"mixed_precision is {asked[0]!r}: the config asks for it ({_BLOCKS[asked[0]]}).")
    num_micro_batches = _accumulation(config, arguments, faults)
    if num_micro_batches is not None:
        # As a plugin: a number would be beaten by the launcher's variable.
        completed.pop("gradient_accumulation_steps", None)
        completed["gradient_accumulation_plugin"] = GradientAccumulationPlugin(num_steps=num_micro_batches)
    if faults:
        raise error_of(faults)
    return completed


def with_ddp_settings(config: ZeroConfig, arguments: Mapping[str, Any]) -> ZeroConfig:
    """Return a config that honours what a script says to DDP's wrapper and the engine has too."""
    for handler in _ddp_handlers(arguments):
        if not handler.broadcast_buffers and not config.is_given("broadcast_buffers"):
            config = ZeroConfig.load(config, broadcast_buffers=False)
    return config


def stores_in_16_bits(config: ZeroConfig, precision: str) -> bool:
    """Whether parameters are stored in Accelerate's precision, rather than in fp32 under autocast."""
    key = _BLOCKS.get(precision)
    return key is not None and (key in config.auto_keys or _is_on(config, key))


def resolve(config: ZeroConfig, model: nn.Module, facts: Facts) -> ZeroConfig:
    """Complete a config for a model with Accelerate's values.

    Args:
        config: As the user wrote it.
        model: Its `config.hidden_size`, as transformers has it, gives sizes.
        facts: What Accelerate knows.

    Returns:
        The resolved config.

    Raises:
        ConfigError: The batch numbers do not fit.
    """
    sizes = [n // facts.world_size if facts.split_batches else n for n in facts.batch_sizes]
    batch_size = max(1, min(sizes, default=1))
    hidden = hidden_size(model)
    derived: dict[str, object] = {GATHER_KEY: False}
    if hidden is not None:
        derived |= {
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    return config.resolve(
        facts.world_size,
        auto={
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_accumulation_steps": facts.num_micro_batches,
            "train_batch_size": batch_size * facts.num_micro_batches * facts.world_size,
            "gradient_clipping": AUTO_CLIPPING,
            **{key: facts.precision == name for name, key in _BLOCKS.items()},
            **sizes_of(config, derived, "Accelerate"),
        },
    )


def hidden_size(model: nn.Module) -> int | None:
    """Return the width of a transformers model, the largest of several; None for any other."""
    config = getattr(model, "config", None)
    found = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None)
    widths = found if isinstance(found, Sequence) else [found]
    return max((int(width) for width in widths if isinstance(width, int)), default=None)


# -- helpers --


def _is_on(config: ZeroConfig, key: str) -> bool:
    block = config.bf16 if key.startswith("bf16") else config.fp16
    return block.enabled


def _precision_faults(config: ZeroConfig, precision: str) -> list[Fault]:
    if precision == "fp8":
        return [
            Fault(
                "mixed_precision = 'fp8' cannot be used with ZeroAccelerator.",
                "fp8 layers were never run on shards.",
                "Use 'bf16', 'fp16' or 'no'.",
            )
        ]
    return [
        Fault(
            f"mixed_precision = {precision!r}, and the config has {key} = true "
            f"(from {config.origin_of(key)}).",
            "Parameters have one precision, and Accelerate casts to the same.",
            f"Pass mixed_precision={name!r}, or set {key} to 'auto' or false.",
        )
        for name, key in _BLOCKS.items()
        if precision not in ("no", name) and key not in config.auto_keys and _is_on(config, key)
    ]


def _other_plugins(arguments: Mapping[str, Any]) -> list[Fault]:
    asked = [f"{who} ({name}=...)" for name, who in _OTHER_PLUGINS.items() if arguments.get(name) is not None]
    return [
        Fault(
            f"Accelerate is asked to shard by {who} as well as by ZeroPlugin.",
            "A parameter is sharded once.",
            "Remove one of them. A script that is to run under either: python -m zero_strategy.run, or "
            "`zero-strategy launch`, which take a DeepSpeed yaml or ds_config.json and leave DeepSpeed out.",
        )
        for who in (*asked, *environment.others_asked_for())
    ]


def _ddp_handlers(arguments: Mapping[str, Any]) -> list[Any]:
    handlers = arguments.get("kwargs_handlers") or ()
    return [handler for handler in handlers if isinstance(handler, DistributedDataParallelKwargs)]


def _ddp_faults(arguments: Mapping[str, Any]) -> list[Fault]:
    """Judge settings of DDP's wrapper: what has no effect is said, what would be missed is a fault."""
    faults = []
    for handler in _ddp_handlers(arguments):
        changed = handler.to_kwargs()
        idle = [name for name in _IDLE_DDP if name in changed]
        if idle:
            log_once(f"DistributedDataParallelKwargs: {', '.join(idle)}: no effect, as there is no DDP here.")
        for name in ("comm_hook", "comm_wrapper"):
            if str(getattr(handler, name).value) != "no":
                faults.append(
                    Fault(
                        f"DistributedDataParallelKwargs has {name} = {getattr(handler, name).value!r}.",
                        "It is a hook of DDP's own reducer.",
                        "Leave it out; communication_data_type of the config says in which dtype gradients "
                        "travel.",
                    )
                )
    return faults


def _accumulation(config: ZeroConfig, arguments: Mapping[str, Any], faults: list[Fault]) -> int | None:
    """Return the number that only the config has; add a fault if Accelerate was given another one."""
    key = "gradient_accumulation_steps"
    if not config.is_given(key) or key in config.auto_keys:
        return None
    plugin = arguments.get("gradient_accumulation_plugin")
    told = getattr(plugin, "num_steps", None) or environment.asked_accumulation() or arguments.get(key) or 1
    said = config.gradient_accumulation_steps
    if told == said:
        return None
    if told == 1 and plugin is None:
        log_once(f"{key} = {said} (from {config.origin_of(key)}) counts; Accelerate was given none, or 1.")
        return said
    faults.append(
        Fault(
            f"Accelerate was given {key} = {told}, and the config has {said} (from {config.origin_of(key)}).",
            "Accelerate counts micro-batches and divides the loss, so only its number can have an effect.",
            f"Give the same number in both, or set {key} to 'auto' in the config.",
        )
    )
    return None
