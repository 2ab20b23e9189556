"""Lightning's own callbacks that write weights themselves: where they work, and where they are refused.

Weight averaging and pruning copy, mask and replace whole parameters. Below stage 3 there are such, and all
that is missing is that the engine takes over what was written; at stage 3 there are none. Subclasses of the
user's count. Called by the strategy; must not know the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from zero_strategy.errors import ConfigError

# Class of a Lightning package's `callbacks` module, if it has it -> what to use at stage 3.
WRITERS = {
    "StochasticWeightAveraging": "zero_strategy.ZeroEMA(decay=...), which averages shards",
    "WeightAveraging": "zero_strategy.ZeroEMA(decay=...), which averages shards",
    "ModelPruning": "torch.nn.utils.prune on the model before fit, with masks that stay",
}


def find_writers(trainer: Any, namespace: str) -> list[tuple[Any, str]]:
    """Return the callbacks that write weights, each with the stock class it is of.

    Args:
        trainer: The Trainer, its callbacks complete.
        namespace: "lightning.pytorch" or "pytorch_lightning".
    """
    callbacks = importlib.import_module(f"{namespace}.callbacks")
    stock = {name: vars(callbacks).get(name, ()) for name in WRITERS}
    return [
        (callback, name)
        for callback in trainer.callbacks
        for name, kind in stock.items()
        if isinstance(callback, kind)
    ]


def trained_weights_key(trainer: Any, namespace: str, checkpoint: Mapping[str, Any]) -> str:
    """Return where a checkpoint has the weights that a run goes on from.

    Lightning's WeightAveraging writes the average in their place and puts them elsewhere. It loads them into
    the module in a resumed fit; without the callback, and in evaluation, the average is what is loaded.

    Args:
        trainer: The Trainer, its callbacks complete.
        namespace: "lightning.pytorch" or "pytorch_lightning".
        checkpoint: What is being loaded.
    """
    averages = any(name == "WeightAveraging" for _, name in find_writers(trainer, namespace))
    moved = {"current_model_state", "averaging_state"} <= set(checkpoint)
    return "current_model_state" if averages and moved and trainer.state.fn == "fit" else "state_dict"


def refuse_at_stage_3(trainer: Any, namespace: str) -> ConfigError | None:
    """Return why one of the callbacks cannot work where parameters are sharded, or None.

    Args:
        trainer: The Trainer, its callbacks complete.
        namespace: "lightning.pytorch" or "pytorch_lightning".
    """
    for callback, name in find_writers(trainer, namespace):
        own = type(callback).__name__
        return ConfigError(
            what=f"The callback {own}{'' if own == name else f' (a {name})'} cannot be used at stage 3.",
            why="It copies or replaces whole parameters, and a rank holds its shard of each.",
            fix=f"Use {WRITERS[name]}; or ZeroStrategy(stage=2), where it works as under DDP.",
        )
    return None


def other_rank_refuses() -> ConfigError:
    """Return what ranks raise that have no such callback, while another has."""
    return ConfigError(
        what="Another rank has a callback that cannot be used at stage 3.",
        why="Every rank must have the same callbacks.",
        fix="Look at the other ranks' errors.",
    )
