"""Gradient clipping on slices: the same norm and the same coefficient on every rank.

Norms are computed in fp64 and rounded once, so that they do not depend on stage, world size or bucket size.
Both work on the slices that a rank holds: `global_norm` adds up over ranks; `clip_coefficient` is pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import ConfigError, ShardingError

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_, so that the coefficient is the same


class Scaled(NamedTuple):
    """Gradients of this rank, and what they are yet to be multiplied by."""

    slices: Iterable[Tensor]
    factor: float  # above 0


def global_norm(parts: Iterable[Scaled], norm_type: float, collectives: Collectives) -> Tensor:
    """Return the norm over all ranks' slices, each element counted once. Collective.

    Args:
        parts: This rank's gradients; no two ranks hold the same element.
        norm_type: The p of the p-norm, above 0; `inf` for the largest absolute value.
        collectives: For the sum over ranks.

    Returns:
        [] fp32

    Raises:
        ConfigError: `norm_type` is not above 0.
    """
    if not norm_type > 0:
        raise ConfigError(
            what=f"Gradients cannot be clipped by a norm of type {norm_type}.",
            why="Only p-norms with p > 0 add up over the slices of a parameter.",
            fix="Pass norm_type=2.0 (the default), 1.0, or math.inf.",
        )
    norms = [
        torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64) * part.factor
        for part in parts
        for grad in part.slices
    ]
    own = torch.stack(norms).cpu() if norms else torch.zeros(1, dtype=torch.float64, device="cpu")
    if math.isinf(norm_type):
        total = collectives.stack(own.max().reshape(1)).max()
    else:
        power_sum = own.pow(norm_type).sum().reshape(1)
        total = collectives.sum_in_rank_order(power_sum).pow(1.0 / norm_type).squeeze()
    return total.to(torch.float32)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings gradients down to a norm of `max_norm`, [] fp32, at most 1."""
    return torch.clamp(max_norm / (norm + _EPS), max=1.0)


def require_bound(bound: float, by: str) -> None:
    """Refuse what is no bound on a size: by a negative one gradients would change sign.

    Raises:
        ConfigError: It is below 0, or NaN.
    """
    if not bound >= 0:
        raise ConfigError(
            what=f"Gradients cannot be clipped by a {by} of {bound}.",
            why=f"The largest {by} allowed is 0 or more.",
            fix="Pass a number above 0, or do not clip.",
        )


def require_finite(norm: Tensor, norm_type: float) -> None:
    """Refuse to clip by a norm that is NaN or infinite; it is the same on all ranks.

    Raises:
        ShardingError: It is.
    """
    if not torch.isfinite(norm):
        raise ShardingError(
            what=f"The norm of order {norm_type} of the gradients is {float(norm)}, so they are not clipped.",
            why="Scaled by it they would be zero or NaN, and so would the weights after the next step.",
            fix="Skip this step (zero_grad) and look at the loss and the learning rate, or pass "
            "error_if_nonfinite=False.",
        )
