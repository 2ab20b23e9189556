"""Lets ranks of a sharded model generate, and drop layers, until the last of them has ended.

At stage 3 every rank must run as many forwards, since each gathers parameters from all. transformers' models
can do that, by a name that they look up on themselves: ranks that have ended go on with dummy forwards, and
layers that one rank drops are run all the same. The name speaks of FSDP, whose ranks have the same need, and
is read for nothing else. Called by the front ends when they have built an engine; no framework is imported.
"""

from __future__ import annotations

from typing import Any

from zero_strategy.engine import ZeroEngine

_NAME = "_is_fsdp_managed_module"
_PACKAGE = "transformers."


def let_ranks_wait(engine: ZeroEngine) -> None:
    """Tell the transformers modules of a model that forwards gather, if they do and as long as they do.

    Args:
        engine: Of the model.
    """
    if not engine.config.shards_params:
        return
    for module in engine.model.modules():
        if type(module).__module__.startswith(_PACKAGE) or hasattr(module, "generate"):
            setattr(module, _NAME, _WhileSharded(engine))


class _WhileSharded:
    """True while forwards gather; in a copy of the module, False."""

    def __init__(self, engine: ZeroEngine) -> None:
        self._engine = engine

    def __bool__(self) -> bool:
        return self._engine.gathers_in_forward

    def __deepcopy__(self, memo: dict[int, Any]) -> bool:
        return False

    def __reduce__(self) -> tuple[type, tuple[bool]]:
        return bool, (False,)
