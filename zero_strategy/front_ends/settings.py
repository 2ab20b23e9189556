"""What a front end does with a config before it has the framework's own values for it.

Called by the front ends' own settings, which know what their framework sets. Must not know a framework or the
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_strategy.config import ZeroConfig
from zero_strategy.config_source import BATCH_KEYS
from zero_strategy.log import log_once

# In `zero_optimization`; "auto" is legal for these because Accelerate derives sizes from a transformers
# model's hidden size.
SIZE_KEYS = (
    "reduce_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_param_persistence_threshold",
)
GATHER_KEY = "stage3_gather_16bit_weights_on_model_save"


def load_config(stage: int | None, source: Any, keywords: Mapping[str, Any]) -> ZeroConfig:
    """Read what a front end was constructed with.

    Args:
        stage: Beats the source; None takes the source's stage, or 3.
        source: A path, a dict, a `ZeroConfig` or None.
        keywords: Settings that beat the source.

    Returns:
        The config, not resolved: "auto" waits for the framework's values.
    """
    config = ZeroConfig.load(source, stage=stage, **keywords)
    if config.is_given("zero_optimization.stage"):
        return config
    return ZeroConfig.load(config, stage=3)


def sizes_of(config: ZeroConfig, derived: Mapping[str, object], who: str) -> dict[str, object]:
    """Return values for what may be "auto" in `zero_optimization`, by dotted key.

    Args:
        config: As the user wrote it. Where it says "auto" and nothing was derived, the default counts, and a
            line says so.
        derived: Values by name, without the block.
        who: The framework, for that line.
    """
    zero = config.zero_optimization
    values = {f"zero_optimization.{n}": derived.get(n, getattr(zero, n)) for n in (*SIZE_KEYS, GATHER_KEY)}
    for key, value in values.items():
        if key in config.auto_keys and key.partition(".")[2] not in derived:
            log_once(f'{key} is "auto": {who} derives no value, so the default counts: {value}.')
    return values


def shards_alike(first: ZeroConfig, second: ZeroConfig) -> bool:
    """Whether an engine built with one config does what the other asks for.

    Args:
        first: A config.
        second: Another one.

    Returns:
        True if they differ in batch numbers at most, which an engine does not use.
    """
    ours, theirs = ({k: v for k, v in c.to_dict().items() if k not in BATCH_KEYS} for c in (first, second))
    return ours == theirs
