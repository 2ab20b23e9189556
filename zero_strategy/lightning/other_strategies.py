"""Keywords of Lightning's other strategies, and what stands in their place here.

Asked by the constructor before the config reads the rest, so that whoever comes from one of these strategies
is told what to write, not only that a key is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero_strategy.errors import ConfigError


class _Keyword(NamedTuple):
    """Whose it is, and what to do about it."""

    owner: str
    advice: str


_UNUSED = "leave it out: parameters may be used on some ranks only, at every stage"
_DDP_BUFFERS = "leave it out: gradients lie in flat buffers in any case"
_STAGE = "say stage=3 for FULL_SHARD, stage=2 for SHARD_GRAD_OP"
_UNITS = "leave it out: the repeated blocks of a model are found; name others in leaf_module"
_PRECISION = "give precision=... to the Trainer or to Fabric"

KEYWORDS = {
    "find_unused_parameters": _Keyword("DDPStrategy", _UNUSED),
    "static_graph": _Keyword("DDPStrategy", _UNUSED),
    "gradient_as_bucket_view": _Keyword("DDPStrategy", _DDP_BUFFERS),
    "bucket_cap_mb": _Keyword("DDPStrategy", "say reduce_bucket_size=..., in elements"),
    "ddp_comm_hook": _Keyword("DDPStrategy", "leave it out: gradients are always reduced in full"),
    "model_averaging_period": _Keyword("DDPStrategy", "leave it out: every step is synchronised"),
    "sharding_strategy": _Keyword("FSDPStrategy", _STAGE),
    "auto_wrap_policy": _Keyword("FSDPStrategy", _UNITS),
    "activation_checkpointing_policy": _Keyword("FSDPStrategy", "use torch.utils.checkpoint in the module"),
    "mixed_precision": _Keyword("FSDPStrategy", _PRECISION),
    "device_mesh": _Keyword("FSDPStrategy", "leave it out: all ranks share one copy"),
    "backward_prefetch": _Keyword("FSDPStrategy", "say stage3_prefetch_bucket_size=..., in elements"),
    "forward_prefetch": _Keyword("FSDPStrategy", "say stage3_prefetch_bucket_size=..., in elements"),
    "use_orig_params": _Keyword("FSDPStrategy", "leave it out: parameters keep their names and identity"),
    "load_full_weights": _Keyword("DeepSpeedStrategy", "leave it out: files and folders are told apart"),
    "offload_parameters": _Keyword("DeepSpeedStrategy", "say offload_param, which is not built yet"),
    "remote_device": _Keyword("DeepSpeedStrategy", "leave it out: a new model is created on the CPU"),
    "logging_batch_size_per_gpu": _Keyword("DeepSpeedStrategy", "leave it out: the loader knows it"),
    "exclude_frozen_parameters": _Keyword("DeepSpeedStrategy", "leave them out in on_save_checkpoint"),
}


def refuse_others_keywords(names: Iterable[str]) -> None:
    """Refuse options of another strategy.

    Args:
        names: Of the keywords that a strategy was given.

    Raises:
        ConfigError: Some are another strategy's.
    """
    found = [name for name in names if name in KEYWORDS]
    if found:
        owners = sorted({KEYWORDS[name].owner for name in found})
        raise ConfigError(
            what=f"ZeroStrategy was given {', '.join(found)}, of {' and '.join(owners)}.",
            why="A run has one strategy, and this one would have to ignore it.",
            fix="; ".join(f"{name}: {KEYWORDS[name].advice}" for name in found) + ".",
        )
