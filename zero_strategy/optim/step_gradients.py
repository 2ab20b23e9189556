"""The reduced gradients of one optimizer, between the backward and the step: clipped, unscaled, checked.

Owned by a sharded optimizer, which hands its slices out. What gradients are multiplied by is applied at once
where they are plain; scaled fp16 gradients have little room, so there it waits for the step, where one
multiplication in fp32 does it together with the loss scale. Must not know weights or optimizer state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import ShardingError
from zero_strategy.log import log_event, log_once
from zero_strategy.loss_scaler import LossScaler
from zero_strategy.optim.clip import Scaled, clip_coefficient, global_norm, require_bound, require_finite
from zero_strategy.optim.overflow import any_overflow, floor_error

Wanted = Mapping[Bucket, set[int]]  # some parameters, as indices by bucket


class StepGradients:
    """What happens to gradients on their way into a step.

    Attributes:
        was_clipped: Somebody has clipped since the last step.
        clip_coefficient: What the last clipping by norm multiplied by.
    """

    def __init__(
        self,
        owned: Callable[[], Iterator[tuple[Bucket, set[int]]]],
        collectives: Collectives,
        scaler: LossScaler,
        *,
        is_syncing: Callable[[], bool],
        checks_overflow: bool,
    ) -> None:
        """Begin with nothing pending.

        Args:
            owned: Yields the optimizer's parameters, as indices by bucket.
            collectives: For norms and verdicts.
            scaler: Says what gradients are to be divided by.
            is_syncing: Whether an accumulation window ends here; inside `no_sync` there is nothing to clip.
            checks_overflow: Whether steps are skipped for infinite gradients where no loss is scaled, too.
        """
        self._owned = owned
        self._collectives = collectives
        self._scaler = scaler
        self._is_syncing = is_syncing
        self._checks_overflow = checks_overflow
        self._pending_factor = 1.0
        self._overflowed: bool | None = None  # what a norm has shown ...
        self._measured_at = 0  # ... after so many backwards
        self._unscaled: tuple[int, bool] | None = None  # after so many backwards, with this verdict
        self.was_clipped = False
        self.clip_coefficient = 1.0

    @property
    def factor(self) -> float:
        """What the gradients are yet to be multiplied by: clipping, and the reciprocal of the loss scale."""
        return self._pending_factor / self._scaler.scale

    # -- runtime --

    def clip_norm(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Bound the global norm; returns the one before, [] fp32. Collective."""
        norm = global_norm([Scaled(self.own(), self.factor)], norm_type, self._collectives)
        if error_if_nonfinite:
            require_finite(norm, norm_type)
        self.clip_by(norm, max_norm)
        return norm

    def clip_by(self, norm: Tensor, max_norm: float, only: Wanted | None = None) -> None:
        """Scale gradients as a norm asks for that they are a part of.

        Args:
            norm: [] fp32, over these gradients at least; the same on all ranks.
            max_norm: Its bound; `inf` leaves the gradients alone.
            only: Which parameters; None for all.
        """
        require_bound(max_norm, "norm")
        only_measures = max_norm == math.inf
        if not self._may_clip(only_measures):
            return
        is_finite = math.isfinite(norm)
        if self._covers_all(only) or not is_finite:
            self._overflowed, self._measured_at = not is_finite, self._scaler.num_backwards
        self.clip_coefficient = 1.0 if only_measures else float(clip_coefficient(norm, max_norm))
        # A coefficient of NaN must spoil the gradients, as it would in torch; so this asks for "not 1".
        if self.clip_coefficient != 1.0:
            self._multiply(self.clip_coefficient, only)

    def clip_value(self, clip_value: float, only: Wanted | None = None) -> None:
        """Clamp every element; of some parameters, or of all."""
        require_bound(clip_value, "value")
        if not self._may_clip():
            return
        for grad in self._all(only):
            bound = min(clip_value / self.factor, torch.finfo(grad.dtype).max)
            grad.clamp_(-bound, bound)

    def unscale(self, inverse_scale: float) -> bool:
        """Multiply, and tell whether a gradient of any rank is infinite or NaN. Collective.

        Once after a backward: a scaler that is asked to forget between the steps of two optimizers on one
        loss would unscale the second's gradients again.
        """
        if self._scaler.is_active:
            raise ShardingError(
                what="A gradient scaler was used on top of the engine's own loss scaler.",
                why="The parameters are in fp16, so engine.backward() scales the loss already.",
                fix="Use one of them: no GradScaler, or fp32 parameters under autocast.",
            )
        if self._unscaled is None or self._unscaled[0] != self._scaler.num_backwards:
            self._multiply(inverse_scale)
            self._unscaled = self._scaler.num_backwards, any_overflow(self.own(), self._collectives)
        return self._unscaled[1]

    def must_skip(self) -> bool:
        """Tell whether to skip the step; asks the others only if a norm has not done so. Collective."""
        if not (self._scaler.is_active or self._checks_overflow):
            return False
        if self._overflowed is not None and self._measured_at == self._scaler.num_backwards:
            return self._overflowed
        return any_overflow(self.own(), self._collectives)

    def end_step(self, was_skipped: bool) -> None:
        """Tell the loss scaler how the step went. Collective if it was skipped.

        Raises:
            ShardingError: It was, at the smallest scale.
        """
        self.forget()
        if was_skipped and not self._scaler.is_active:
            log_event("A step was skipped: gradients are infinite or NaN (bf16.check_grad_overflow).")
        elif was_skipped and self._scaler.is_at_floor():
            raise floor_error(self._owned(), self._scaler, self._collectives)
        self._scaler.update(was_skipped)

    def forget(self) -> None:
        """Forget what was pending: the gradients have been used, or cleared."""
        self.was_clipped, self._pending_factor = False, 1.0
        self._overflowed = self._unscaled = None

    # -- helpers --

    def _may_clip(self, only_measures: bool = False) -> bool:
        if not self._is_syncing():
            log_once("Clipping inside no_sync() does nothing: the gradients are still being accumulated.")
            return False
        self.was_clipped = self.was_clipped or not only_measures
        return True

    def _multiply(self, factor: float, only: Wanted | None = None) -> None:
        if not self._scaler.is_active:
            for grad in self._all(only):
                grad.mul_(factor)
        elif not math.isfinite(factor):  # the step will be skipped
            return
        elif self._covers_all(only):
            self._pending_factor *= factor
        else:  # the others wait for another factor
            for grad in self._all(only):
                grad.mul_(factor)

    def own(self, only: Wanted | None = None) -> Iterator[Tensor]:
        """Yield the gradients in this rank's range: every element on one rank only."""
        for bucket, indices in self._among(only):
            yield from bucket.grads.own(indices)

    def _all(self, only: Wanted | None = None) -> Iterator[Tensor]:
        """Yield all gradients that this rank updates weights with."""
        for bucket, indices in self._among(only):
            for piece, grad in zip(bucket.slices, bucket.grads.by_slice(), strict=True):
                if grad is not None and piece.param_index in indices:
                    yield grad

    def _among(self, only: Wanted | None) -> Iterator[tuple[Bucket, set[int]]]:
        for bucket, indices in self._owned():
            yield bucket, indices if only is None else indices & only.get(bucket, set())

    def _covers_all(self, only: Wanted | None) -> bool:
        return only is None or all(indices <= only.get(bucket, set()) for bucket, indices in self._owned())


class GradPart(NamedTuple):
    """Some of the gradients of one optimizer."""

    grads: StepGradients
    only: Wanted

    def scaled(self) -> Scaled:
        """Return this rank's, for a norm."""
        return Scaled(self.grads.own(self.only), self.grads.factor)
