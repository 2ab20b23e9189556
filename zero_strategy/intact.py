"""Finds what has been done to a sharded model behind the engine's back.

Parameters live in flat buffers: one that is bound to other memory, added or replaced afterwards would quietly
stop being trained and saved. Called by the engine before every step and every save; it changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zero_strategy.errors import ShardingError
from zero_strategy.optim.places import Place


def check_intact(model: nn.Module, places: Mapping[nn.Parameter, Place]) -> ShardingError | None:
    """Return what no longer fits, or None.

    Args:
        model: The whole model.
        places: Where each parameter lay when it was sharded.
    """
    by_id = {id(param): place for param, place in places.items()}
    for fqn, param in model.named_parameters():
        place = by_id.pop(id(param), None)
        if place is None:
            return _changed(f"Parameter {fqn!r} was not there when the model was sharded.")
        if not place.bucket.is_bound(place.param_index):
            return _changed(
                f"Parameter {fqn!r} was bound to other memory after the model was sharded (by "
                f"model.to(dtype) or `param.data = ...`)."
            )
        if param.grad is not None:
            return ShardingError(
                what=f"Parameter {fqn!r} has a `.grad` that the engine has not seen.",
                why="Gradients are reduced into flat buffers as a backward delivers them; what is put into "
                "`.grad` by hand is neither reduced nor used by the step.",
                fix="Set it to None, and let the gradient come from a backward.",
            )
    for place in by_id.values():
        return _changed(f"Parameter {place.fqn!r} is no longer part of the model.")
    return None


def _changed(what: str) -> ShardingError:
    return ShardingError(
        what=what,
        why="It would be neither trained nor saved: the engine knows the parameters and the memory they had "
        "when it was built.",
        fix="Change the model (and its dtype) before sharding it. To write weights, use "
        "`with engine.unsharded_params(writeback=True)` or engine.load_full_state_dict().",
    )
