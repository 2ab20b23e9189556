"""One update: the user's optimizer runs over this rank's slices, a few buckets at a time.

While it runs, the param groups hold slices of the master weights instead of the user's parameters, each with
its reduced gradient as its `.grad`; afterwards they are as before. What has been updated is rounded into the
parameter shards and published while the next buckets are updated. Called by `ShardedOptimizer.step`; whether
a step is due, clipped or skipped was decided before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero_strategy.bucket import Bucket
from zero_strategy.optim.elementwise import counts_steps_per_tensor
from zero_strategy.optim.places import Place
from zero_strategy.optim.publish import Publisher
from zero_strategy.precision import Masters, MasterShard


class SliceStep:
    """Updates the slices of one optimizer's parameters."""

    def __init__(
        self,
        inner: Optimizer,
        places: Mapping[nn.Parameter, Place],
        masters: Masters,
        publisher: Publisher,
        *,
        sub_group_numel: int,
    ) -> None:
        """Take what an update needs.

        Args:
            inner: The user's optimizer.
            places: Where each parameter lies.
            masters: Gives the master weights of a bucket.
            publisher: Makes the whole parameters agree.
            sub_group_numel: Master elements to update at a time, at least one bucket.
        """
        self._inner = inner
        self._places = places
        self._masters = masters
        self._publisher = publisher
        self._sub_group_numel = sub_group_numel

    def run(self, groups: Sequence[dict[str, Any]], buckets: Sequence[Bucket], grad_factor: float) -> None:
        """Update everything once.

        Args:
            groups: The param groups, with the user's parameters.
            buckets: Those that hold the parameters.
            grad_factor: What gradients are yet to be multiplied by.
        """
        with torch.no_grad():
            for sub_group in self._sub_groups(buckets):
                self._update(groups, sub_group, grad_factor)
                for bucket in sub_group:
                    self._publisher.start(bucket)
        self._publisher.end_step()

    def _sub_groups(self, buckets: Sequence[Bucket]) -> Iterator[Sequence[Bucket]]:
        """Yield the buckets to update at a time; all, if the optimizer might count or tell its steps."""
        num_hooks = len(self._inner._optimizer_step_pre_hooks) + len(self._inner._optimizer_step_post_hooks)
        if num_hooks or not counts_steps_per_tensor(self._inner):
            yield buckets
            return
        sub_group: list[Bucket] = []
        filled_numel = 0
        for bucket in buckets:
            if sub_group and filled_numel + bucket.owned_numel > self._sub_group_numel:
                yield sub_group
                sub_group, filled_numel = [], 0
            sub_group.append(bucket)
            filled_numel += bucket.owned_numel
        yield sub_group

    def _update(
        self, groups: Sequence[dict[str, Any]], buckets: Sequence[Bucket], grad_factor: float
    ) -> None:
        """Run the user's optimizer over the slices of a few buckets."""
        masters = {bucket: self._masters.of(bucket) for bucket in buckets}
        stepped: list[Tensor] = []
        users_params = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, users_params, strict=True):
                places = [place for param in params if (place := self._places[param]).bucket in masters]
                group["params"] = [
                    weight
                    for place in places
                    for weight in masters[place.bucket].weights_of(place.param_index)
                ]
                stepped += group["params"]
            _give_grads(masters, stepped, grad_factor)
            self._inner.step()
        finally:
            for group, params in zip(groups, users_params, strict=True):
                group["params"] = params
            for weight in stepped:
                weight.grad = None
        for shard in masters.values():
            shard.round_into_shard()


def _give_grads(masters: Mapping[Bucket, MasterShard], stepped: Sequence[Tensor], factor: float) -> None:
    """Give the slices that are stepped their reduced gradients, each as its `.grad`."""
    grads = {
        weight: grad
        for bucket, shard in masters.items()
        for weight, grad in zip(map(id, shard.slices), bucket.grads.by_slice(), strict=True)
    }
    for weight in stepped:
        grad = grads[id(weight)]
        if grad is not None:
            weight.grad = _times(grad, factor, weight)


def _times(grad: Tensor, factor: float, weight: Tensor) -> Tensor:
    """Return a gradient as a weight's, in its dtype and shape; itself if there is nothing to do."""
    if factor != 1.0:
        grad = grad.to(weight.dtype, copy=True).mul_(factor)
    elif grad.dtype != weight.dtype:
        grad = grad.to(weight.dtype)
    return grad if weight.dim() else grad.view(())
