"""The two methods the engine hangs on the root module: `no_sync` and `zero_grad`.

Accelerate looks for `model.no_sync`, transformers clears gradients by `model.zero_grad()` alone. Both are
instance attributes and come off again with `remove`. A deep copy of the module gets plain ones: the engine is
not copied.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn


class _RootMethod:
    """A bound function that, when its module is deep-copied, turns into what the copy should have."""

    def __init__(self, model: nn.Module, function: Callable[..., Any], plain: Callable[..., Any]) -> None:
        self._model = model
        self._function = function
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return partial(self._plain, memo.get(id(self._model), self._model))


def install(
    model: nn.Module,
    no_sync: Callable[[], AbstractContextManager[None]],
    zero_grad: Callable[[bool], None],
) -> None:
    """Hang both on the module."""
    model.no_sync = _RootMethod(model, no_sync, _plain_no_sync)  # type: ignore[assignment]
    model.zero_grad = _RootMethod(model, zero_grad, type(model).zero_grad)  # type: ignore[method-assign]


def remove(model: nn.Module) -> None:
    """Take both off again; safe to call twice."""
    for name in ("no_sync", "zero_grad"):
        if isinstance(model.__dict__.get(name), _RootMethod):
            delattr(model, name)


def _plain_no_sync(model: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()
