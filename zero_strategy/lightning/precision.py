"""Lightning's precision plugins, made to work on shards.

Lightning hands a strategy the plugin it chose (or the user's own); `to_zero_plugin` returns the same plugin
with two methods replaced: clipping, which would look at `param.grad` of whole parameters, goes through the
sharded optimizer. Everything else (autocast, input conversion, the module's dtype) is the plugin's own work:
`bf16-true` converts the module, and the engine keeps fp32 masters. `bf16-mixed` needs nothing here: Lightning
already switches autocast's weight cache off, which would otherwise hold a bf16 copy of every weight used in
the forward.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from zero_strategy.errors import ConfigError
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

# fp16 gradients underflow without a loss scaler that all ranks agree on.
REFUSED_PRECISIONS = ("16-true", "16-mixed", "transformer-engine-float16")


def to_zero_plugin(plugin: Any, namespace: str) -> Any:
    """Return a plugin of the same class that clips through the sharded optimizer.

    Args:
        plugin: Any precision plugin of the namespace, also a user's subclass. It is not changed.
        namespace: "lightning.pytorch" or "pytorch_lightning".

    Returns:
        An instance of a subclass of the plugin's class, under the same class name: Lightning stores a
        plugin's state under that name, and a run may change its strategy between two checkpoints.

    Raises:
        ConfigError: The plugin computes in fp16.
    """
    refuse_fp16(plugin)
    cls = type(plugin)
    if issubclass(cls, _clipping_base(namespace)):
        return plugin
    return _rebuild_plugin(cls, namespace, vars(plugin))


def refuse_fp16(plugin: Any) -> None:
    """Refuse a plugin, of the Trainer or of Fabric, that computes in fp16.

    Raises:
        ConfigError: It does.
    """
    if str(plugin.precision) in REFUSED_PRECISIONS:
        raise ConfigError(
            what=f"precision={plugin.precision!r} cannot be used with ZeroStrategy.",
            why="Gradients in fp16 need a loss scaler that all ranks agree on; there is none for shards yet.",
            fix='Use precision="bf16-true" (bf16 parameters, fp32 masters), "bf16-mixed" or "32-true".',
        )


def _rebuild_plugin(cls: type, namespace: str, state: dict[str, Any]) -> Any:
    zero_cls: Any = _zero_class(cls, namespace)
    plugin = zero_cls.__new__(zero_cls)
    vars(plugin).update(state)
    return plugin


@functools.cache
def _zero_class(cls: type, namespace: str) -> type:
    """Return the subclass of a plugin class whose clipping acts on shards."""
    base = _clipping_base(namespace)
    # After the plugin's own class in the method order: what a user's plugin overrides still counts.
    bases = (base,) if issubclass(base, cls) else (cls, base)

    # The class has no importable name, and `spawn` launches pickle plugins.
    def reduce(self: Any) -> tuple[Any, ...]:
        return _rebuild_plugin, (cls, namespace, vars(self))

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__reduce__": reduce}
    return type(cls.__name__, bases, names)


@functools.cache
def _clipping_base(namespace: str) -> Any:
    precision: Any = importlib.import_module(f"{namespace}.plugins.precision").Precision

    class ShardClipping(precision):  # type: ignore[misc]
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

    return ShardClipping
