"""A tensor that is written as a stream: its names, and its elements chunk by chunk in the dtype to write.

Made by `export_selection`, written by `weight_files`. It does not know where the elements come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_strategy.errors import CheckpointError


@dataclass(frozen=True, eq=False)
class StreamedTensor:
    """A tensor to write. In two places of a structure it is one tensor, as a tied weight is.

    Attributes:
        names: What it is written under; more than one where it is tied and the format can say so.
        shape: Its shape.
        dtype: To write it in.
        source: Returns its elements in order, in the dtype they are stored in. A chunk may be overwritten
            when the next is asked for.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Callable[[], Iterator[Tensor]]

    @property
    def num_bytes(self) -> int:
        """Bytes as written."""
        return math.prod(self.shape) * self.dtype.itemsize

    def chunks(self) -> Iterator[Tensor]:
        """Yield the elements in order, converted. Use one before asking for the next.

        Raises:
            CheckpointError: A finite value would become infinite; the source is damaged.
        """
        for chunk in self.source():
            yield self._converted(chunk)

    def _converted(self, chunk: Tensor) -> Tensor:
        converted = chunk.to(self.dtype)
        # Of the usual targets only float16 has a smaller range than what it is converted from.
        if self.dtype == torch.float16 and chunk.dtype != self.dtype:
            self._require_finite(chunk, converted.isinf())
        return converted

    def _require_finite(self, chunk: Tensor, infinite: Tensor) -> None:
        num_lost = int((infinite & ~chunk.isinf()).sum()) if infinite.any() else 0
        if num_lost:
            raise CheckpointError(
                what=f"{num_lost} elements of {self.names[0]!r} do not fit into float16.",
                why=f"They would become infinite: one is {float(chunk.abs().max()):.6g}, the limit is 65504.",
                fix="Write bfloat16 or float32: --dtype bf16.",
            )
