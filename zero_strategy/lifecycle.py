"""The parameter side of stage 3: whole around use, sharded in between.

Hooks on the modules that need a bucket make it whole before their forward and let go of it after; hooks on
their outputs make it whole again before their backward. Buckets of the root stay whole from its forward to
the end of the backward. What comes next in the last pass's order is gathered ahead. Below stage 3 there is
nothing to do and no hook.

[Note: When a bucket may go]
In a forward, when no module that uses it is running. In a backward, when another one is needed (autograd
works through one unit after the other, the latest first, so the former is done; should it not be, its
modules' output hooks ask for it again), and at the end. So two units and the root are whole at once: the
one in use and the one gathered ahead; more if `stage3_prefetch_bucket_size` asks for more ahead. One that is
needed again within `stage3_max_reuse_distance` is kept until then instead, if there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_strategy import compat
from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan
from zero_strategy.errors import ShardingError
from zero_strategy.live_buckets import LiveBuckets, LiveLimits, describe_excess
from zero_strategy.log import log_once
from zero_strategy.need_order import NeedOrder
from zero_strategy.passes import BackwardPass, ForwardPass
from zero_strategy.tensors import storage_address, tensors_in


class ParamLifecycle:
    """Makes sharded buckets whole for the modules that use them, and no longer."""

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, BucketPlan]],
        forward: ForwardPass,
        backward: BackwardPass,
        *,
        limits: LiveLimits,
        on_passed: Callable[[Sequence[Bucket]], None],
        require_same_order: Callable[[list[str]], None],
    ) -> None:
        """Register the hooks.

        Args:
            buckets: Each sharded bucket with its plan, which names the modules that need it.
            forward: Tells when a forward of the root begins and ends.
            backward: Is told when a backward begins, and tells when it ends.
            limits: How much may be whole besides what is in use.
            on_passed: Called for a unit's buckets when the backward has passed all of its uses.
            require_same_order: Raises if ranks have gathered different buckets; called where no backward will
                tell.
        """
        self._buckets = [bucket for bucket, _ in buckets]
        self._routing = {plan.modules[0] for _, plan in buckets if plan.routes}
        self._on_passed = on_passed
        self._require_same_order = require_same_order
        self._roots = [bucket for bucket in self._buckets if bucket.is_root]
        self._backward = backward
        self._limits = limits
        self._num_users = dict.fromkeys(self._buckets, 0)
        self._num_blocks = dict.fromkeys(self._buckets, 0)  # how many of the users are open `whole`
        self._uses_left = dict.fromkeys(self._buckets, 0)  # forwards that a backward has not passed yet
        self._live = LiveBuckets(limits.max_live_numel)
        self._order = NeedOrder()
        self._ahead = 0  # position in the order up to which everything has been gathered ahead
        self._used = _by_module(buckets)
        self._hooks = [hook for module, used in self._used.items() for hook in self._register(module, used)]
        if self._buckets:
            forward.listen(
                on_begin=self._on_forward_begin,
                on_end=self._on_forward_end,
                on_interrupt=self._on_forward_interrupt,
            )
            backward.listen(on_end=self._on_backward_end, on_abort=self._on_backward_end)
        excess = describe_excess(buckets, limits.max_live_numel)
        if excess is not None:
            log_once(excess)

    def exchange(self, old: Bucket, new: Sequence[tuple[Bucket, BucketPlan]]) -> None:
        """Let buckets take the place of one that holds the same parameters; no gather may be under way.

        A bucket is held by whoever has held the old one. Hooks stay where they are: each has a list of the
        buckets its module uses, and so have the hooks on what the module has returned.
        """
        if old not in self._num_users:
            return
        buckets = [bucket for bucket, _ in new]
        self._live.forget(old)
        for counts in (self._num_users, self._uses_left, self._num_blocks):
            num = counts.pop(old)
            counts.update(dict.fromkeys(buckets, num))
        self._order.exchange(old, buckets)
        for table in (self._buckets, self._roots):
            _replace(table, old, buckets)
        for module, used in self._used.items():
            _replace(used, old, [bucket for bucket, plan in new if module in plan.modules])
        for bucket in buckets:
            if self._num_users[bucket]:
                self._live.gather(bucket)

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ShardingError(
            what="A model that is sharded at stage 3 was deep-copied.",
            why="A copy would hold this rank's placeholders and no weights.",
            fix="Copy the model before it is sharded and give the copy an engine of its own.",
        )

    # -- runtime --

    @compat.outside_graphs
    def _pre_forward(self, used: Sequence[Bucket], module: nn.Module, args: Any) -> None:
        self.hold(used)

    @compat.outside_graphs
    def _post_forward(self, used: Sequence[Bucket], module: nn.Module, args: Any, output: Any) -> Any:
        output = _without_views_of(used, output)
        if torch.is_grad_enabled():
            if module in self._routing:
                output = _anchor(output)
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._pre_backward, used))
        self.let_go(used)
        return output

    def _pre_backward(self, used: Sequence[Bucket], grad: Tensor) -> None:
        self._backward.begin()
        for bucket in used:
            self._make_whole(bucket)

    def _on_forward_begin(self) -> None:
        self._order.begin(grad_enabled=torch.is_grad_enabled())
        self.hold(self._roots)

    def _on_forward_end(self) -> None:
        self.let_go(self._roots)
        if not torch.is_grad_enabled():
            needed = self._order.names()
            self._end_pass(grad_enabled=False)
            if not self.is_all_whole:  # nothing is gathered there, and one rank may run a forward alone
                self._require_same_order(needed)

    def _on_forward_interrupt(self, beginning: nn.Module | None) -> None:
        # No module that was running has let go of what it held. The one that begins has its hold already.
        self._num_users = dict(self._num_blocks)
        if beginning is not None:
            for bucket in self._used.get(beginning, []):
                self._num_users[bucket] += 1
        self.reshard_idle()

    def _on_backward_end(self) -> None:
        self.reshard_idle()
        self._end_pass(grad_enabled=True)

    def order_digest(self) -> bytes:
        """Return 8 bytes that stand for what was needed in this pass, in order; ranks must agree."""
        return self._order.digest()

    # -- holding --

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Make buckets whole, and keep them so until `let_go` has been called as often. Collective."""
        for bucket in buckets:
            self._num_users[bucket] += 1
            self._make_whole(bucket)

    def let_go(self, buckets: Sequence[Bucket]) -> None:
        """Undo one `hold`; a bucket that nobody holds is resharded, unless it is needed soon."""
        in_backward = compat.is_in_backward()
        for bucket in buckets:
            self._num_users[bucket] -= 1
            stays = bucket.is_root and torch.is_grad_enabled()
            if bucket.is_whole and not (self._num_users[bucket] or stays or in_backward):
                self._reshard_or_keep(bucket)

    @property
    def is_all_whole(self) -> bool:
        """Whether `whole` has been asked for everything, and has not ended."""
        return all(self._num_blocks.values())

    @contextmanager
    def whole(self, params: Iterable[nn.Parameter] | None) -> Iterator[None]:
        """Make parameters whole for a block of code, outside of any pass and any limit. Collective.

        Args:
            params: Those whose buckets are wanted; None for all.
        """
        wanted = None if params is None else set(map(id, params))
        self._live.drop_ahead()
        for bucket in self._holding(wanted):
            self._num_blocks[bucket] += 1
            self._num_users[bucket] += 1
            if not bucket.is_whole:
                self._live.gather(bucket)
        try:
            yield
        finally:
            for bucket in self._holding(wanted):  # anew: buckets may have been exchanged
                self._num_blocks[bucket] -= 1
                self._num_users[bucket] -= 1
                if bucket.is_whole and not self._num_users[bucket]:
                    self._live.reshard(bucket, keep_written=False)

    def reshard_idle(self) -> None:
        """Reshard every bucket that nobody holds, and let go of what was gathered ahead."""
        self._live.drop_ahead()
        self._ahead = 0
        for bucket in self._buckets:
            if bucket.is_whole and not self._num_users[bucket]:
                self._live.reshard(bucket)

    # -- gathering --

    def _make_whole(self, bucket: Bucket) -> None:
        if bucket.is_whole and bucket not in self._live.kept:
            return
        if not self._order.note(bucket, grad_enabled=torch.is_grad_enabled()):
            self._live.drop_ahead(but=bucket)  # quietly: that the order changes is no anomaly
        if compat.is_in_backward():
            self._make_room(bucket)
        elif torch.is_grad_enabled():
            self._uses_left[bucket] += 1
        if self._live.kept.pop(bucket, None) is None:
            self._live.gather(bucket)
        self._gather_ahead(bucket.unit)

    def _make_room(self, wanted: Bucket) -> None:
        """Let go of the units a backward has passed. See [Note: When a bucket may go]."""
        idle = []
        for bucket in self._live.whole:
            is_in_use = self._num_users[bucket] or bucket.unit == wanted.unit
            if not (bucket.is_root or is_in_use or bucket in self._live.kept):
                idle.append(bucket)
                self._uses_left[bucket] -= 1
        self._on_passed([bucket for bucket in idle if self._uses_left[bucket] <= 0])
        for bucket in idle:
            self._reshard_or_keep(bucket)

    def _reshard_or_keep(self, bucket: Bucket) -> None:
        next_use = self._order.next_use(bucket, self._limits.max_reuse_numel)
        if next_use is None:
            self._live.reshard(bucket)
        else:
            self._live.kept[bucket] = next_use

    def _gather_ahead(self, unit: str) -> None:
        """Start gathering what comes next, so that it travels while this unit computes."""
        self._ahead = max(self._ahead, self._order.position)
        while (bucket := self._order.planned(self._ahead)) is not None:
            if self._limits.prefetch_numel is None and not self._live.is_next(bucket.unit, after=unit):
                return
            stays = bucket.is_root and bucket.is_whole
            if not stays and self._live.kept.get(bucket) != self._ahead:
                # What is in use now, or on its way for an earlier use, is let go of before this one.
                if bucket.is_whole or bucket in self._live.under_way:
                    return
                if not self._live.gather_ahead(bucket, self._ahead, self._limits.prefetch_numel):
                    return
            self._ahead += 1

    def _end_pass(self, grad_enabled: bool) -> None:
        self._live.drop_ahead()
        self._order.end_pass(grad_enabled=grad_enabled)
        self._ahead = 0
        self._uses_left = dict.fromkeys(self._buckets, 0)

    # -- helpers --

    def _holding(self, wanted: set[int] | None) -> list[Bucket]:
        return [b for b in self._buckets if wanted is None or any(id(p) in wanted for p in b.params)]

    def _register(self, module: nn.Module, used: list[Bucket]) -> list[torch.utils.hooks.RemovableHandle]:
        # A recomputation may end by an exception, and `always_call` lets go all the same.
        return [
            # Before the hooks of users, which may read the module's weights.
            module.register_forward_pre_hook(partial(self._pre_forward, used), prepend=True),
            module.register_forward_hook(partial(self._post_forward, used), always_call=True),
        ]


