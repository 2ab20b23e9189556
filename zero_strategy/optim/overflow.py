"""Finds gradients that are infinite or NaN, with one verdict on all ranks, and says where they are.

Called for a sharded optimizer: before a step whose gradients are fp16, or where `bf16.check_grad_overflow`
asks for it, and for scalers of other libraries. Works on the slices that a rank holds; knows nothing of the
loss scale but what it prints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import ShardingError
from zero_strategy.loss_scaler import LossScaler


class Finding(NamedTuple):
    """What a rank found, in types that JSON has; `place` orders parameters as the model has them."""

    place: tuple[int, int] | None  # bucket and parameter of the first that is not finite; None: all are
    fqn: str
    kind: str  # "inf" or "nan"
    loss: str  # the rank's last loss, or "unknown"


def any_overflow(grads: Iterable[Tensor], collectives: Collectives) -> bool:
    """Tell whether a gradient of any rank is infinite or NaN. Collective: one byte.

    Args:
        grads: This rank's.
        collectives: For the answer of the others.
    """
    flag = torch.tensor([not all_finite(grads)], dtype=torch.uint8, device="cpu")
    collectives.maximum(flag, "The message about overflows before a step")
    return bool(flag.item())


def all_finite(grads: Iterable[Tensor]) -> bool:
    """Tell whether all elements are finite; looks at a device once."""
    # Both ends of the range are NaN if one element is, and no copy is made.
    ends = [torch.stack(torch.aminmax(grad)).to(torch.float64) for grad in grads if grad.numel()]
    return not ends or bool(torch.isfinite(torch.stack(ends)).all())


def floor_error(
    owned: Iterable[tuple[Bucket, set[int]]], scaler: LossScaler, collectives: Collectives
) -> ShardingError:
    """Return the error of gradients that overflow at the smallest scale, the same on all ranks. Collective.

    Args:
        owned: The optimizer's parameters by bucket.
        scaler: The loss scaler, before it hears of this step.
        collectives: To find out which parameter is the first on any rank.
    """
    findings = [Finding(*row) for row in collectives.gather_json(_look(owned, scaler.last_loss))]
    where = "none is left to look at"
    holders = [rank for rank, finding in enumerate(findings) if finding.place is not None]
    if holders:
        rank = min(holders, key=lambda holder: findings[holder].place or (0, 0))
        where = (
            f"the first that is not finite is of {findings[rank].fqn!r} ({findings[rank].kind}, in the shard "
            f"of rank {rank})"
        )
    losses = ", ".join(f"{finding.loss} on rank {rank}" for rank, finding in enumerate(findings))
    history = ", ".join(f"{change.scale:g} from step {change.step}" for change in scaler.history)
    return ShardingError(
        what=f"Gradients overflow in step {scaler.num_steps} at a loss scale of {scaler.scale:g}, the "
        f"smallest allowed: {where}. The last losses were {losses}.",
        why=f"The scale was {history}. No smaller one is left to try, so the values themselves are infinite "
        "or NaN, not only scaled too much.",
        fix=_advice(findings),
    )


def _look(owned: Iterable[tuple[Bucket, set[int]]], loss: Tensor | None) -> Finding:
    said = "unknown" if loss is None else f"{float(loss):g}"
    for bucket, wanted in owned:
        for piece, grad in zip(bucket.slices, bucket.grads.by_slice(), strict=True):
            if piece.param_index in wanted and grad is not None and not all_finite([grad]):
                kind = "nan" if bool(grad.isnan().any()) else "inf"
                fqn = bucket.layout.params[piece.param_index].fqn
                return Finding((bucket.index, piece.param_index), fqn, kind, said)
    return Finding(None, "", "", said)


def _advice(findings: Sequence[Finding]) -> str:
    bad = [
        str(rank)
        for rank, finding in enumerate(findings)
        if finding.loss != "unknown" and not math.isfinite(float(finding.loss))
    ]
    if bad:
        return (
            f"Look at the batch and the loss of rank {', '.join(bad)} first: that loss is not finite. If it "
            "is right, lower the learning rate, or train in bf16 ('bf16': {'enabled': true})."
        )
    return (
        "Lower the learning rate, compute large sums and norms of the model in fp32, lower "
        "fp16.min_loss_scale, or train in bf16 ('bf16': {'enabled': true}), which has the range of fp32."
    )
