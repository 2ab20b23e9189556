"""Keeps the model's buffers equal on all ranks, as DDP does: rank 0's count.

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
from torch import nn

from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ordered import as_bytes


class BufferBroadcaster:
    """Broadcasts buffers from rank 0, all in one message."""

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
        # `.data`: writing a buffer must not invalidate what autograd saved of it in an earlier forward.
        buffers = [buffer.data for buffer in self._model.buffers()]
        # The widest first: each begins at a multiple of its own element size then.
        buffers.sort(key=lambda buffer: buffer.element_size(), reverse=True)
        if buffers:
            flat = torch.cat([as_bytes(buffer.reshape(-1).contiguous()) for buffer in buffers])
            self._collectives.broadcast(flat)
            parts = flat.split([buffer.nbytes for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view(buffer.dtype).view_as(buffer))
        self._are_due = False

    def broadcast_due(self) -> None:
        """Make buffers equal if they are due. Collective. See [Note: When buffers are broadcast]."""
        if self._are_due:
            self.broadcast_all()

    def before_forward(self) -> None:
        """Make buffers equal before a training forward, if they are due."""
        if torch.is_grad_enabled():
            self.broadcast_due()

    def after_forward(self) -> None:
        """Note that a training forward may have changed buffers; under `no_sync` that does not count."""
        if torch.is_grad_enabled():
            self._are_due = self._is_syncing()
