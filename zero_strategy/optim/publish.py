"""After a step: the all-gathers that make whole parameters agree, and who waits for them.

Gathers start in the order of the buckets while the step goes through them; `allgather_bucket_size` is kept
here: what is on its way at a time is no more, a larger bucket travels in parts, and several small ones travel
at once. `step()` returns with the last of them under way, and a bucket is waited for when it is needed. Owned
by the engine, called by its optimizers. It must not know gradients or optimizer state.

[Note: Who waits for late parameters]
Before a unit runs (the blocks that would be unsharded together at stage 3), its hook waits for all that is in
it, so whatever the unit does with its weights finds them there, compiled code and C++ included. Outside of
units, what owns a parameter waits for its own. A forward of the root without gradients waits for everything,
as does the engine before it reads or writes weights itself. Everybody else is caught by the parameter's
class: see [Note: Late parameters] in late.py.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn

from zero_strategy import compat
from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import find_units
from zero_strategy.comm.collectives import Handle
from zero_strategy.config import ZeroConfig
from zero_strategy.errors import ShardingError
from zero_strategy.optim.places import Place


class _Part(NamedTuple):
    """One gather under way."""

    bucket: Bucket
    numel: int
    handle: Handle


class Publisher:
    """Starts gathers in the order of the buckets; waits for the oldest where there is no room for more."""

    def __init__(self, model: nn.Module, places: Mapping[nn.Parameter, Place], config: ZeroConfig) -> None:
        """Register the hooks.

        Args:
            model: The whole model.
            places: Where each parameter lies; followed when buckets are exchanged.
            config: Says how many elements may be on their way at a time, padding included (at least one a
                rank), and whether to wait in the step.
        """
        self._places = places
        self._limit_numel = config.zero_optimization.allgather_bucket_size
        self._under_way: deque[_Part] = deque()
        self._numel = 0
        self._late: dict[Bucket, None] = {}
        self._failure: ShardingError | None = None
        self._pid = os.getpid()
        self._lock = RLock()  # a thread of the user's may read a weight while the main one waits
        self._needs: dict[nn.Module, list[nn.Parameter]] = {}  # what a module with a hook waits for
        self._is_compiled = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._is_lazy = config.zero_optimization.overlap_comm and not _is_scripted(model)
        if self._is_lazy and any(_may_be_late(place.bucket) for place in places.values()):
            self._register(model, config)

    def _register(self, model: nn.Module, config: ZeroConfig) -> None:
        unit_of = find_units(model, config)
        units = set(unit_of.values())
        for module in model.modules():
            # Noted now: `functional_call` and the like put other tensors in the place of parameters.
            params = list(module.parameters(recurse=module in units))
            if module is model or module in units or (params and module not in unit_of):
                self._needs[module] = params
                # Before the hooks of users, which may read the module's weights.
                self._hooks.append(module.register_forward_pre_hook(self._pre_forward, prepend=True))

    def close(self) -> None:
        """Wait, and take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self.wait()

    def __deepcopy__(self, memo: dict[int, Any]) -> Publisher:
        # A deep copy of the model takes its hooks along: the copy's wait for nothing.
        inert = object.__new__(Publisher)
        inert._late, inert._is_compiled = {}, False
        return inert

    # -- in a step --

    def start(self, bucket: Bucket) -> None:
        """Start publishing a bucket whose shard has changed. Collective."""
        shard_numel, num_shards = bucket.layout.shard_numel, bucket.layout.num_shards
        part_numel = max(1, min(shard_numel, self._limit_numel // num_shards))
        for start in range(0, shard_numel, part_numel):
            part = range(start, min(start + part_numel, shard_numel))
            if bucket.publishes:
                self._make_room(len(part) * num_shards)
            handle = bucket.start_publish(part)
            if handle is None:
                return
            self._under_way.append(_Part(bucket, len(part) * num_shards, handle))
            self._numel += len(part) * num_shards

    def end_step(self) -> None:
        """Let the step return while gathers are under way, where everybody who needs a weight will wait."""
        buckets = {part.bucket: None for part in self._under_way if not part.handle.is_done}
        if not self._is_lazy or self._is_compiled or not all(map(_may_be_late, buckets)):
            self.wait()
            return
        for bucket in buckets:
            self._late[bucket] = None
            bucket.state.delay(partial(self._wait_for, bucket))

    # -- after it --

    def _pre_forward(self, module: nn.Module, args: Any) -> None:
        # The compiler would make another graph of a module whose weights were late when it ran first.
        if torch.compiler.is_compiling():
            self._is_compiled = True
        if self._late:
            self._arrive_before(module)

    @compat.outside_graphs
    def _arrive_before(self, module: nn.Module) -> None:
        for param in self._needs[module]:
            self._wait_for(self._places[param].bucket)

    def before_root_forward(self) -> None:
        """Wait for everything if no gradients are wanted: torch's fast paths look at weights' classes."""
        if self._late and not torch.is_grad_enabled():
            self.wait()

    def wait(self) -> None:
        """Return when everything has arrived.

        Raises:
            ShardingError: Another rank has failed meanwhile.
        """
        with self._lock:
            while self._under_way:
                self._wait_for_one()

    def _wait_for(self, bucket: Bucket) -> None:
        with self._lock:
            while bucket in self._late:
                self._wait_for_one()

    # -- helpers --

    def _make_room(self, numel: int) -> None:
        while self._under_way and self._numel + numel > self._limit_numel:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        """Wait for the oldest gather; the parameters of a bucket that is complete show their values."""
        if self._failure is not None:
            raise self._failure
        bucket, numel, handle = self._under_way[0]
        if os.getpid() != self._pid:
            raise _forked(bucket)
        try:
            handle.wait(for_all_streams=bucket in self._late)
        except BaseException as error:
            self._failure = error if isinstance(error, ShardingError) else _interrupted(bucket)
            raise
        self._under_way.popleft()
        self._numel -= numel
        if bucket in self._late and not any(part.bucket is bucket for part in self._under_way):
            del self._late[bucket]
            bucket.state.show()


def _may_be_late(bucket: Bucket) -> bool:
    """Tell whether a bucket's parameters can be waited for at use: sharded ones have another rhythm."""
    return bucket.policy.shard_optim and not bucket.policy.shard_params


def _is_scripted(model: nn.Module) -> bool:
    """Tell whether some of a model runs without Python, so that nothing of ours would wait."""
    return any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())


def _interrupted(bucket: Bucket) -> ShardingError:
    return ShardingError(
        what=f"The weights of bucket {bucket.name!r} are not complete: waiting for them was interrupted.",
        why="After a step every rank holds its shard of the new weights, and the others' shards have not all "
        "come in.",
        fix="End all ranks and resume from a checkpoint.",
    )


def _forked(bucket: Bucket) -> ShardingError:
    # Threads do not survive a fork: nobody would ever finish the gather here.
    return ShardingError(
        what=f"The weights of bucket {bucket.name!r} were used in a process that was forked while they were "
        "under way.",
        why="After a step the ranks exchange the new weights while the program goes on, and a forked process "
        "is no rank: it receives nothing.",
        fix="Call engine.wait_for_weights() before the fork (before the DataLoader is iterated, if it is a "
        "worker that reads them), or set overlap_comm to false.",
    )
