"""When a forward of the root begins and ends, and when a backward begins and ends.

Autograd tells nobody that a backward starts, a user may call any submodule or method instead of the root, and
Lightning calls `training_step`. These two classes turn all that into four events; they know neither
parameters nor gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zero_strategy import compat
from zero_strategy.tensors import tensors_in


class BackwardPass:
    """Knows whether a backward is running, and tells its listeners when it has ended.

    A backward that runs inside another (re-entrant checkpointing) is part of it.

    Attributes:
        is_running: From the first hook of a backward to its end.
        num_ended: How many backwards have ended.
    """

    def __init__(self) -> None:
        self.is_running = False
        self.num_ended = 0
        self._on_end: list[Callable[[], None]] = []
        self._on_abort: list[Callable[[], None]] = []

    def listen(self, *, on_end: Callable[[], None], on_abort: Callable[[], None]) -> None:
        """Register a listener; listeners are called in the order of their registration.

        Args:
            on_end: Called on the thread of the backward when all gradients are there.
            on_abort: Called when it turns out that a backward has died on the way.
        """
        self._on_end.append(on_end)
        self._on_abort.append(on_abort)

    def begin(self) -> None:
        """Note that a backward is running; may be called from all of autograd's hooks."""
        if not self.is_running:
            self.is_running = True
            compat.at_end_of_backward(self._end)

    def end_unseen(self) -> None:
        """End a backward in which no hook has fired: other ranks may have had some, and wait."""
        self.is_running = True
        self._end()

    def check(self) -> None:
        """Clean up after a backward that raised, if one did; called where no backward can be running."""
        if self.is_running and not compat.is_in_backward():
            self.is_running = False
            for abort in self._on_abort:
                abort()

    def _end(self) -> None:
        # If a listener raises, `is_running` stays and `check` cleans up.
        for end in self._on_end:
            end()
        self.is_running = False
        self.num_ended += 1


class ForwardPass:
    """Knows whether a forward of the root is running, and tells its listeners when it begins and ends."""

    def __init__(self, model: nn.Module, backward: BackwardPass) -> None:
        self._model = model
        self._backward = backward
        self._depth = 0
        self._num_calls = 0  # of the depth, what module calls have added and not scopes
        self._on_begin: list[Callable[[], None]] = []
        self._on_end: list[Callable[[], None]] = []
        self._on_interrupt: list[Callable[[nn.Module | None], None]] = []
        self._handles: list[RemovableHandle] = []
        self.open()

    def open(self) -> None:
        """Put the hooks on."""
        self._handles = [
            self._model.register_forward_pre_hook(self._pre_forward, prepend=True),
            self._model.register_forward_hook(self._post_forward, always_call=True),
        ]

    def listen(
        self,
        *,
        on_begin: Callable[[], None],
        on_end: Callable[[], None] | None = None,
        on_interrupt: Callable[[nn.Module | None], None] | None = None,
    ) -> None:
        """Register a listener for the outermost forward.

        Args:
            on_begin: Called when one begins.
            on_end: Called when it has ended, also by an exception.
            on_interrupt: Called when it turns out that one has ended by Ctrl-C, where torch calls no hook;
                with the module of which a call is beginning now, if any.
        """
        self._on_begin.append(on_begin)
        if on_end is not None:
            self._on_end.append(on_end)
        if on_interrupt is not None:
            self._on_interrupt.append(on_interrupt)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Treat a block of code as a forward of the root."""
        if self._num_calls:
            self._drop_interrupted(None)
        self._enter()
        try:
            yield
        finally:
            self._exit()

    def close(self) -> None:
        """Take the hooks off; `open` puts them on again."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardPass:
        # A deep copy of the model takes its hooks along: the copy's tell nobody anything.
        inert = object.__new__(ForwardPass)
        inert._model = nn.Module()
        inert._backward = BackwardPass()
        inert._depth = inert._num_calls = 0
        inert._on_begin, inert._on_end, inert._on_interrupt, inert._handles = [], [], [], []
        return inert

    @compat.outside_graphs
    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        self._num_calls += 1
        if self._num_calls > 1:
            self._drop_interrupted(module)
        self._enter()

    @compat.outside_graphs
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._num_calls -= 1
        self._exit()
        # The outermost graph node of the model: the earliest sign of a backward, outside of any checkpoint.
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._on_output_grad)

    def _on_output_grad(self, grad: Tensor) -> None:
        self._backward.begin()

    def _drop_interrupted(self, beginning: nn.Module | None) -> None:
        """Forget calls of the root that Ctrl-C has ended. Called where the root seldom runs already."""
        num_ended = self._num_calls - compat.num_running_calls(self._model)
        if num_ended <= 0 or compat.is_in_backward():
            return
        self._num_calls -= num_ended
        self._depth -= num_ended
        if not self._depth:
            for interrupt in self._on_interrupt:
                interrupt(beginning)

    def _enter(self) -> None:
        self._depth += 1
        # Recomputation by a checkpoint calls the root again inside a backward, which is no new forward.
        if self._depth == 1 and not compat.is_in_backward():
            self._backward.check()
            for begin in self._on_begin:
                begin()

    def _exit(self) -> None:
        self._depth -= 1
        if self._depth == 0 and not compat.is_in_backward():
            for end in self._on_end:
                end()
