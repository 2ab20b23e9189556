"""AdaLoRA's choice of ranks, which reads weights and gradients that an engine holds.

`AdaLoraModel.update_and_allocate` is to be called after a step and before gradients are cleared. It reads
`param.grad` of the adapter, and sets to zero what is not worth its rank.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from peft import AdaLoraModel
from torch import nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.engines import find_engine
from zero_strategy.peft.upstream import TESTED


def update_and_allocate(model: nn.Module, global_step: int) -> None:
    """Let AdaLoRA measure the adapter and choose its ranks, on a sharded model. Collective.

    Args:
        model: A `PeftModel` with an engine and an AdaLoRA adapter.
        global_step: As for `AdaLoraModel.update_and_allocate`.

    Raises:
        ConfigError: It has none.
    """
    engine, adapted = find_engine(model), _adalora_in(model)
    if engine is None or adapted is None:
        raise ConfigError(
            what=f"This {type(model).__name__} has no {'engine' if engine is None else 'AdaLoRA adapter'}.",
            why="The ranks of an AdaLoRA adapter are chosen from its weights and gradients on all ranks.",
            fix="Pass the PeftModel that was given to ZeroEngine or to prepare().",
        )
    _update(engine, adapted, global_step)


def serve(engine: ZeroEngine) -> None:
    """Have AdaLoRA's own call work on a model, for scripts that make it. Does nothing for other models.

    Raises:
        ConfigError: This version of PEFT was not tested.
    """
    adapted = _adalora_in(engine.model)
    if adapted is None or "update_and_allocate" in vars(adapted):
        return
    TESTED.require("AdaLoRA on sharded models")

    @wraps(AdaLoraModel.update_and_allocate)
    def update(global_step: int) -> None:
        found = find_engine(engine.model)
        if found is None:  # it was closed, and the model is plain again
            AdaLoraModel.update_and_allocate(adapted, global_step)
        else:
            _update(found, adapted, global_step)

    adapted.update_and_allocate = update


def _adalora_in(model: nn.Module) -> Any:
    return next((module for module in model.modules() if isinstance(module, AdaLoraModel)), None)


def _update(engine: ZeroEngine, adapted: Any, global_step: int) -> None:
    mark = f".{adapted.trainable_adapter_name}"
    held = [p for name, p in adapted.named_parameters() if "lora_" in name and name.endswith(mark)]
    with engine.unsharded_params(writeback=True, params=held), engine.grads_in_place(held):
        AdaLoraModel.update_and_allocate(adapted, global_step)
