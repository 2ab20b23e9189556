"""What stands between Fabric's wrapper and the user's module.

Made by `fabric.py` for each module that is set up. It must not know how engines are built.

[Note: Fabric's wrapper around the module]
`fabric.setup` returns a `_FabricModule` around what `setup_module` returns. Two things follow. Methods that
are marked as forward methods (`training_step`, ...) go through precision and hooks only if that is another
module than the user's own: so there is a `ForwardModule` in between, as DDP's wrapper is. And the
`zero_grad` of a `_FabricModule` is `nn.Module`'s own, which looks for `param.grad` of its own accord and
finds none: so the wrapper gets one that clears the engine's gradients as soon as it takes the module in.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from zero_strategy.engine import ZeroEngine
from zero_strategy.front_ends.engines import find_engine


class ForwardModule(nn.Module):
    """The sharded module, one call deeper. See [Note: Fabric's wrapper around the module]."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that the engine holds."""
        self.module.zero_grad(set_to_none)


def engine_behind(obj: Any) -> ZeroEngine | None:
    """Return the engine of the user's own module or of a wrapper around it; None for anything else."""
    original = getattr(obj, "_original_module", obj)  # of a _FabricModule
    module = original.module if isinstance(original, ForwardModule) else original
    return find_engine(module) if isinstance(module, nn.Module) else None


def lend_zero_grad(forward_module: ForwardModule, wrapper: type[nn.Module]) -> None:
    """Give the wrapper that will take a module in the module's own `zero_grad`."""
    lender = weakref.ref(forward_module)  # a hook of all modules must not keep this one alive

    def on_registration(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        inside = getattr(child, "_orig_mod", child)  # of a compiled module
        if isinstance(inside, ForwardModule) and inside is lender() and isinstance(parent, wrapper):
            parent.zero_grad = inside.zero_grad  # type: ignore[method-assign]

    handle = register_module_module_registration_hook(on_registration)
    weakref.finalize(forward_module, handle.remove)
