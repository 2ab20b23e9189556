"""Lightning's precision plugins, made to work on shards.

Lightning hands a strategy the plugin it chose (or the user's own); `to_zero_plugin` returns the same plugin
with a few methods replaced. Clipping, which would look at `param.grad` of whole parameters, goes through the
sharded optimizer. The scaler of `16-mixed` is replaced by one that unscales shards (`grad_scaler`), and the
backward of `16-true`, which has none in Lightning, scales its loss by the engine's `LossScaler`. Everything
else (autocast, input conversion, the module's dtype) is the plugin's own work: `bf16-true` and `16-true`
convert the module, and the engine keeps fp32 masters. In the Trainer, Lightning already switches autocast's
weight cache off, which would otherwise hold a 16-bit copy of every weight used in the forward.
"""

from __future__ import annotations

import copy
import functools
import importlib
from typing import Any

from zero_strategy.errors import ConfigError
from zero_strategy.front_ends.grad_scaler import to_zero_scaler
from zero_strategy.lightning.base import FABRIC_OF
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

# Its layers cast as they like, and nothing of it can be tried here.
REFUSED_PRECISION = "transformer-engine-float16"


def to_zero_plugin(plugin: Any, namespace: str) -> Any:
    """Return a plugin of the same class that clips, scales and unscales through the engine.

    Args:
        plugin: Any precision plugin of the namespace, also a user's subclass. It is not changed.
        namespace: Of the Trainer or of Fabric, such as "lightning.pytorch" or "lightning.fabric".

    Returns:
        An instance of a subclass of the plugin's class, under the same class name: Lightning stores a
        plugin's state under that name, and a run may change its strategy between two checkpoints. If it has a
        `loss_scaler`, that is to be set to the engine's.

    Raises:
        ConfigError: It is Transformer Engine's in fp16.
    """
    if str(plugin.precision) == REFUSED_PRECISION:
        raise ConfigError(
            what=f"precision={plugin.precision!r} cannot be used with ZeroStrategy.",
            why="Its fp16 layers were never run with shards and a loss scale.",
            fix='Use precision="16-true", "16-mixed", "bf16-true", "bf16-mixed" or "transformer-engine".',
        )
    cls = type(plugin)
    if issubclass(cls, _zero_base(namespace)):
        return plugin
    if namespace in FABRIC_OF or plugin.precision == "16-true":
        zero_plugin = _rebuild_plugin(cls, namespace, vars(plugin))
    else:  # Fabric lets its user call loss.backward() where no plugin has its own
        zero_plugin = copy.copy(plugin)
    if "scaler" in vars(plugin):
        zero_plugin.scaler = to_zero_scaler(plugin.scaler)
    return zero_plugin


def _rebuild_plugin(cls: type, namespace: str, state: dict[str, Any]) -> Any:
    zero_cls: Any = _zero_class(cls, namespace)
    plugin = zero_cls.__new__(zero_cls)
    vars(plugin).update(state)
    return plugin


@functools.cache
def _zero_class(cls: type, namespace: str) -> type:
    """Return the subclass of a plugin class that works on shards."""
    base = _zero_base(namespace)
    # After the plugin's own class in the method order: what a user's plugin overrides still counts.
    bases = (base,) if issubclass(base, cls) else (cls, base)

    # The class has no importable name, and `spawn` launches pickle plugins.
    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild_plugin, (cls, namespace, vars(self))

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce__": reduce}
    return type(cls.__name__, bases, names)


@functools.cache
def _zero_base(namespace: str) -> Any:
    """Return what replaces methods of a namespace's `Precision`; Fabric's has no clipping."""
    precision: Any = importlib.import_module(f"{namespace}.plugins.precision").Precision

    class Scaling(precision):  # type: ignore[misc]
        """Scale the loss where the engine asks for it, and keep the scale in checkpoints."""

        loss_scaler: LossScaler | None = None

        def backward(self, tensor: Any, model: Any, *args: Any, **kwargs: Any) -> None:
            scaled = tensor if self.loss_scaler is None else self.loss_scaler.scale_loss(tensor)
            super().backward(scaled, model, *args, **kwargs)

        def state_dict(self) -> dict[str, Any]:
            if self.loss_scaler is not None and self.loss_scaler.is_active:
                return dict(self.loss_scaler.state_dict())
            state: dict[str, Any] = super().state_dict()
            return state

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            if self.loss_scaler is not None and self.loss_scaler.is_active:
                self.loss_scaler.load_state_dict(state_dict)
            else:
                super().load_state_dict(state_dict)

    class ClippingToo(Scaling):
        """Clip the averaged gradients where they are: in the shards the optimizer holds."""

        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.clip_grad_norm_(clip_val)
            else:  # Lightning's stand-in for "no optimizer"
                super().clip_grad_by_norm(optimizer, clip_val)

        def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.clip_grad_value_(clip_val)
            else:
                super().clip_grad_by_value(optimizer, clip_val)

    return ClippingToo if hasattr(precision, "clip_grad_by_norm") else Scaling
