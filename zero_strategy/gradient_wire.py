"""How gradients travel: their dtype on the wire, and what they are divided by before and after the sum.

Pure functions of a flat buffer, read by the bucket when it is reduced. Whatever is set, every rank's gradient
is treated alike and the sum is taken in fp32, so the stages still give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero_strategy.config import ZeroConfig

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class GradWire(NamedTuple):
    """What the config says about gradients between the backward and the mean.

    Attributes:
        accum_dtype: Of gradients that accumulate and of means; None: the parameters' own.
        wire_dtype: In which they travel; None: the one they have.
        divide_before: Divides every rank's gradient before it travels.
        divide_after: Divides the sum over ranks; the product of both is the number of ranks.
    """

    accum_dtype: torch.dtype | None
    wire_dtype: torch.dtype | None
    divide_before: float
    divide_after: float

    @classmethod
    def of(cls, config: ZeroConfig, world_size: int) -> GradWire:
        """Read it from a config."""
        before = float(world_size) if config.prescale_gradients else config.gradient_predivide_factor
        return cls(
            _DTYPES.get(config.data_types.grad_accum_dtype),
            _DTYPES.get(config.communication_data_type),
            before,
            world_size / before,
        )

    def pack(self, full: Tensor) -> Tensor:
        """Return gradients as they travel: the buffer itself if its dtype fits; it may be changed.

        The division takes place in the wider of the two dtypes: what would overflow in fp16 is to be smaller
        before it gets there.

        Shapes:
            full [padded_numel] -> [padded_numel] wire_dtype
        """
        wire_dtype = self.wire_dtype or full.dtype
        wide = full.to(wire_dtype) if wire_dtype.itemsize > full.dtype.itemsize else full
        if self.divide_before != 1.0:
            wide.div_(self.divide_before)
        return wide.to(wire_dtype)
