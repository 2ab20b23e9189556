"""The parameter side of stage 3: whole around use, sharded in between.

Hooks on the modules that need a bucket make it whole before their forward and let go of it after; hooks on
their outputs make it whole again before their backward. Buckets of the root stay whole from its forward to
the end of the backward. The next bucket of the last pass's order is gathered ahead. Below stage 3 there
is nothing to do and no hook.

[Note: When a bucket may go]
In a forward, when no module that uses it is running. In a backward, when another one is needed (autograd
works through one unit after the other, the latest first, so the former is done; should it not be, its
modules' output hooks ask for it again), and at the end. So two buckets and the root are whole at once: the
one in use and the one gathered ahead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_strategy import compat
from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan
from zero_strategy.comm.collectives import Handle
from zero_strategy.errors import ShardingError
from zero_strategy.passes import BackwardPass, ForwardPass
from zero_strategy.tensors import storage_address, tensors_in


class ParamLifecycle:
    """Makes sharded buckets whole for the modules that use them, and no longer.

    Attributes:
        order: The buckets gathered since the pass began (a forward and its backward), in order.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[Bucket, BucketPlan]],
        forward: ForwardPass,
        backward: BackwardPass,
        *,
        prefetch_numel: int,
        on_passed: Callable[[Bucket], None],
        require_same_order: Callable[[list[str]], None],
    ) -> None:
        """Register the hooks.

        Args:
            buckets: Each sharded bucket with its plan, which names the modules that need it.
            forward: Tells when a forward of the root begins and ends.
            backward: Is told when a backward begins, and tells when it ends.
            prefetch_numel: Elements that may be gathered ahead; 0 for none.
            require_same_order: Raises if ranks have gathered different buckets; called where no backward will
                tell.
            on_passed: Called for a unit's buckets when the backward has passed all of its uses.
        """
        self._buckets = [bucket for bucket, _ in buckets]
        self._unit_of = {bucket: plan.modules[0] for bucket, plan in buckets}
        self._routing = {plan.modules[0] for _, plan in buckets if plan.routes}
        self._on_passed = on_passed
        self._require_same_order = require_same_order
        self._roots = [bucket for bucket in self._buckets if bucket.is_root]
        self._backward = backward
        self._prefetch_numel = prefetch_numel
        self._num_users = dict.fromkeys(self._buckets, 0)
        self._uses_left = dict.fromkeys(self._buckets, 0)  # forwards that a backward has not passed yet
        self._whole: dict[Bucket, None] = {}  # few of many: what is whole now, in order of its gather
        self._under_way: dict[Bucket, Handle] = {}
        self._plans: dict[bool, list[Bucket]] = {True: [], False: []}
        self._plan: list[Bucket] | None = None
        self.order: list[Bucket] = []
        self._used = _by_module(buckets)
        self._hooks = [hook for module, used in self._used.items() for hook in self._register(module, used)]
        if self._buckets:
            forward.listen(on_begin=self._on_forward_begin, on_end=self._on_forward_end)
            backward.listen(on_end=self._on_backward_end, on_abort=self._on_backward_end)

    def exchange(self, old: Bucket, new: Sequence[tuple[Bucket, BucketPlan]]) -> None:
        """Let buckets take the place of one that holds the same parameters; no gather may be under way.

        A bucket is held by whoever has held the old one. Hooks stay where they are: each has a list of the
        buckets its module uses, and so have the hooks on what the module has returned.
        """
        if old not in self._num_users:
            return
        buckets = [bucket for bucket, _ in new]
        self._unit_of.pop(old)
        self._whole.pop(old, None)
        num_users, uses_left = self._num_users.pop(old), self._uses_left.pop(old)
        for bucket, plan in new:
            self._unit_of[bucket] = plan.modules[0]
            self._num_users[bucket], self._uses_left[bucket] = num_users, uses_left
        for table in (self._buckets, self._roots, self.order, *self._plans.values()):
            _replace(table, old, buckets)
        for module, used in self._used.items():
            _replace(used, old, [bucket for bucket, plan in new if module in plan.modules])
        for bucket in buckets if num_users else ():
            self._gather(bucket)

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
        self.hold(self._roots)

    def _on_forward_end(self) -> None:
        self.let_go(self._roots)
        if not torch.is_grad_enabled():
            order = [bucket.name for bucket in self.order]
            self._end_pass(grad_enabled=False)
            self._require_same_order(order)

    def _on_backward_end(self) -> None:
        self.reshard_idle()
        self._end_pass(grad_enabled=True)

    def order_digest(self) -> bytes:
        """Return 8 bytes that stand for what was gathered in this pass, in order; ranks must agree."""
        order = ",".join(str(bucket.index) for bucket in self.order)
        return hashlib.blake2b(order.encode(), digest_size=8).digest()

    # -- holding --

    def hold(self, buckets: Sequence[Bucket]) -> None:
        """Make buckets whole, and keep them so until `let_go` has been called as often. Collective."""
        for bucket in buckets:
            self._num_users[bucket] += 1
            self._make_whole(bucket)

    def let_go(self, buckets: Sequence[Bucket]) -> None:
        """Undo one `hold`; a bucket that nobody holds is resharded, unless a backward needs it soon."""
        in_backward = compat.is_in_backward()
        for bucket in buckets:
            self._num_users[bucket] -= 1
            stays = bucket.is_root and torch.is_grad_enabled()
            if bucket.is_whole and not (self._num_users[bucket] or stays or in_backward):
                self._reshard(bucket)

    @contextmanager
    def all_whole(self) -> Iterator[None]:
        """Make everything whole for a block of code, outside of any pass. Collective."""
        for bucket in self._buckets:
            self._num_users[bucket] += 1
            if not bucket.is_whole:
                self._gather(bucket)
        try:
            yield
        finally:
            for bucket in self._buckets:
                self._num_users[bucket] -= 1
                if bucket.is_whole and not self._num_users[bucket]:
                    self._reshard(bucket)

    def reshard_idle(self) -> None:
        """Reshard every bucket that nobody holds, and let go of what was gathered ahead."""
        self._drop_under_way()
        for bucket in self._buckets:
            if bucket.is_whole and not self._num_users[bucket]:
                self._reshard(bucket)

    # -- gathering --

    def _make_whole(self, bucket: Bucket) -> None:
        if bucket.is_whole:
            return
        self._follow_plan(bucket)
        if compat.is_in_backward():
            self._make_room(bucket)
        elif torch.is_grad_enabled():
            self._uses_left[bucket] += 1
        self._gather(bucket)
        self.order.append(bucket)
        self._gather_ahead()

    def _gather(self, bucket: Bucket) -> None:
        handle = self._under_way.pop(bucket, None) or bucket.start_unshard()
        bucket.finish_unshard(handle)
        self._whole[bucket] = None

    def _reshard(self, bucket: Bucket) -> None:
        del self._whole[bucket]
        bucket.reshard()

    def _make_room(self, wanted: Bucket) -> None:
        """Let go of the units a backward has passed. See [Note: When a bucket may go]."""
        unit = self._unit_of[wanted]
        for bucket in list(self._whole):
            if bucket.is_root or self._num_users[bucket] or self._unit_of[bucket] is unit:
                continue
            self._uses_left[bucket] -= 1
            if self._uses_left[bucket] <= 0:
                self._on_passed(bucket)
            self._reshard(bucket)

    def _follow_plan(self, bucket: Bucket) -> None:
        """Check the plan against what is really needed; a plan that has gone wrong is dropped quietly."""
        if not self.order:
            self._plan = self._plans[torch.is_grad_enabled()]
        position = len(self.order)
        if self._plan is not None and (position >= len(self._plan) or self._plan[position] is not bucket):
            self._plan = None
            ahead = self._under_way.pop(bucket, None)
            self._drop_under_way()
            if ahead is not None:
                self._under_way[bucket] = ahead

    def _gather_ahead(self) -> None:
        """Start gathering the next bucket of the plan, so that it travels while this one computes."""
        position = len(self.order)
        if self._plan is None or position >= len(self._plan) or self._under_way:
            return
        bucket = self._plan[position]
        if not bucket.is_whole and bucket.layout.padded_numel <= self._prefetch_numel:
            self._under_way[bucket] = bucket.start_unshard()

    def _drop_under_way(self) -> None:
        under_way, self._under_way = self._under_way, {}
        for bucket, handle in under_way.items():
            bucket.drop_gather(handle)

    def _end_pass(self, grad_enabled: bool) -> None:
        self._drop_under_way()
        self._plans[grad_enabled] = self.order
        self.order = []
        self._uses_left = dict.fromkeys(self._buckets, 0)

    # -- helpers --

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
