"""torch's `GradScaler`, made to work on shards: what scales losses of fp32 parameters under fp16 autocast.

A stock scaler looks at the `.grad` of whole parameters, and each rank judges its own. Here it asks the
sharded optimizer, whose answer is the same on all ranks. Everything else (settings, growth, skipping, state)
is the scaler's own. Called by the front ends; it must not know a framework.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


def to_zero_scaler(scaler: Any) -> Any:
    """Return a scaler of the same class, with the same state, that unscales shards.

    Args:
        scaler: A `GradScaler`, or of a user's subclass. The two share their state from now on, so that who
            holds it goes on reading the scale from it. None stays None.
    """
    if not isinstance(scaler, torch.amp.GradScaler) or isinstance(scaler, _ShardUnscaling):
        return scaler
    zero_scaler = _new_scaler(type(scaler))
    zero_scaler.__dict__ = scaler.__dict__
    return zero_scaler


def unscale_once(scaler: Any, optimizer: Any) -> None:
    """Unscale an optimizer's gradients unless that has been done since the last update of the scale."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)


class _ShardUnscaling:
    """What replaces the part of a `GradScaler` that looks at gradients."""

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        if not isinstance(optimizer, ShardedOptimizer):
            stock: Any = super()
            found: dict[torch.device, Tensor] = stock._unscale_grads_(
                optimizer, inv_scale, found_inf, allow_fp16
            )
            return found
        found_inf.fill_(float(optimizer.unscale_grads(float(inv_scale))))
        return {found_inf.device: found_inf}

    def __reduce__(self) -> tuple[Any, ...]:
        # The class has no importable name, and `spawn` launches pickle plugins.
        return _new_scaler, (type(self).__mro__[2],), vars(self)


@functools.cache
def _zero_class(cls: type) -> type:
    return type(
        cls.__name__, (_ShardUnscaling, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    )


def _new_scaler(cls: type) -> Any:
    zero_class: Any = _zero_class(cls)
    return zero_class.__new__(zero_class)
