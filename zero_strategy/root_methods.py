"""What the engine hangs on the root module: `no_sync`, `zero_grad`, and a hook after `load_state_dict`.

Accelerate looks for `model.no_sync`; transformers clears gradients by `model.zero_grad()` alone. All come off
again with `remove`. A deep copy of the module gets plain ones: the engine is not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

from torch import nn


class Owner(Protocol):
    """What the methods forward to."""

    model: nn.Module

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""

    def sync_masters_from_params(self) -> None:
        """Take over what somebody has written into the parameters."""


class _RootMethod:
    """A method of the owner that, when its module is deep-copied, turns into what the copy should have."""

    def __init__(self, owner: Owner, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self.owner = owner
        self._function = function
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        model = self.owner.model
        return partial(self._plain, memo.get(id(model), model))


def install(owner: Owner) -> None:
    """Hang them on the owner's model."""
    model = owner.model
    model.no_sync = _RootMethod(owner, owner.no_sync, _plain_no_sync)  # type: ignore[assignment]
    model.zero_grad = _RootMethod(owner, owner.zero_grad, type(model).zero_grad)  # type: ignore[method-assign]
    after_load = partial(_after_load, owner)
    model.register_load_state_dict_post_hook(_RootMethod(owner, after_load, _after_load))


def remove(model: nn.Module) -> None:
    """Take them off again; safe to call twice."""
    for name in ("no_sync", "zero_grad"):
        if isinstance(model.__dict__.get(name), _RootMethod):
            delattr(model, name)
    hooks = model._load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, _RootMethod)]:
        del hooks[key]


def owner_of(model: nn.Module) -> Any:
    """Return what was installed on a module, None if nothing was."""
    method = model.__dict__.get("no_sync")
    return method.owner if isinstance(method, _RootMethod) else None


def _plain_no_sync(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _after_load(owner: Any, module: nn.Module, incompatible: Any) -> None:
    # Of a deep copy the "owner" is the copied module itself, and there is nothing to do.
    if not isinstance(owner, nn.Module):
        owner.sync_masters_from_params()
