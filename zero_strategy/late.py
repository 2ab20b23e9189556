"""What a parameter is after a step until its values have arrived.

[Note: Late parameters]
A step returns while the gathers that make whole parameters agree are under way: of all parameters at stages 1
and 2, at stage 3 of those that stay whole. Until the values of a parameter are here its class is a subclass
of its own class: whatever is done with it waits for them, gives it its class back, and is then done with the
parameter as it always was. So no reader sees old values, whether it is the module that owns the parameter,
another one, or the user. Its data is a placeholder as that of a freed parameter is (placeholder.py): C++ code
that takes a tensor without asking its class reads NaN, not the values of the step before. For such code in a
model's own modules the publisher has hooks.

Made and undone by `ParamState` on behalf of the publisher; nothing else needs to know.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zero_strategy import compat
from zero_strategy.compat import attribute_of, without_torch_function

# What is asked between a step and the next forward and has to do with no values.
_ANSWERED = frozenset([
    "shape", "size", "dim", "ndim", "numel", "nelement", "dtype", "device", "layout", "element_size",
    "nbytes", "requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "is_meta", "is_sparse",
    "is_cuda", "is_floating_point", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
    "__hash__", "__len__", "register_hook", "register_post_accumulate_grad_hook",
])  # fmt: skip


class LateTensor(Tensor):
    """A tensor that waits for its values when it is used. Subclasses made by `late_class` know how."""

    @classmethod
    def arrive(cls) -> None:
        """Wait; the tensors of this class have their former class afterwards."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Wait for every late tensor among the arguments, then do what was asked."""
        kwargs, name = kwargs or {}, attribute_of(func)
        if name in _ANSWERED:
            with without_torch_function():
                return func(*args, **kwargs)
        for kind in types:
            if issubclass(kind, LateTensor):
                kind.arrive()
        if name == "detach" and compat.is_making_parameter():
            # `nn.Parameter(late)` has seen a class of its own, and so asks for what it is to be.
            return Tensor._make_subclass(type(args[0]), args[0])
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        type(self).arrive()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).arrive()
        return self.__reduce_ex__(protocol)


def late_class(parameter_class: type[nn.Parameter], arrive: Callable[[], None]) -> type[nn.Parameter]:
    """Make the class that parameters of `parameter_class` in one bucket have while they are late.

    Args:
        parameter_class: Their class once they are there.
        arrive: Waits for the bucket and gives the class back, or raises.

    Returns:
        A subclass of `parameter_class`, so that `isinstance` answers as before.
    """

    class LateParameter(LateTensor, parameter_class):  # type: ignore[misc,valid-type]
        @classmethod
        def arrive(cls) -> None:
            arrive()

    return LateParameter
