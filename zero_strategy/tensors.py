"""Finds the tensors in whatever a module returns: tuples, dicts, dataclasses, model outputs, caches.

Called by `passes` and `lifecycle`, which put hooks on what they find. It looks and changes nothing; it must
not know buckets, shards or the frameworks whose outputs it walks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

MAX_OBJECTS = 10_000  # looked at in one value; a bound for outputs that hang on to half the program
_PLAIN = (str, bytes, int, float, complex, bool, type(None), nn.Module, type)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor reachable from a value, each once.

    Containers are walked, and the attributes of objects of any other class. Modules are not: what they hold
    is state.
    """
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < MAX_OBJECTS:
        item = stack.pop()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item
            continue
        if isinstance(item, Mapping):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set | frozenset):
            stack.extend(item)
        stack.extend(getattr(item, "__dict__", {}).values())
        for slot in _slots(type(item)):
            stack.append(getattr(item, slot, None))


def storage_address(tensor: Tensor) -> int | None:
    """Return where a tensor's memory begins; None for those that have none (of torch.func, sparse ones)."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
