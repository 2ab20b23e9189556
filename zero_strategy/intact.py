"""Finds what has been done to a sharded model behind the engine's back.

Parameters live in flat buffers: one that is bound to other memory, added or replaced afterwards would quietly
stop being trained and saved. Called by the engine before every step and every save; it changes nothing. Since
every step looks at every parameter, a look is a few C calls; names are found when something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from zero_strategy.compat import registered_params
from zero_strategy.errors import ShardingError
from zero_strategy.optim.places import Place


def check_intact(
    model: nn.Module, places: Mapping[nn.Parameter, Place], *, takes_grads: bool = True
) -> ShardingError | None:
    """Return what no longer fits, or None.

    Args:
        model: The whole model.
        places: Where each parameter lay when it was sharded.
        takes_grads: Whether the engine takes gradients, so that none may be in `.grad`.
    """
    known = dict(zip(map(id, places), places.values(), strict=True))
    missing = dict(known)
    for param in registered_params(model):
        if missing.pop(id(param), None) is None and id(param) not in known:
            return _changed(f"Parameter {_fqn(model, param)!r} was not there when the model was sharded.")
        if takes_grads and param.grad is not None:
            return ShardingError(
                what=f"Parameter {_fqn(model, param)!r} has a `.grad` that the engine has not seen.",
                why="Gradients are reduced into flat buffers as a backward delivers them; what is put into "
                "`.grad` by hand is neither reduced nor used by the step.",
                fix="Set it to None, and let the gradient come from a backward.",
            )
    for place in missing.values():
        return _changed(f"Parameter {place.fqn!r} is no longer part of the model.")
    for bucket in dict.fromkeys(place.bucket for place in known.values()):
        unbound = bucket.find_unbound()
        if unbound is not None:
            return _changed(
                f"Parameter {unbound!r} was bound to other memory after the model was sharded (by "
                f"model.to(dtype) or `param.data = ...`)."
            )
    return None


def _fqn(model: nn.Module, wanted: nn.Parameter) -> str:
    return next(fqn for fqn, param in model.named_parameters() if param is wanted)


def _changed(what: str) -> ShardingError:
    return ShardingError(
        what=what,
        why="It would be neither trained nor saved: the engine knows the parameters and the memory they had "
        "when it was built.",
        fix="Change the model (and its dtype) before sharding it. To write weights, use "
        "`with engine.unsharded_params(writeback=True)` or engine.load_full_state_dict().",
    )
