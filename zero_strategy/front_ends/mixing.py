"""Mixes the parameters of one engine into those of another, as a reference model follows what is trained.

Called by front ends. Where both lie alike every rank mixes its own part, and nothing is sent.
"""

from __future__ import annotations

from contextlib import ExitStack

import torch

from zero_strategy.bucket import Bucket
from zero_strategy.engine import ZeroEngine


def mix_into(target: ZeroEngine, source: ZeroEngine, share: float) -> None:
    """Make every parameter (1 - share) of itself and `share` of another engine's. Collective.

    Args:
        target: Whose parameters are written; masters follow.
        source: A model with the same parameters, in the same order.
        share: From 0 to 1.
    """
    for engine in (target, source):
        engine.wait_for_weights()
    with torch.no_grad():
        if _lie_alike(target, source):
            for own, other in zip(target.buckets, source.buckets, strict=True):
                _mix_bucket(own, other, share)
            target.sync_masters_from_params()
            return
        with ExitStack() as stack:
            stack.enter_context(source.unsharded_params())
            stack.enter_context(target.unsharded_params(writeback=True))
            pairs = zip(target.model.parameters(), source.model.parameters(), strict=True)
            for mine, theirs in pairs:
                mine.mul_(1.0 - share).add_(theirs, alpha=share)


def _lie_alike(target: ZeroEngine, source: ZeroEngine) -> bool:
    return len(target.buckets) == len(source.buckets) and all(
        own.layout == other.layout and own.policy == other.policy and own.flat.dtype == other.flat.dtype
        for own, other in zip(target.buckets, source.buckets, strict=True)
    )


def _mix_bucket(own: Bucket, other: Bucket, share: float) -> None:
    if own.is_whole and other.is_whole:
        own.flat.mul_(1.0 - share).add_(other.flat, alpha=share)
    if own.policy.shard_params:
        own.param_shard.mul_(1.0 - share).add_(other.param_shard, alpha=share)
    own.state.note_write(own.is_whole)
