"""Keeps the model's float buffers equal on all ranks, as DDP does: rank 0's count.

Buffers are not parameters: they keep their dtype, are never sharded, and ranks change them on their own
(running means).

[Note: When buffers are broadcast]
DDP broadcasts them before the forward that follows a training forward outside of `no_sync`, be that one of an
evaluation or not. Here an evaluation may run on some ranks only, or with other numbers of batches, and must
wait for nobody. So buffers that a training forward may have changed are due, and are broadcast by what comes
first of what all ranks do: the optimizer's step, or the next training forward. An evaluation after a step
finds rank 0's, as under DDP.
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
        self._are_due = False

    def broadcast_all(self) -> None:
        """Make every buffer equal, of whatever dtype. Collective."""
        self._broadcast(list(self._model.buffers()))
        self._are_due = False

    def broadcast_due(self) -> None:
        """Make float buffers equal if they are due. Collective. See [Note: When buffers are broadcast]."""
        if self._are_due:
            self._broadcast([buffer for buffer in self._model.buffers() if buffer.is_floating_point()])
            self._are_due = False

    def before_forward(self) -> None:
        """Make float buffers equal before a training forward, if they are due."""
        if torch.is_grad_enabled():
            self.broadcast_due()

    def after_forward(self) -> None:
        """Note that a training forward may have changed buffers; under `no_sync` that does not count."""
        if torch.is_grad_enabled():
            self._are_due = self._is_syncing()

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
