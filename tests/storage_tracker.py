"""Sees every tensor storage that comes to life, whoever makes it, and what is alive at every operation.

A witness for memory claims that asks nobody: a dispatch mode notes the storage of every operation's results,
weakly, and looks at all of them after each operation and after each change of a storage's size. It sees what
torch's own operations allocate on this thread, autograd's included (on a CPU the backward runs on the thread
that calls it); it does not see Python's bytes, memory maps, or what a collective needs inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Alive = dict[int, int]  # bytes by the serial number of a storage


class StorageTracker(TorchDispatchMode):
    """A context in which storages are seen; they are known by serial numbers, for addresses are used again.

    Attributes:
        history: What was alive, at every look at which it had changed since the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Alive] = []
        self._known: dict[int, tuple[int, StorageWeakRef]] = {}
        self._num_seen = 0
        self._resize = torch.UntypedStorage.resize_
        self._on_look: list[Callable[[Alive], None]] = []

    def __enter__(self) -> StorageTracker:
        resize, tracker = self._resize, self

        def resize_and_look(storage: torch.UntypedStorage, nbytes: int) -> Any:
            result = resize(storage, nbytes)
            tracker.look()
            return result

        torch.UntypedStorage.resize_ = resize_and_look  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.look()
        return result

    def add(self, tensors: Iterable[Tensor]) -> list[int]:
        """Note the storages of tensors, also of such as were made before; return their serial numbers.

        Tensors on the meta device have none: they only say how large they would be.
        """
        serials = []
        for tensor in tensors:
            if tensor.is_meta:
                continue
            reference = StorageWeakRef(tensor.untyped_storage())
            known = self._known.get(reference.cdata)
            if known is None or known[1].expired():
                self._num_seen += 1
                known = self._known[reference.cdata] = (self._num_seen, reference)
            serials.append(known[0])
        return serials

    def listen(self, on_look: Callable[[Alive], None]) -> None:
        """Have a function called at every look, with what is alive."""
        self._on_look.append(on_look)

    def alive(self) -> Alive:
        """Return what is alive now."""
        result: Alive = {}
        for address, (serial, reference) in list(self._known.items()):
            # `expired` alone would miss that a storage has been emptied.
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._known[address]
            elif storage.nbytes():
                result[serial] = storage.nbytes()
        return result

    def look(self) -> None:
        """Note what is alive, if it has changed."""
        now = self.alive()
        if not self.history or now != self.history[-1]:
            self.history.append(now)
        for on_look in self._on_look:
            on_look(now)
