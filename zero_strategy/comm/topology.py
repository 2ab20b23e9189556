"""Which process groups there are, and who is in them.

Built once by the engine, closed by it. Gathers and reductions have a group each, because autograd interleaves
the two differently on each rank and a group's collectives must be issued in one order. Control messages
(flags, names, norms) have a third, always on gloo, so that they never wait for a device and never take part
in the order of the other two.

Without an initialised `torch.distributed` there is one rank and no group; the collectives degenerate.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zero_strategy.compat import default_timeout


class Topology:
    """The ranks of one engine and their process groups.

    Attributes:
        rank: This process in the default group, 0 if there is none.
        world_size: Number of processes in it, 1 if there is none.
        device: Where the tensors live that gathers and reductions move.
        native: Whether the backend's own collectives are used for them (NCCL and the like) rather than ours
            (gloo).
        gather_group, reduce_group, control_group: None if there is no default group.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = 0
        self.world_size = 1
        self.native = False
        self.gather_group: dist.ProcessGroup | None = None
        self.reduce_group: dist.ProcessGroup | None = None
        self.control_group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        backend = str(dist.get_backend_config())
        self.native = _backend_for(device, backend) != "gloo"
        timeout = default_timeout(device)
        self.gather_group = dist.new_group(timeout=timeout)
        self.reduce_group = dist.new_group(timeout=timeout)
        self.control_group = dist.new_group(timeout=timeout, backend="fake" if "fake" in backend else "gloo")

    def close(self) -> None:
        """Give the process groups back. Not collective; safe to call twice."""
        groups = (self.gather_group, self.reduce_group, self.control_group)
        self.gather_group = self.reduce_group = self.control_group = None
        for group in groups:
            # The default group may be gone already, and every other group with it.
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)


def _backend_for(device: torch.device, config: str) -> str:
    """Return the backend that serves `device` in a config such as `gloo` or `cpu:gloo,cuda:nccl`."""
    for part in config.split(","):
        kind, _, backend = part.rpartition(":")
        if kind in ("", device.type):
            return backend
    return config
