"""Which optimizer of an engine updates which parameter, and what becomes of those that none does.

The engine takes the gradients of all its trainable parameters, so an optimizer that it was never given finds
none: without a word its parameters would stay as they are. Here such a step is refused by name, and what no
optimizer holds is told once. Must not know how an optimizer steps.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zero_strategy.bucket import Bucket
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.errors import ConfigError
from zero_strategy.log import log_event
from zero_strategy.optim.places import Place
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer


class Ownership:
    """The optimizers of an engine.

    Attributes:
        optimizers: In the order of `shard_optimizer`.
        takes_gradients: Whether the engine takes gradients now; if not, anybody may step.
        num_steps: Steps so far of all of them, skipped ones included, since all ranks had the same weights
            from elsewhere; the same on all ranks where they train as one.
    """

    def __init__(self, places: Mapping[nn.Parameter, Place]) -> None:
        """Watch the steps of all optimizers from now on.

        Args:
            places: Where each parameter of the engine lies.
        """
        self.optimizers: list[ShardedOptimizer] = []
        self.takes_gradients = True
        self._places = places
        self._ids = frozenset(map(id, places))  # hashing a tensor is slow
        self.num_steps = 0
        self._has_told = False
        # torch's hook for all optimizers must not keep the engine alive.
        handle = register_optimizer_step_pre_hook(partial(_before_any_step, weakref.ref(self)))
        self._unwatch = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        """Watch no more."""
        self._unwatch()

    # -- runtime --

    def refuse_foreign(self, optimizer: Optimizer) -> None:
        """Refuse a step that would find no gradients.

        Raises:
            ConfigError: The optimizer has not been sharded, and holds a parameter whose gradient is taken.
        """
        if not self.takes_gradients or isinstance(optimizer, ShardedOptimizer):
            return
        for group in optimizer.param_groups:
            if self._ids.isdisjoint(map(id, group["params"])):
                continue
            for param in group["params"]:
                place = self._places.get(param)
                if place is not None and place.bucket.trainable and param.requires_grad:
                    raise _foreign_step(optimizer, place)

    def note_step(self) -> None:
        """After a step: say once which parameters get gradients and are in no optimizer."""
        self.num_steps += 1
        # Parameters may be used for the first time in a later step: now and then will do.
        if self._has_told or self.num_steps & (self.num_steps - 1):
            return
        held = {id(param) for optimizer in self.optimizers for param in optimizer.params()}
        names = [
            place.fqn
            for param, place in self._places.items()
            if place.bucket.grads.has_grad[place.param_index]
            and param.requires_grad
            and id(param) not in held
        ]
        if names:
            self._has_told = True
            log_event(
                f"{len(names)} parameters get gradients and are in no optimizer; no step changes them: "
                f"{', '.join(names[:5])}{' ...' if len(names) > 5 else ''}. To train them: "
                "engine.shard_optimizer(optimizer). If that is meant: param.requires_grad_(False)."
            )

    # -- queries --

    def owner_of(self, param: nn.Parameter) -> ShardedOptimizer | None:
        """Return the optimizer that holds a parameter."""
        holds = (o for o in self.optimizers if any(param is held for held in o.params()))
        return next(holds, None)

    def split(
        self, params: Iterable[nn.Parameter]
    ) -> tuple[list[tuple[ShardedOptimizer | None, dict[Bucket, set[int]]]], list[nn.Parameter]]:
        """Sort parameters by their optimizers.

        Returns:
            Each optimizer, None for no optimizer, with its parameters as indices by bucket; and the
            parameters that are not the engine's.
        """
        owners = {id(param): optimizer for optimizer in self.optimizers for param in optimizer.params()}
        found: dict[ShardedOptimizer | None, dict[Bucket, set[int]]] = {}
        others = []
        for param in params:
            if id(param) not in self._ids:
                others.append(param)
                continue
            bucket, index = self._places[param]
            found.setdefault(owners.get(id(param)), {}).setdefault(bucket, set()).add(index)
        return list(found.items()), others

    def is_claimed(self, param: nn.Parameter) -> bool:
        """Tell whether an optimizer holds a parameter."""
        return self.owner_of(param) is not None

    def memory(self) -> MemoryUse:
        """Return the bytes of the optimizers' states."""
        use = MemoryUse()
        for optimizer in self.optimizers:
            use.add(optimizer.memory())
        return use


def _before_any_step(ownership: weakref.ref[Ownership], optimizer: Optimizer, *args: Any) -> None:
    owner = ownership()
    if owner is not None:
        owner.refuse_foreign(optimizer)


def _foreign_step(optimizer: Optimizer, place: Place) -> ConfigError:
    kind = type(optimizer).__name__
    return ConfigError(
        what=f"step() was called on a plain {kind} that holds parameter {place.fqn!r} of a sharded model.",
        why="The engine takes that parameter's gradient, so this step would find none and change nothing.",
        fix="Step what shard_optimizer returned: optimizer = engine.shard_optimizer(optimizer). To train the "
        "model without the engine (below stage 3): engine.close() first.",
    )
