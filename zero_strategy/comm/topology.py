"""Which process groups there are, and who is in them.

Built once by the engine, closed by it. Gathers and reductions have a group each, because autograd interleaves
the two differently on each rank and a group's collectives must be issued in one order. Control messages
(flags, names, norms) have a third, always on gloo, so that they never wait for a device and never take part
in the order of the other two.

Without an initialised `torch.distributed` there is one rank and no group; the collectives degenerate. Under
torch's fake process group the control messages are fake as well: one rank of many, with nobody else.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from zero_strategy.comm.causes import was_pickled
from zero_strategy.comm.letters import Letters
from zero_strategy.comm.links import Links
from zero_strategy.comm.watch import Watch
from zero_strategy.comm.words import Words
from zero_strategy.compat import (
    default_timeout,
    native_all_gather,
    native_reduce_scatter_sum,
    store_of_ranks,
)
from zero_strategy.errors import ConfigError
from zero_strategy.log import get_launched_world_size

_USUAL = {"cpu": "gloo", "cuda": "nccl"}  # the backend one would choose for a kind of device


class Topology:
    """The ranks of one engine and their process groups.

    Attributes:
        rank: This process in the default group, 0 if there is none.
        world_size: Number of processes in it, 1 if there is none.
        device: Where the tensors live that gathers and reductions move.
        native: Whether the backend's own collectives are used for them (NCCL and the like) rather than ours
            (gloo).
        watch: Ends this rank's waits when another rank has failed.
        gather_group, reduce_group, control_group: None if there is no default group.
    """

    def __init__(self, device: torch.device) -> None:
        """Make the groups, all in one order on all ranks. Collective.

        Args:
            device: Where gathers and reductions take place.

        Raises:
            ConfigError: The default process group has no backend for that device; on all ranks.
        """
        self.device = device
        self.rank = 0
        self.world_size = 1
        self.native = False
        self.gather_group: dist.ProcessGroup | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        self.control_group: dist.ProcessGroup | None = None
        self._has_others = False
        self._finalizer: weakref.finalize[..., Topology] | None = None
        links = Links()
        self.watch = Watch(0, 1, links)
        if not (dist.is_available() and dist.is_initialized()):
            if get_launched_world_size() > 1:
                raise ConfigError(
                    what=f"This is one of {get_launched_world_size()} processes (WORLD_SIZE), and there is "
                    f"no process group.",
                    why="Each would train a copy of its own, and none would know of the others.",
                    fix="Call torch.distributed.init_process_group() before building the engine.",
                )
            return
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        backend = str(dist.get_backend_config())
        self.native = _backend_for(device, backend) != "gloo"  # raises before any group is made
        timeout = default_timeout(device)
        is_fake = "fake" in backend
        self._has_others = self.world_size > 1 and not is_fake
        self.gather_group = dist.new_group(timeout=timeout)
        self.reduce_group = dist.new_group(timeout=timeout)
        self.control_group = dist.new_group(timeout=timeout, backend="fake" if is_fake else "gloo")
        links.note([self.gather_group, self.reduce_group], self.native)
        # The name of a group is the same on all ranks and no other group's.
        self.watch = watch_ranks(self.control_group.group_name, links, self.control_group)
        # Of an engine that is dropped without close().
        groups = (self.gather_group, self.reduce_group, self.control_group)
        self._finalizer = weakref.finalize(self, _give_up, self.watch, groups, os.getpid())
        self._finalizer.atexit = False
        if self.native:
            self._connect()

    def _connect(self) -> None:
        """Have the backend set both groups up now.

        It does so at a group's first collective, and NCCL blocks its caller and may wait for the device
        meanwhile. For reductions that would be within the first backward, while a gather is under way that
        waits for a rank which waits in the set-up: a deadlock.
        """
        assert self.gather_group is not None and self.reduce_group is not None, "no default process group"
        everybodys = torch.zeros(self.world_size, dtype=torch.float32, device=self.device)
        own = everybodys[self.rank : self.rank + 1]
        native_all_gather(everybodys, own, self.gather_group).wait()
        native_reduce_scatter_sum(own, everybodys, self.reduce_group).wait()
        float(own)  # waits for the device

    def open_letters(self) -> Letters:
        """Open what ranks tell one another by beside the training. All ranks must have before one waits."""
        if not self._has_others or self.control_group is None:
            return Letters(Words(None), 0, 1, self.watch.find_gone)
        store = store_of_ranks(f"zero_strategy/{self.control_group.group_name}/letters")
        return Letters(Words(store), self.rank, self.world_size, self.watch.find_gone)

    def close(self) -> None:
        """Give the process groups back. Not collective; safe to call twice."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self.watch.close()
        groups = (self.gather_group, self.reduce_group, self.control_group)
        self.gather_group = self.reduce_group = self.control_group = None
        _destroy(groups)

    @contextlib.contextmanager
    def closed_if_refused(self) -> Iterator[None]:
        """Give the process groups back if the block raises a ConfigError, which all ranks raise together.

        Left to the garbage collector, they would be destroyed in the midst of another engine's collective.
        """
        try:
            yield
        except ConfigError:
            self.close()
            raise

    def __reduce__(self) -> NoReturn:
        raise was_pickled()


def _give_up(watch: Watch, groups: Sequence[dist.ProcessGroup], pid: int) -> None:
    """Do what `close` does, from within the garbage collector."""
    if os.getpid() != pid:  # a forked process has copies only
        return
    watch.abandon()
    with contextlib.suppress(Exception):  # nobody could catch it
        _destroy(groups)


def _destroy(groups: Sequence[dist.ProcessGroup | None]) -> None:
    for group in groups:
        # The default group may be gone already, and every other group with it.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def usual_device() -> torch.device:
    """Return where tensors go that are on none yet: the CPU, or this rank's GPU in a group for GPUs only."""
    if dist.is_available() and dist.is_initialized():
        kinds = [part.rpartition(":")[0] for part in str(dist.get_backend_config()).split(",")]
        if not {"", "cpu"} & set(kinds) and torch.accelerator.is_available():
            return torch.device(kinds[0], torch.accelerator.current_device_index())
    return torch.device("cpu")


def watch_ranks(name: str, links: Links, group: dist.ProcessGroup | None = None) -> Watch:
    """Begin to watch the ranks of the default process group. Collective; degenerates without others.

    Args:
        name: The same on all ranks, and of no other watch that goes on.
        links: What is to be cut when a rank has failed.
        group: For the one collective of the beginning.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or "fake" in str(dist.get_backend_config()):
        return Watch(0, 1, links)
    watch = Watch(dist.get_rank(), dist.get_world_size(), links, store_of_ranks(f"zero_strategy/{name}"))
    dist.barrier(group=group)  # every rank has left its first words
    watch.start()
    return watch


def _backend_for(device: torch.device, config: str) -> str:
    """Return the backend that serves `device` in a config such as `gloo` or `cpu:gloo,cuda:nccl`."""
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    raise ConfigError(
        what=f"The model is on {device}, but the process group ({config}) has no backend for "
        f"{device.type} tensors.",
        why="Parameters are gathered, and gradients reduced, on the device where the shards live.",
        fix=f"Move the model to the device of this rank, or name it: ZeroEngine(model, config, "
        f"device=...). To train on {device.type}: "
        f"torch.distributed.init_process_group('{device.type}:{_USUAL.get(device.type, '...')},{config}').",
    )
