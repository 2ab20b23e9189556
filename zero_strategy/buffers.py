"""Flat storage: allocation, views of parameters in it, and letting go of it without losing the tensor.

Invariant: buffers are made with inference mode off. A parameter pointed at a tensor made inside
`torch.inference_mode()` would become an inference tensor, and the next training step would raise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zero_strategy.layout import BucketLayout


def empty_flat(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised 1-D tensor, [numel]."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device=device)


def views_of(flat: Tensor, layout: BucketLayout) -> list[Tensor]:
    """Return every parameter's part of a flat buffer, in its own shape.

    Shapes:
        flat [padded_numel] -> one view of `param.shape` each
    """
    with torch.inference_mode(False):
        return [flat[p.start : p.start + p.numel].view(p.shape) for p in layout.params]


def free_storage(flat: Tensor) -> None:
    """Give the memory back and keep the tensor, for `restore_storage` to make its views valid again.

    Nothing may read the tensor in between: torch does not check, and the process dies.
    """
    flat.untyped_storage().resize_(0)


def restore_storage(flat: Tensor) -> None:
    """Allocate the memory of a freed tensor again, uninitialised."""
    flat.untyped_storage().resize_(flat.nbytes)


class Cuts:
    """Cuts a flat buffer at the same places again and again, each time by one call of torch."""

    def __init__(self, ranges: Iterable[tuple[int, int]], numel: int) -> None:
        """Note where to cut.

        Args:
            ranges: First element and number of elements of each part, in order; they do not overlap.
            numel: Elements of the buffers to be cut.
        """
        self._sizes: list[int] = []
        self._inside: list[int] = []
        self._between: list[int] = []
        end = 0
        for start, size in ranges:
            self._skip(start - end)
            self._inside.append(len(self._sizes))
            self._sizes.append(size)
            end = start + size
        self._skip(numel - end)

    def __call__(self, flat: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parts, and what lies between them.

        Shapes:
            flat [numel] -> one view of [size] per range; one view per gap
        """
        parts = flat.split_with_sizes(self._sizes)
        return [parts[at] for at in self._inside], [parts[at] for at in self._between]

    def inside(self, flat: Tensor) -> list[Tensor]:
        """Return the parts alone."""
        return self(flat)[0]

    def _skip(self, size: int) -> None:
        if size:
            self._between.append(len(self._sizes))
            self._sizes.append(size)
