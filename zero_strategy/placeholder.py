"""What a parameter is while its bucket is sharded.

[Note: Freed parameters]
At stage 3 a parameter is whole only around its use. In between, its data is one NaN element expanded to its
shape, so shape, numel, dtype and device answer as ever and cost a few bytes, and its class is a subclass of
its own class that lets such questions through and refuses everything else by name. So a stray read, a stray
write, a `state_dict()` or a `deepcopy` is an error that says which parameter and what to do, instead of a
NaN, a wrong number or a crash. The class goes back to what it was as soon as the bucket is whole. (torch does
the same with `torch.nn.parameter.UninitializedParameter`, whose class changes when its shape becomes known.)

Only `Bucket` frees and restores parameters; nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zero_strategy.compat import attribute_of, parse_to, without_torch_function
from zero_strategy.errors import ShardingError

# Attributes and methods that answer without the data; the last line makes another tensor of the same kind, as
# some optimizers do for their state when they are built. `data` is read through a wrapper of its own.
_ANSWERED = frozenset([
    "shape", "size", "dim", "ndim", "numel", "nelement", "stride", "dtype", "device", "layout",
    "itemsize", "element_size", "nbytes", "requires_grad", "requires_grad_", "grad", "grad_fn",
    "grad_dtype", "is_leaf", "is_floating_point", "is_complex", "is_signed", "is_inference",
    "is_contiguous", "is_cuda", "is_cpu", "is_meta", "is_mps", "is_xpu", "is_hpu", "is_ipu", "is_xla",
    "is_vulkan", "is_mtia", "is_maia", "is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn",
    "is_nested", "is_neg", "is_conj", "is_pinned", "get_device", "names", "has_names", "output_nr",
    "retains_grad", "storage_offset", "register_hook", "register_post_accumulate_grad_hook",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base", "_is_view", "_is_zerotensor",
    "__hash__", "__len__", "type", "is_same_size", "data_ptr", "is_shared", "untyped_storage",
    "_has_symbolic_sizes_strides", "_has_compatible_shallow_copy_type", "name", "volatile",
    "_python_dispatch",
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_empty", "new_ones", "new_full", "new_tensor",
])  # fmt: skip


class FreedTensor(Tensor):
    """The stand-in for the data of a freed parameter; refuses to be read or written.

    Subclasses made by `freed_class` add the parameter's own class and know its name.
    """

    @classmethod
    def describe(cls, tensor: Tensor) -> str:
        """Return the name of the parameter as messages write it; a stand-in for `.data` was told it."""
        return str(tensor.__dict__.get("described", "a sharded parameter"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape and kind; refuse what needs the values."""
        name = attribute_of(func)
        if name == "data":
            if len(args) > 1 and not isinstance(args[1], FreedTensor):
                _refuse(cls, "assignment to .data", args[:1], {})
            with without_torch_function():
                value = func(*args, **(kwargs or {}))
            if value is None:
                return None
            # Reading `.data` gives a stand-in too, so that `param.data.copy_(...)` is refused as clearly.
            stand_in = value.as_subclass(FreedTensor)
            stand_in.described = cls.describe(args[0])
            return stand_in
        if name in _ANSWERED:
            with without_torch_function():
                return func(*args, **(kwargs or {}))
        if name in ("__repr__", "__format__"):
            return f"<{cls.describe(args[0])}: sharded, shape {tuple(args[0].shape)}, {args[0].dtype}>"
        if name == "equal" and all(isinstance(tensor, FreedTensor) for tensor in args):
            # The values are not here. What asks whether an optimizer has a parameter already needs this much.
            return args[0] is args[1]
        if name == "to" and _is_there_already(*args, **(kwargs or {})):
            return args[0]
        _refuse(cls, name, args, kwargs or {})

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse(type(self), "copy.deepcopy", (self,), {})

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse(type(self), "pickle", (self,), {})


def freed_class(parameter_class: type[nn.Parameter], names: dict[int, str]) -> type[nn.Parameter]:
    """Make the class that parameters of `parameter_class` have while they are freed.

    Args:
        parameter_class: Their class when whole.
        names: FQN by `id` of the parameter; only read, when a message is written.

    Returns:
        A subclass of `parameter_class`, so that `isinstance` answers as before.
    """

    class FreedParameter(FreedTensor, parameter_class):  # type: ignore[misc,valid-type]
        @classmethod
        def describe(cls, tensor: Tensor) -> str:
            fqn = names.get(id(tensor))
            return "a sharded parameter" if fqn is None else f"parameter {fqn!r}"

    return FreedParameter


def placeholder(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one element that every freed parameter of a bucket is expanded from, `[]`.

    NaN where the dtype has one: should any path get past the class (C++ code does), the result is loud.
    """
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)


def _is_there_already(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Tell whether `.to(...)` would change nothing: front ends move models that are where they should be."""
    device, dtype = parse_to(*args, **kwargs)
    same_kind = device is None or device.type == tensor.device.type
    same_index = device is None or device.index in (None, tensor.device.index)
    return same_kind and same_index and dtype in (None, tensor.dtype)


def _refuse(cls: type[FreedTensor], action: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    everything = [*args, *kwargs.values()]
    flattened = [y for x in everything for y in (x if isinstance(x, list | tuple) else [x])]
    freed = [x for x in flattened if isinstance(x, FreedTensor)]
    who = type(freed[0]).describe(freed[0]) if freed else cls.__name__
    if action == "backward":
        raise _refuse_inputs(who)
    action = "detach (by state_dict() or a user)" if action == "detach" else action
    raise ShardingError(
        what=f"{action} was called on {who}, which is sharded at this moment.",
        why="At stage 3 a rank holds its shard of a parameter only; the whole values exist around the "
        "forward and backward of the module that owns it.",
        fix="To read or change weights: `with engine.unsharded_params(writeback=...)`. To save: "
        "`engine.full_state_dict()` or `engine.save_checkpoint(path)`. To load: "
        "`engine.load_full_state_dict(sd)` or `engine.load_checkpoint(path)`. To use a weight in a forward: "
        "call the module that owns it. In a Trainer the engine is `trainer.strategy.engine`, in Fabric "
        "`fabric.strategy.engine_of(model)`; `trainer.save_checkpoint(path)` and `fabric.save` save too.",
    )


def _refuse_inputs(who: str) -> ShardingError:
    """Return what is raised for a loss that was told which gradients to compute."""
    return ShardingError(
        what=f"backward(inputs=...) names {who}, which is sharded at this moment.",
        why="torch looks at the tensors themselves before it begins, and at stage 3 they are not here.",
        fix="Leave `inputs` out, and call requires_grad_(False) for what should get no gradient; or call "
        "backward inside `with engine.unsharded_params():`.",
    )
