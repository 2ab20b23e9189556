"""The few torch names that are private or differ between versions, each behind one function.

Everything here was checked on torch 2.11 to 2.13. Callers are the engine's own modules; nothing in this file
knows about ZeRO.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed import distributed_c10d as c10d

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set autograd's version counters, without touching any data.

    A tensor that autograd saved refuses to be used once its counter differs from what it was when saved. That
    is the one check that stands between a backward over a freed weight and a crash of the process.
    """
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def get_versions(tensors: Sequence[Tensor]) -> list[int]:
    """Return autograd's version counters."""
    return [int(tensor._version) for tensor in tensors]


def current_backward() -> int:
    """Return the number of the backward that is running on this thread, or -1 outside of any."""
    return int(torch._C._current_graph_task_id())


def is_in_backward() -> bool:
    """Tell whether a backward is running on this thread."""
    return current_backward() != -1


def registered_params(model: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter, a shared one more than once.

    By way of torch's own tables: `model.parameters()` builds every name, which takes several times as long.
    """
    stack, seen = [model], {id(model)}
    while stack:
        module = stack.pop()
        for param in module._parameters.values():
            if param is not None:
                yield param
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def num_running_calls(module: torch.nn.Module) -> int:
    """Return how many calls of a module that has hooks are on this thread's stack, at most. Takes a while."""
    # What `torch.compile` makes of a frame after a graph break has another name, and perhaps no `self`.
    names = ("_call_impl", "torch_dynamo_resume_in__call_impl_at")
    frame: FrameType | None = sys._getframe()
    count = 0
    while frame is not None:
        if frame.f_code.co_name.startswith(names) and frame.f_locals.get("self", module) is module:
            count += 1
        frame = frame.f_back
    return count


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have `callback` run when the backward that is running now has finished."""
    Variable._execution_engine.queue_callback(callback)


def without_torch_function() -> AbstractContextManager[None]:
    """Return a context in which tensor subclasses behave as plain tensors."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def attribute_of(func: Callable[..., Any]) -> str:
    """Return the name of a method, or of the attribute that a descriptor's `__get__` or `__set__` serves."""
    owner = getattr(func, "__self__", None)
    if func.__class__.__name__ == "method-wrapper" and owner is not None:
        return str(getattr(owner, "__name__", func.__name__))
    return str(getattr(func, "__name__", func))


def post_accumulate_hooks(param: Tensor) -> list[Callable[..., object]]:
    """Return the hooks that run when a parameter's gradient has been accumulated."""
    return list((param._post_accumulate_grad_hooks or {}).values())


@contextmanager
def on_a_stream_of_its_own(wanted: bool) -> Iterator[None]:
    """Run a block's waits on a stream that does nothing else, and return when that stream has got there.

    Args:
        wanted: If False, or where there is no CUDA, the block is left alone.
    """
    if not wanted or not torch.cuda.is_initialized():
        yield
        return
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@contextmanager
def copying_to_host(device: torch.device) -> Iterator[None]:
    """Run a block's copies on a stream of their own, after all that came before, and wait for them.

    Args:
        device: Where the copies begin; if that is no GPU, the block is left alone.
    """
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


# cudaHostRegisterPortable of driver_types.h: locked for every GPU of the process, not only the current one.
_HOST_REGISTER_PORTABLE = 1


def page_lock(memory: Tensor) -> None:
    """Page-lock host memory where it is, for copies from a GPU; `page_unlock` before it is freed.

    Raises:
        RuntimeError: CUDA refuses.
    """
    num_bytes = memory.numel() * memory.element_size()
    register = torch.cuda.cudart().cudaHostRegister
    torch.cuda.check_error(int(register(memory.data_ptr(), num_bytes, _HOST_REGISTER_PORTABLE)))


def page_unlock(memory: Tensor) -> None:
    """Undo `page_lock`."""
    torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())))


