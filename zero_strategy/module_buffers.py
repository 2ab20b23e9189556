"""Keeps the model's float buffers equal on all ranks, as DDP does: rank 0's, before a synchronised forward.

Buffers are not parameters: they keep their dtype, are never sharded, and ranks change them on their own
(running means).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zero_strategy.comm.collectives import Collectives


class BufferBroadcaster:
    """Broadcasts buffers from rank 0, one message per dtype."""

    def __init__(self, model: nn.Module, collectives: Collectives, is_syncing: Callable[[], bool]) -> None:
        """Note the model.

        Args:
            model: The whole model.
            collectives: For the broadcast.
            is_syncing: Tells whether the coming backward reduces gradients.
        """
        self._model = model
        self._collectives = collectives
        self._is_syncing = is_syncing

    def broadcast_all(self) -> None:
        """Make every buffer equal, of whatever dtype."""
        self._broadcast(list(self._model.buffers()))

    def before_forward(self) -> None:
        """Make float buffers equal, if the forward that begins is a training one outside of `no_sync`."""
        if torch.is_grad_enabled() and self._is_syncing():
            self._broadcast([buffer for buffer in self._model.buffers() if buffer.is_floating_point()])

    def _broadcast(self, buffers: list[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            # `.data`: writing a buffer must not invalidate what autograd saved of it in an earlier forward.
            by_dtype.setdefault(buffer.dtype, []).append(buffer.data)
        for same in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in same])
            self._collectives.broadcast(flat)
            for buffer, part in zip(same, flat.split([buffer.numel() for buffer in same]), strict=True):
                buffer.copy_(part.view_as(buffer))
