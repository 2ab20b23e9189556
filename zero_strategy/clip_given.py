"""Clipping of the parameters one is given, whichever engines and optimizers hold them.

A front end whose user writes `clip_grad_norm_(model.parameters(), 1.0)` calls this: the norm is that of all
these gradients together, over all ranks, and these gradients alone are scaled. An optimizer's own
`clip_grad_norm_` is for its own parameters. Parameters that no engine holds take part as in torch, with the
gradient this rank has. It must not know buckets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from zero_strategy.engine import ZeroEngine
from zero_strategy.optim.clip import clip_coefficient, global_norm
from zero_strategy.optim.step_gradients import GradPart


def clip_norm_of(
    engines: Sequence[ZeroEngine],
    params: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale gradients down so that their norm together is at most `max_norm`. Collective.

    Args:
        engines: All there are, in the same order on all ranks.
        params: Whose gradients; those without one do not count.
        max_norm: The bound; `inf` only measures.
        norm_type: The p of the p-norm.

    Returns:
        [] fp32, the norm before clipping, the same on all ranks if engines hold all of the parameters.
    """
    params = list(params)
    parts, others = _parts_of(engines, params)
    grads = [param.grad for param in others if param.grad is not None]
    norm = torch.zeros(())
    if parts:
        norm = global_norm([part.scaled() for part in parts], norm_type, engines[0].collectives)
    if grads:
        rest = torch.nn.utils.get_total_norm(grads, norm_type)
        both = torch.stack([norm.to(rest.device), rest.float()])
        norm = torch.linalg.vector_norm(both, norm_type)
    for part in parts:
        part.grads.clip_by(norm, max_norm, part.only)
    if grads and max_norm != math.inf:
        torch._foreach_mul_(grads, clip_coefficient(norm, max_norm).to(grads[0].device))
    return norm.to(params[0].device) if params else norm


def clip_value_of(engines: Sequence[ZeroEngine], params: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every element of the averaged gradients of some parameters to [-clip_value, clip_value]."""
    parts, others = _parts_of(engines, params)
    for part in parts:
        part.grads.clip_value(clip_value, part.only)
    for param in others:
        if param.grad is not None:
            param.grad.clamp_(-clip_value, clip_value)


def _parts_of(
    engines: Sequence[ZeroEngine], params: Iterable[nn.Parameter]
) -> tuple[list[GradPart], list[nn.Parameter]]:
    parts: list[GradPart] = []
    others = list(params)
    for engine in engines:
        held, others = engine.grad_parts(others)
        parts += held
    return parts, others
