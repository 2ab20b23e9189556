"""Tensors without values that remember how their values come out of files.

`from_pretrained` is run over these: it renames, casts, stacks and ties as ever, on the meta device, and what
it puts into the model says of each parameter which elements of which file it consists of. The elements are
read when somebody asks for a range of them. It must not know transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from zero_strategy.checkpoint.elements import bytes_of
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile
from zero_strategy.compat import attribute_of, parse_to, without_torch_function

_CHUNK_NUMEL = 1 << 20  # elements that are converted at once, so that a cast needs no second copy


class Values(Protocol):
    """Where the elements of a tensor come from."""

    def read(self, start: int, out: Tensor) -> None:
        """Write elements from `start` on into `out`, [numel] of the tensor's dtype, on the CPU."""


class StoredFile:
    """A safetensors file, opened when it is read and closed when nobody goes on reading.

    Attributes:
        path: Where it is.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file: SafetensorsFile | None = None

    def opened(self) -> SafetensorsFile:
        """Return it, open."""
        if self._file is None:
            self._file = SafetensorsFile(Path(self.path))
        return self._file

    def close(self) -> None:
        """Close it; closing twice is fine."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Stored(NamedTuple):
    """A tensor of a file."""

    file: StoredFile
    key: str

    def read(self, start: int, out: Tensor) -> None:
        """Read the range, and nothing else, from the disk."""
        self.file.opened().read_into(self.key, start, bytes_of(out))


class Cast(NamedTuple):
    """Another tensor in another dtype."""

    source: Values
    dtype: torch.dtype  # of the source

    def read(self, start: int, out: Tensor) -> None:
        """Read the range of the source, piece by piece."""
        room = torch.empty(min(_CHUNK_NUMEL, out.numel()), dtype=self.dtype)
        for done in range(0, out.numel(), _CHUNK_NUMEL):
            piece = out[done : done + _CHUNK_NUMEL]
            self.source.read(start + done, room[: piece.numel()])
            piece.copy_(room[: piece.numel()])


class Joined(NamedTuple):
    """Tensors one behind the other: stacked, or concatenated, in the first dimension."""

    sources: tuple[tuple[Values, int], ...]  # each with its number of elements

    def read(self, start: int, out: Tensor) -> None:
        """Read of each source what falls into the range."""
        first = 0
        for source, numel in self.sources:
            begin, end = max(start, first), min(start + out.numel(), first + numel)
            if begin < end:
                source.read(begin - first, out[begin - start : end - start])
            first += numel


class Computed(NamedTuple):
    """What a function makes of recorded tensors; it is computed whole, for whatever range."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    position: int | None  # where the function returns several

    def read(self, start: int, out: Tensor) -> None:
        """Compute everything, and keep the range."""
        result = self.function(*_computed(self.args), **_computed(self.kwargs))
        whole = result if self.position is None else result[self.position]
        out.copy_(whole.reshape(-1)[start : start + out.numel()])


class RecordedTensor(Tensor):
    """A meta tensor with the origin of its values. What would need the values raises."""

    origin: Values

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Do on meta what is asked, and note where the values of the result come from."""
        kwargs, name = kwargs or {}, attribute_of(func)
        if name == "to":
            return _cast(args[0], parse_to(*args[1:], **kwargs)[1])
        with without_torch_function():
            result = func(*args, **kwargs)
        if name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            raise NotImplementedError(f"{name} of a weight that has not been read yet")
        if isinstance(result, Tensor):
            if any(result is arg for arg in args):
                return result
            return recorded(result, _origin(name, func, args, kwargs, None))
        if isinstance(result, tuple | list) and any(isinstance(item, Tensor) for item in result):
            parts = [recorded(t, _origin(name, func, args, kwargs, i)) for i, t in enumerate(result)]
            return type(result)(parts) if type(result) in (tuple, list) else tuple(parts)
        return result


def recorded(like: Tensor, origin: Values) -> RecordedTensor:
    """Return a meta tensor of the shape and dtype of another, with the origin of its values."""
    with without_torch_function():
        empty = torch.empty(like.shape, dtype=like.dtype, device="meta")
    tensor = empty.as_subclass(RecordedTensor)
    tensor.origin = origin
    return tensor


def whole(tensor: RecordedTensor) -> Tensor:
    """Read a recorded tensor, all of it."""
    with without_torch_function():
        flat = torch.empty(math.prod(tensor.shape), dtype=tensor.dtype)
        tensor.origin.read(0, flat)
        return flat.view(tensor.shape)


# -- helpers --


def _cast(tensor: RecordedTensor, dtype: torch.dtype | None) -> RecordedTensor:
    with without_torch_function():
        if dtype in (None, tensor.dtype):
            return tensor
        return recorded(
            torch.empty(tensor.shape, dtype=dtype, device="meta"), Cast(tensor.origin, tensor.dtype)
        )


def _origin(name: str, func: Any, args: Any, kwargs: Any, position: int | None) -> Values:
    """Return the origin of the result of a function, by ranges where that can be."""
    first = args[0] if args else None
    if name in ("detach", "data", "contiguous", "view_as", "alias") and isinstance(first, RecordedTensor):
        return first.origin
    dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
    if name in ("cat", "stack") and dim == 0 and isinstance(first, Sequence):
        with without_torch_function():
            if all(isinstance(part, RecordedTensor) and part.dtype == first[0].dtype for part in first):
                return Joined(tuple((part.origin, part.numel()) for part in first))
    return Computed(func, args, kwargs, position)


def _computed(arguments: Any) -> Any:
    return tree_map_only(RecordedTensor, whole, arguments)