def parse_to(*args: Any, **kwargs: Any) -> tuple[torch.device | None, torch.dtype | None]:
    """Return the device and the dtype among the arguments of `Tensor.to`, None for what is not given."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype


def outside_graphs(function: _Hook) -> _Hook:
    """Return the function such that `torch.compile` runs it as it is, between two graphs.

    As `torch.compiler.disable` does, without importing the compiler before the function is called.
    """
    return cast("_Hook", _disable_dynamo(function))


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors over one storage share; on the meta device, too, where addresses are 0."""
    storage = tensor.untyped_storage()
    return int(storage._cdata if tensor.is_meta else storage.data_ptr())


def give_memory(tensor: Tensor, memory: Tensor) -> None:
    """Make a tensor of the meta device one with memory, and the same object as before.

    `tensor.data = memory` is refused between kinds of devices, and `torch.utils.swap_tensors` where somebody
    has a weak reference, as `nn.LSTM` has to its weights. Class, attributes and hooks stay.

    Args:
        tensor: A parameter or a buffer.
        memory: Of its shape and dtype, and of nobody else's: what it was is meta afterwards.
    """
    memory.requires_grad_(tensor.requires_grad)
    torch._C._swap_tensor_impl(tensor, memory)
    # They belong to what was swapped away; setting them hands them to autograd again.
    tensor._backward_hooks = tensor._backward_hooks
    tensor._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


def attention_reset(attention: torch.nn.MultiheadAttention) -> Callable[[], None]:
    """Return the `reset_parameters` of torch's attention, which has it under another name."""
    reset: Callable[[], None] = attention._reset_parameters
    return reset


def pickled_tensor(
    storage: object, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return what `torch.save` pickles of a contiguous tensor on the CPU: a function and its arguments.

    Args:
        storage: What stands for its memory; see `pickled_storage`.
        shape: The tensor's.
        dtype: The tensor's.
    """
    # An empty tensor of the dtype says which of torch's functions it is, and what follows size and stride.
    rebuild, arguments = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)
    stride = torch.empty(shape, device="meta").stride()
    return rebuild, (storage, 0, shape, stride, *arguments[4:])


def pickled_storage(dtype: torch.dtype) -> type:
    """Return the class that `torch.save` names for the memory of a tensor: it counts elements.

    `UntypedStorage`, for the younger dtypes, counts bytes.
    """
    storage = torch.empty(0, dtype=dtype, device="cpu").__reduce_ex__(2)[1][0]
    if isinstance(storage, torch.UntypedStorage):
        return torch.UntypedStorage
    return cast("type", getattr(torch, storage._pickle_storage_type()))


def native_all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the backend's own all-gather; `shard` may be this rank's range of `output`."""
    # torch 2.13 renames the call and warns about the old name; the old one is all that 2.11 has.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = call(output, shard, group=group, async_op=True)
    return work


def native_reduce_scatter_sum(output: Tensor, full: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the backend's own summing reduce-scatter; `output` may be this rank's range of `full`."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work: dist.Work = call(output, full, op=dist.ReduceOp.SUM, group=group, async_op=True)
    return work


def default_timeout(device: torch.device) -> datetime.timedelta | None:
    """Return how long the default process group waits for a rank; None if its backend does not say.

    `new_group` does not inherit it: without this, a group of ours would wait half an hour where the user
    asked for less.
    """
    group = dist.group.WORLD
    assert group is not None, "no default process group"
    try:
        timeout: datetime.timedelta = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None
    return timeout


def num_begun_by_default() -> int:
    """Return how many collectives the default process group has begun on this rank, 0 without a group."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return 0 if group is None else int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]


class RankStore(Protocol):
    """What is used of torch's stores, which come without types."""

    def get(self, key: str) -> bytes: ...

    def set(self, key: str, value: str) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


def store_of_ranks(prefix: str) -> RankStore:
    """Return a store that all ranks of the default process group share, with a connection of its own.

    A store serves one caller at a time: over the group's own connection a look at a key would wait for
    whatever torch waits for.
    """
    store: RankStore = c10d.PrefixStore(prefix, c10d._get_default_store().clone())  # type: ignore[attr-defined]
    return store


def is_making_parameter() -> bool:
    """Tell whether what called the caller of this function is the constructor of `nn.Parameter`."""
    return sys._getframe(2).f_code is torch.nn.Parameter.__new__.__code__
