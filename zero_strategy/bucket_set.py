"""The buckets of an engine and what lies where in them, from construction on and through every change.

Builds the buckets that `bucketing` has planned. When an optimizer takes parameters that were frozen so far,
their bucket is exchanged for new ones, and who listens is told. Called by the engine; it must not know hooks,
gradients, optimizers or the order of reductions.

[Note: Exchanged buckets]
A frozen bucket has no place for gradients and masters, so parameters that begin to be trained move into
buckets of their own, and what stays frozen into another. One bucket is whole at a time. Buckets that were
trainable before are left alone: gradients, masters and optimizer state stay where they are. What autograd
saved of the old bucket keeps its memory, so a graph from before the exchange can still be used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan, plan_buckets, replan, summarize
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.config import ZeroConfig
from zero_strategy.gradient_wire import GradWire
from zero_strategy.log import log_event
from zero_strategy.optim.places import Place

PlannedBuckets = Sequence[tuple[Bucket, BucketPlan]]


class BucketSet:
    """All buckets of an engine; every parameter is in exactly one.

    Attributes:
        buckets: In order of registration. The list stays the same object when buckets are exchanged.
        places: Where each parameter lies; stays the same object too.
    """

    def __init__(
        self, model: nn.Module, config: ZeroConfig, collectives: Collectives, *, device: torch.device
    ) -> None:
        """Plan the buckets and lay them out, empty as yet: `Adoption` moves the parameters there.

        Args:
            model: The whole model.
            config: Resolved config.
            collectives: For gathers, reductions and agreements.
            device: Where the shards live.
        """
        self._model = model
        self._config = config
        self._collectives = collectives
        self._device = device
        self._names = {id(param): fqn for fqn, param in model.named_parameters()}
        self._position_of = {fqn: position for position, fqn in enumerate(self._names.values())}
        self._listeners: list[Callable[[Bucket, PlannedBuckets], None]] = []
        plans = plan_buckets(model, config)
        log_event(summarize(plans, config, collectives.world_size))
        self._plans = {self._build(plan): plan for plan in plans}
        self.buckets: list[Bucket] = []
        self.places: dict[nn.Parameter, Place] = {}
        self._settle()

    def listen(self, on_exchange: Callable[[Bucket, PlannedBuckets], None]) -> None:
        """Register a function that is told of every bucket that goes and of those that come for it."""
        self._listeners.append(on_exchange)

    def make_trainable(self, params: Sequence[nn.Parameter]) -> None:
        """Give frozen parameters a place for gradients. Collective. See [Note: Exchanged buckets].

        Args:
            params: Parameters of the model; those in trainable buckets are left where they are.
        """
        taken = [self.places[param] for param in params]
        lines = [f"parameter {at.fqn}{'' if at.bucket.trainable else ', frozen so far'}" for at in taken]
        self._collectives.require_same(lines, "What an optimizer takes")
        moving = [param for param in params if not self.places[param].bucket.trainable]
        by_bucket: dict[Bucket, set[nn.Parameter]] = {}
        for param in moving:
            by_bucket.setdefault(self.places[param].bucket, set()).add(param)
        for bucket, members in by_bucket.items():
            self._exchange(bucket, members)
        if moving:
            numel = sum(param.numel() for param in moving)
            num_still = sum(not param.requires_grad for param in moving)
            still = f" {num_still} of them require no gradient at this moment." if num_still else ""
            log_event(
                f"{len(moving)} parameters of {numel:,} elements that were frozen can be trained from now on."
                + still
            )

    # -- queries --

    def planned(self) -> PlannedBuckets:
        """Return each bucket with its plan."""
        return [(bucket, self._plans[bucket]) for bucket in self.buckets]

    def trains_fp16(self) -> bool:
        """Tell whether gradients are in fp16, or would be because the config asks for it."""
        has_any = any(b.trainable and b.flat.dtype == torch.float16 for b in self.buckets)
        return has_any or self._config.fp16.enabled

    def memory(self) -> MemoryUse:
        """Return the bytes that the buckets hold."""
        use = MemoryUse()
        for bucket in self.buckets:
            use.add(bucket.memory())
        return use

    # -- helpers --

    def _build(self, plan: BucketPlan) -> Bucket:
        wire = GradWire.of(self._config, self._collectives.world_size)
        return Bucket(0, plan, self._collectives, device=self._device, names=self._names, wire=wire)

    def _exchange(self, old: Bucket, begun: set[nn.Parameter]) -> None:
        """Move the parameters of a frozen bucket into new ones."""
        if not old.is_whole:
            old.finish_unshard(old.start_unshard())
        plan = self._plans.pop(old)
        taken = {bucket.name for bucket in self._plans}
        plans = replan(plan, model=self._model, config=self._config, begun=begun, taken=taken)
        new = [(self._build(plan), plan) for plan in plans]
        for bucket, _ in new:
            bucket.adopt(is_agreed=True)
        self._plans.update(new)
        self._settle()
        for listener in self._listeners:
            listener(old, new)

    def _settle(self) -> None:
        """Number the buckets, and note where every parameter lies."""
        self.buckets[:] = sorted(
            self._plans, key=lambda bucket: self._position_of[bucket.layout.params[0].fqn]
        )
        for index, bucket in enumerate(self.buckets):
            bucket.index = index
            self.places.update({param: Place(bucket, i) for i, param in enumerate(bucket.params)})
