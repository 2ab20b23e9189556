"""One bucket: a flat buffer of parameters, this rank's shard of it, and gradients on their way to the shard.

All that a bucket stores and moves is one flat tensor; everything above this file sees slices of named
parameters. The lifecycle decides when it is whole, the reducer when its gradients are reduced, the optimizer
when its shard changes. A bucket does not know which stage or which hook calls it. See [Note: Freed
parameters] in placeholder.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from zero_strategy.bucketing import BucketPlan
from zero_strategy.buffers import empty_flat, free_storage, restore_storage, views_of
from zero_strategy.comm.collectives import Collectives, Handle
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.compat import get_versions, set_versions
from zero_strategy.errors import ShardingError
from zero_strategy.gradient_wire import GradWire
from zero_strategy.layout import BucketLayout, ShardSlice
from zero_strategy.log import span
from zero_strategy.placeholder import freed_class, placeholder

FREED_VERSION = 1 << 30  # no weight is written that often: a version that nothing was ever saved under


class ParamState:
    """The parameters of a bucket and the two faces they have: views of the flat buffer, or placeholders."""

    def __init__(self, params: Sequence[nn.Parameter], views: list[Tensor], names: dict[int, str]) -> None:
        self.params = params
        self._views = views
        self._classes = [type(param) for param in params]
        freed = {kind: freed_class(kind, names) for kind in set(self._classes)}
        self._freed_classes = [freed[kind] for kind in self._classes]
        self._placeholders: list[Tensor] = []
        self._versions: list[int] = []
        self._shown_versions: list[int] = []

    def show(self) -> None:
        """Point the parameters at the flat buffer."""
        for param, view, kind in zip(self.params, self._views, self._classes, strict=True):
            param.__class__ = kind  # first: a freed class answers for every attribute, at a price
            param.data = view
        if self._versions:
            set_versions(self.params, self._versions)
            self._shown_versions, self._versions = self._versions, []

    def was_written(self) -> bool:
        """Tell whether somebody has written a whole parameter in place since `show`, as autograd counts."""
        return bool(self._shown_versions) and self._shown_versions != get_versions(self.params)

    def free(self) -> None:
        """Point the parameters at placeholders.

        What autograd saved of them keeps pointing at the flat buffer. Other versions make it refuse those
        while the buffer is gone; `show` brings the old versions back.
        """
        if not self._placeholders:
            source = placeholder(self._views[0].dtype, self._views[0].device)
            self._placeholders = [source.expand(view.shape) for view in self._views]
        self._versions = get_versions(self.params)
        for param, stand_in, kind in zip(self.params, self._placeholders, self._freed_classes, strict=True):
            param.data = stand_in
            param.__class__ = kind
        set_versions(self.params, [FREED_VERSION] * len(self.params))

    def is_bound(self, index: int) -> bool:
        """Tell whether a whole parameter still has the memory that `show` gave it."""
        param, view = self.params[index], self._views[index]
        return param.dtype == view.dtype and (not view.numel() or param.data_ptr() == view.data_ptr())

    def note_write(self, is_whole: bool) -> None:
        """Tell autograd that the values have changed, as an in-place update by a plain optimizer would."""
        if is_whole:
            set_versions(self.params, [version + 1 for version in get_versions(self.params)])
        else:
            self._versions = [version + 1 for version in self._versions]


class Bucket:
    """Parameters that are flattened, sharded and communicated together.

    Attributes:
        index: Position among the engine's buckets; changes when one of them is exchanged.
        layout: Where each parameter lies.
        flat: [padded_numel] param_dtype; whole buffer. Its storage is empty while the bucket is sharded.
        param_shard: [owned_numel] param_dtype; this rank's own part, a range of `flat` unless parameters are
            sharded.
        slices: What of each parameter lies in `param_shard`. All of it, where the optimizer state is whole.
        full_grad: [padded_numel] param_dtype (grad_dtype while it accumulates) or None; gradients of this
            rank, until they are reduced.
        grad_shard: [owned_numel] grad_dtype or None; mean over ranks, sum of this step's micro-batches.
        has_grad: Which parameters have a gradient on some rank since `clear_grads()`.
    """

    def __init__(
        self,
        index: int,
        plan: BucketPlan,
        collectives: Collectives,
        *,
        device: torch.device,
        names: dict[int, str],
        wire: GradWire,
    ) -> None:
        """Lay the parameters out in a flat buffer, empty as yet: `adopt` moves their values there.

        Args:
            index: Position among the engine's buckets.
            plan: Which parameters, and what is sharded of them.
            collectives: For gathers and reductions.
            device: Where the shards live.
            names: Fully qualified name by `id` of the parameter, for the errors of placeholders.
            wire: How gradients accumulate and travel.
        """
        self.index = index
        self.name = plan.name
        self.policy = plan.policy
        self.trainable = plan.trainable
        self.is_root = plan.is_root
        self._collectives = collectives
        shapes = [(fqn, tuple(param.shape)) for fqn, param in zip(plan.fqns, plan.params, strict=True)]
        self.layout = BucketLayout.build(shapes, collectives.world_size, plan.dtype.itemsize)
        self._wire = wire
        self.flat = empty_flat(self.layout.padded_numel, plan.dtype, device)
        self.state = ParamState(plan.params, views_of(self.flat, self.layout), names)
        own_shards = (collectives.rank, 1) if plan.policy.shard_optim else (0, self.layout.num_shards)
        self.slices: tuple[ShardSlice, ...] = self.layout.slices(*own_shards)
        self.owned_numel = own_shards[1] * self.layout.shard_numel
        self.param_shard = self._own_range(self.flat)
        self.is_whole = True
        # Invariant: parameters get memory one bucket at a time, until `adopt`, as the user's is let go of.
        free_storage(self.flat)
        self._arriving: Tensor | None = None  # [padded_numel]; what parameters move to, until `adopt` ends
        self.full_grad: Tensor | None = None
        self.grad_shard: Tensor | None = None
        self._reducing: tuple[Tensor, ...] = ()  # gradients and mean of a reduction under way
        self.has_grad = [False] * len(plan.params)
        self.stashed = [False] * len(plan.params)

    @property
    def grad_dtype(self) -> torch.dtype:
        """The dtype of `grad_shard`."""
        return self._wire.accum_dtype or self.flat.dtype

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype in which gradients travel, unless they have accumulated in another."""
        return self._wire.wire_dtype or self.flat.dtype

    @property
    def params(self) -> Sequence[nn.Parameter]:
        """The user's parameters."""
        return self.state.params

    # -- construction --

    def make_room(self) -> list[Tensor]:
        """Allocate the memory that `adopt` moves parameters to, if that was not done yet.

        Returns:
            Each parameter's place in it. One that has no memory of its own may get it there, and is then not
            copied.
        """
        if self._arriving is None:
            if any(param.dtype != self.flat.dtype for param in self.params):
                self._arriving = empty_flat(self.layout.padded_numel, torch.float32, self.flat.device)
            else:
                restore_storage(self.flat)
                self._arriving = self.flat
        return views_of(self._arriving, self.layout)

    def adopt(self, *, is_agreed: bool = False) -> Tensor | None:
        """Move the parameters' values into the bucket, make them equal on all ranks, and shard them.

        Args:
            is_agreed: Whether all ranks hold the same values already, as those of another bucket.

        Returns:
            [owned_numel] fp32, this rank's part of the values before they were rounded to a 16-bit dtype;
            None if nothing was rounded.
        """
        source = self._fill_flat(is_agreed)
        self.state.show()
        self._arriving = None  # nobody holds the values from before rounding any more
        if self.policy.shard_params:
            self.param_shard = self.param_shard.clone()
            self._free()
        return source

    # -- parameters --

    def start_unshard(self) -> Handle:
        """Start gathering the parameters; they can be used after `finish_unshard`.

        Shapes:
            param_shard [shard_numel] -> flat [padded_numel]
        Source: ZeRO, arXiv:1910.02054, section 5.3; storage re-allocated in place as in PyTorch FSDP,
            arXiv:2304.11277.
        """
        assert not self.is_whole, f"bucket {self.name} is whole already"
        with span("ZeRO::unshard", self.name):
            restore_storage(self.flat)
            self._own_range(self.flat).copy_(self.param_shard)
            return self._collectives.all_gather(self.flat, self.name)

    def finish_unshard(self, handle: Handle) -> None:
        """Wait for the gather and point the parameters at their values."""
        handle.wait()
        self.state.show()
        self.is_whole = True

    def reshard(self, *, keep_written: bool = True) -> None:
        """Let go of the whole parameters; what autograd saved of them is valid again once they are back.

        Args:
            keep_written: Take what the model itself has written in place (a codebook, a clamped weight) into
                the shard. Writes by way of `.data` do not show.
        """
        assert self.is_whole, f"bucket {self.name} is sharded already"
        with span("ZeRO::reshard", self.name):
            if keep_written and self.state.was_written():
                self.param_shard.copy_(self._own_range(self.flat))
            self._free()

    def drop_gather(self, handle: Handle) -> None:
        """Let go of a gather that turned out not to be needed."""
        handle.wait()
        free_storage(self.flat)

    @property
    def publishes(self) -> bool:
        """Whether a changed shard has to be gathered: the parameters are whole, and updated in parts."""
        return self.is_whole and self.policy.shard_optim

    def start_publish(self, part: range | None = None) -> Handle | None:
        """After `param_shard` has changed: start making the whole parameters, where they stay, agree with it.

        Args:
            part: Which elements of every rank's shard; None for all.

        Shapes:
            param_shard [shard_numel] -> flat [padded_numel], in place
        """
        self.state.note_write(self.is_whole)
        if not self.publishes:
            return None
        with span("ZeRO::publish", self.name):
            if self.policy.shard_params:
                self._own_range(self.flat).copy_(self.param_shard)
            return self._collectives.all_gather(self.flat, self.name, part=part)

    def take_written(self) -> None:
        """Keep what somebody has written into the whole parameters, rank 0's on all ranks. Collective.

        A parameter whose `.data` was rebound (PEFT merges adapters so) counts as written.
        """
        for param, view in zip(self.params, self.views(self.flat), strict=True):
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.data)
        self.state.show()
        self._collectives.broadcast(self.flat)
        if self.policy.shard_params:
            self.param_shard.copy_(self._own_range(self.flat))
        self.state.note_write(is_whole=True)

    # -- gradients --

    def stash(self, index: int, grad: Tensor, *, accumulates: bool = False) -> None:
        """Add a parameter's gradient to the flat gradient buffer.

        Args:
            index: Which parameter of the bucket.
            grad: Its gradient, of the parameter's shape; free to be dropped afterwards.
            accumulates: Whether more backwards will add to it before it is reduced: then it is kept, and
                travels, in `grad_dtype`.

        Raises:
            ShardingError: The gradient is sparse.
        """
        if grad.is_sparse:
            raise ShardingError(
                what=f"Parameter {self.layout.params[index].fqn!r} got a sparse gradient.",
                why="A sparse gradient cannot be reduced into a flat buffer.",
                fix="Use a dense operation (nn.Embedding(sparse=False)).",
            )
        target = self._grad_range(self._writable_full_grad(accumulates), index)
        values = grad.detach().reshape(-1)
        if self.stashed[index]:
            target.add_(values)
        else:
            target.copy_(values)
            self.stashed[index] = True

    def start_reduce(self) -> Handle:
        """Start averaging the stashed gradients over all ranks; parameters without one here contribute zeros.

        Shapes:
            full_grad [padded_numel], travelling as `GradWire` says -> mean of this rank's range [shard_numel]
            (whole at stage 0)
        Source: ZeRO, arXiv:1910.02054, section 5.2 (gradient partitioning).
        """
        with span("ZeRO::reduce", self.name):
            full = self._writable_full_grad()
            self.full_grad = None  # a gradient that comes in late must not land in a buffer under way
            for start, numel in self.layout.gaps():
                full[start : start + numel].zero_()
            for index, stashed in enumerate(self.stashed):
                if not stashed:
                    self._grad_range(full, index).zero_()
            self.stashed = [False] * len(self.stashed)
            mean = self._mean_target(full)
            shard = mean if self.policy.shard_optim else self._rank_range(mean)
            packed = self._wire.pack(full)
            self._reducing = (packed, mean)
            divisor = self._wire.divide_after
            handle = self._collectives.reduce_scatter_mean(packed, shard, self.name, divisor=divisor)
            return Handle([], lambda: self._accept(handle, mean))

    def clear_grads(self, indices: set[int] | None = None) -> None:
        """Forget gradients: reduced, and stashed under `no_sync`.

        Args:
            indices: Which parameters of the bucket; None for all.
        """
        if indices is None or len(indices) == len(self.params):
            self.full_grad = self.grad_shard = None
            indices = set(range(len(self.params)))
        for index in indices:
            self.has_grad[index] = self.stashed[index] = False
        for piece in self.slices:
            if self.grad_shard is not None and piece.param_index in indices:
                self.grad_shard[piece.shard_start : piece.shard_start + piece.numel].zero_()

    def multiply_grads(self, factor: float) -> None:
        """Multiply what gradients there are, reduced and stashed: the loss scale has changed under them."""
        for grads in (self.full_grad, self.grad_shard):
            if grads is not None:
                grads.mul_(factor)

    def grad_slice(self, piece: ShardSlice) -> Tensor | None:
        """Return a slice's reduced gradient, [slice.numel] grad_dtype; None if no rank used the parameter."""
        if self.grad_shard is None or not self.has_grad[piece.param_index]:
            return None
        return self.grad_shard[piece.shard_start : piece.shard_start + piece.numel]

    def own_grads(self, indices: set[int]) -> Iterator[Tensor]:
        """Yield the reduced gradients of some parameters within this rank's range; ranks never overlap."""
        if self.grad_shard is None:
            return
        first = 0 if self.policy.shard_optim else self._collectives.rank * self.layout.shard_numel
        for piece in self.layout.slices(self._collectives.rank):
            if piece.param_index in indices and self.has_grad[piece.param_index]:
                start = first + piece.shard_start
                yield self.grad_shard[start : start + piece.numel]

    # -- queries --

    def gather_shards(self, shard: Tensor) -> Tensor:
        """Return the whole flat buffer of which each rank gives its shard. Collective.

        Shapes:
            shard [owned_numel] -> [padded_numel], same dtype
        """
        if not self.policy.shard_optim:
            return shard
        whole = empty_flat(self.layout.padded_numel, shard.dtype, shard.device)
        self._own_range(whole).copy_(shard)
        self._collectives.all_gather(whole, self.name).wait()
        return whole

    def is_bound(self, index: int) -> bool:
        """Tell whether a parameter is where the bucket has put it; a sharded one cannot be elsewhere."""
        return not self.is_whole or self.state.is_bound(index)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's values in a whole flat buffer of this layout."""
        return views_of(flat, self.layout)

    def memory(self) -> MemoryUse:
        """Return the bytes held here: parameters and gradients, padding included and named."""
        whole_bytes = self.flat.untyped_storage().nbytes()
        kept = self.param_shard if self.policy.shard_params else self.flat
        if self._arriving is not None:
            wide_bytes = _nbytes(self._arriving) if self._arriving is not self.flat else 0
            return MemoryUse(unsharded=whole_bytes + wide_bytes)
        if not kept.untyped_storage().nbytes():
            return MemoryUse()  # no parameter has arrived
        use = MemoryUse(params=_nbytes(kept))
        if self.policy.shard_params:
            use.unsharded = whole_bytes
        held = (self.full_grad, self.grad_shard, *self._reducing)
        grads = {grad.untyped_storage().data_ptr(): grad for grad in held if grad is not None}
        use.grads = sum(grad.untyped_storage().nbytes() for grad in grads.values())
        held_numel = self.owned_numel if self.policy.shard_params else self.layout.padded_numel
        used = self.slices if self.policy.shard_params else self.layout.slices(0, self.layout.num_shards)
        padding_numel = held_numel - sum(piece.numel for piece in used)
        use.padding = padding_numel * self.flat.element_size()
        for grad in grads.values():
            numel = grad.untyped_storage().nbytes() // grad.element_size()
            is_shard = numel == self.owned_numel and self.policy.shard_optim
            pieces = self.slices if is_shard else self.layout.slices(0, self.layout.num_shards)
            use.padding += (numel - sum(piece.numel for piece in pieces)) * grad.element_size()
        return use

    # -- helpers --

    def _fill_flat(self, is_agreed: bool) -> Tensor | None:
        """Write rank 0's values into the flat buffer; return what this rank owns, if it was rounded."""
        places = self.make_room()
        target = self._arriving
        assert target is not None, "there is room"
        for start, numel in self.layout.gaps():
            target[start : start + numel].zero_()
        with torch.no_grad():
            for place, param in zip(places, self.params, strict=True):
                if param.data_ptr() != place.data_ptr():
                    place.copy_(param.data)
                param.grad = None  # a gradient from before would never be reduced
        if not is_agreed:
            self._collectives.broadcast(target)
        if target is self.flat:
            return None
        restore_storage(self.flat)
        self.flat.copy_(target)
        return self._own_range(target).clone()

    def _own_range(self, flat: Tensor) -> Tensor:
        start = self._collectives.rank * self.layout.shard_numel if self.policy.shard_optim else 0
        return flat[start : start + self.owned_numel]

    def _rank_range(self, flat: Tensor) -> Tensor:
        start = self._collectives.rank * self.layout.shard_numel
        return flat[start : start + self.layout.shard_numel]

    def _grad_range(self, full: Tensor, index: int) -> Tensor:
        param = self.layout.params[index]
        return full[param.start : param.start + param.numel]

    def _writable_full_grad(self, accumulates: bool = False) -> Tensor:
        """Return the buffer to stash into, allocated if there is none."""
        if self.full_grad is None:
            shard = self.grad_shard
            if shard is not None and shard.untyped_storage().nbytes() > _nbytes(shard):
                # A second reduction before the step: the mean of the first moves out of its whole buffer.
                self.grad_shard = shard.clone()
            dtype = self.grad_dtype if accumulates else self.flat.dtype
            self.full_grad = empty_flat(self.layout.padded_numel, dtype, self.flat.device)
        return self.full_grad

    def _mean_target(self, full: Tensor) -> Tensor:
        """Return where the mean goes: in place where whole gradients are kept, else a new tensor."""
        if not self.policy.shard_grads and self.grad_dtype == full.dtype:
            return self._own_range(full)
        return empty_flat(self.owned_numel, self.grad_dtype, full.device)

    def _accept(self, handle: Handle, mean: Tensor) -> None:
        handle.wait()
        self._reducing = ()
        if not self.policy.shard_optim:
            self._collectives.all_gather(mean, self.name).wait()
        if self.grad_shard is None:
            self.grad_shard = mean
        else:
            self.grad_shard.add_(mean)

    def _free(self) -> None:
        self.state.free()
        self.is_whole = False
        free_storage(self.flat)


def publish_all(buckets: Sequence[Bucket]) -> None:
    """Make whole parameters agree with shards that have been written, and wait. Collective."""
    for handle in [bucket.start_publish() for bucket in buckets]:
        if handle is not None:
            handle.wait()


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