def _without_views_of(used: Sequence[Bucket], output: Any) -> Any:
    """Copy what a module returns of its own weights: the memory behind it is about to go.

    Raises:
        ShardingError: A view of a weight is hidden in an object whose parts cannot be replaced.
    """
    storages = {storage_address(bucket.flat) for bucket in used if bucket.is_whole}

    def is_view(tensor: Tensor) -> bool:
        address = None if isinstance(tensor, nn.Parameter) else storage_address(tensor)
        return address is not None and address in storages

    if not any(is_view(tensor) for tensor in tensors_in(output)):
        return output
    output = tree_map_only(Tensor, lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)
    if any(is_view(tensor) for tensor in tensors_in(output)):
        raise ShardingError(
            what=f"A module returned a view of its own weights inside a {type(output).__name__}.",
            why="At stage 3 the weights are resharded when the module returns, and the view would point "
            "nowhere.",
            fix="Return a copy (`.clone()`), or a tuple, list or dict instead of the object.",
        )
    return output


class _Anchor(torch.autograd.Function):
    """The identity, as far as values go; its result requires a gradient because the anchor does."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _anchor(output: Any) -> Any:
    """Make the output of a unit that routes depend on something that requires a gradient.

    On a rank whose data use none of its experts it might not, and that rank would not gather the unit in its
    backward while the others do.
    """
    anchor = torch.zeros((), requires_grad=True)

    def attach(tensor: Tensor) -> Any:
        is_bare = tensor.is_floating_point() and not tensor.requires_grad
        return _Anchor.apply(tensor, anchor) if is_bare else tensor  # type: ignore[no-untyped-call]

    return tree_map_only(Tensor, attach, output)


def _by_module(buckets: Sequence[tuple[Bucket, BucketPlan]]) -> dict[nn.Module, list[Bucket]]:
    users: dict[nn.Module, list[Bucket]] = {}
    for bucket, plan in buckets:
        for module in plan.modules:
            users.setdefault(module, []).append(bucket)
    return users


def _replace(buckets: list[Bucket], old: Bucket, new: list[Bucket]) -> None:
    """Put some buckets where a list has another; a gather order has it as often as it was gathered."""
    buckets[:] = [item for bucket in buckets for item in (new if bucket is old else [bucket])]
