"""One bucket: a flat buffer of parameters, this rank's shard of it, and their gradients (bucket_grads.py).

All that a bucket stores and moves is one flat tensor; everything above this file sees slices of named
parameters. The lifecycle decides when it is whole, the reducer when its gradients are reduced, the optimizer
when its shard changes. A bucket does not know which stage or which hook calls it. See [Note: Freed
parameters] in placeholder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zero_strategy.bucket_grads import BucketGrads
from zero_strategy.bucketing import BucketPlan
from zero_strategy.buffers import empty_flat, free_storage, restore_storage, views_of
from zero_strategy.comm.collectives import Collectives, Handle
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.comm.ordered import as_bytes
from zero_strategy.compat import get_versions, give_memory, set_versions
from zero_strategy.errors import ShardingError
from zero_strategy.gradient_wire import GradWire
from zero_strategy.late import late_class
from zero_strategy.layout import BucketLayout
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
        self._late_classes: list[type[nn.Parameter]] = []
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
        else:
            self._shown_versions = get_versions(self.params)

    def was_written(self) -> bool:
        """Tell whether somebody has written a whole parameter in place since this was last asked or `show`.

        As autograd counts: a write by way of `.data` does not show.
        """
        before, self._shown_versions = self._shown_versions, get_versions(self.params)
        return before != self._shown_versions

    def free(self) -> None:
        """Point the parameters at placeholders.

        What autograd saved of them keeps pointing at the flat buffer. Other versions make it refuse those
        while the buffer is gone; `show` brings the old versions back.
        """
        self._versions = get_versions(self.params)
        self._hide(self._freed_classes)
        set_versions(self.params, [FREED_VERSION] * len(self.params))

    def delay(self, arrive: Callable[[], None]) -> None:
        """Let the parameters wait for their values when they are used. See late.py.

        Args:
            arrive: Waits, and calls `show`. The same each time.
        """
        if not self._late_classes:
            late = {kind: late_class(kind, arrive) for kind in set(self._classes)}
            self._late_classes = [late[kind] for kind in self._classes]
        self._hide(self._late_classes)

    def _hide(self, classes: Sequence[type[nn.Parameter]]) -> None:
        if not self._placeholders:
            source = placeholder(self._views[0].dtype, self._views[0].device)
            self._placeholders = [source.expand(view.shape) for view in self._views]
        for param, stand_in, kind in zip(self.params, self._placeholders, classes, strict=True):
            param.data = stand_in
            param.__class__ = kind

    def find_unbound(self) -> int | None:
        """Return the first whole parameter that no longer has the memory that `show` gave it, or None."""
        for index, (param, view) in enumerate(zip(self.params, self._views, strict=True)):
            if (param.data_ptr() != view.data_ptr() and view.numel()) or param.dtype is not view.dtype:
                return index
        return None

    def note_write(self, is_whole: bool) -> None:
        """Tell autograd that the values have changed, as an in-place update by a plain optimizer would."""
        if is_whole:
            set_versions(self.params, [version + 1 for version in get_versions(self.params)])
            self._shown_versions = [version + 1 for version in self._shown_versions]
        else:
            self._versions = [version + 1 for version in self._versions]


class Bucket:
    """Parameters that are flattened, sharded and communicated together.

    Attributes:
        index: Position among the engine's buckets; changes when one of them is exchanged.
        name, unit, policy, trainable, is_root: As in `BucketPlan`.
        layout: Where each parameter lies.
        flat: [padded_numel] param_dtype; whole buffer. Its storage is empty while the bucket is sharded.
        param_shard: [owned_numel] param_dtype; this rank's own part, a range of `flat` unless parameters are
            sharded.
        owned_numel: Elements of `param_shard`: one shard, or all, where the optimizer state is whole.
        slices: What of each parameter lies in `param_shard`. All of it, where the optimizer state is whole.
        state: The parameters, and which of their faces they show.
        is_whole: Whether the parameters are views of `flat`; else they are placeholders.
        grads: The gradients.
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
        self.unit = plan.unit
        self.policy = plan.policy
        self.trainable = plan.trainable
        self.is_root = plan.is_root
        self._collectives = collectives
        shapes = [(fqn, tuple(param.shape)) for fqn, param in zip(plan.fqns, plan.params, strict=True)]
        self.layout = BucketLayout.build(shapes, collectives.world_size, plan.dtype.itemsize)
        self.flat = empty_flat(self.layout.padded_numel, plan.dtype, device)
        self.state = ParamState(plan.params, views_of(self.flat, self.layout), names)
        own = self.layout.own_part(collectives.rank, is_cut=plan.policy.shard_optim)
        self._own, self.slices = own
        self.owned_numel = len(self._own)
        self.param_shard = self._own_range(self.flat)
        self.is_whole = True
        self._was_written = False  # by modules, and so far unknown to the masters
        # Invariant: parameters get memory one bucket at a time, until `adopt`, as the user's is let go of.
        free_storage(self.flat)
        self._room: Tensor | None = None  # [padded_numel]; where parameters move to, until `adopt` ends
        self.grads = BucketGrads(
            plan.name,
            self.layout,
            plan.policy,
            collectives,
            own=own,
            like=self.flat,
            wire=wire,
        )

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
        if self._room is None:
            if any(param.dtype != self.flat.dtype for param in self.params):
                self._room = empty_flat(self.layout.padded_numel, torch.float32, self.flat.device)
            else:
                restore_storage(self.flat)
                self._room = self.flat
        return views_of(self._room, self.layout)

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
        self._room = None  # nobody holds the values from before rounding any more
        if self.policy.shard_params:
            self.param_shard = self.param_shard.clone()
            self._free()
        return source

    def room_for_own(self) -> Tensor:
        """Allocate memory for this rank's part alone, to be filled and given to `adopt_own`.

        Returns:
            [owned_numel] zeros, in fp32 if the parameters are to be rounded.
        """
        if any(param.dtype != self.flat.dtype for param in self.params):
            return empty_flat(self.owned_numel, torch.float32, self.flat.device).zero_()
        if self.policy.shard_params:
            return empty_flat(self.owned_numel, self.flat.dtype, self.flat.device).zero_()
        restore_storage(self.flat)
        return self._own_range(self.flat).zero_()

    def adopt_own(self, own: Tensor) -> Tensor | None:
        """Take over values of which every rank has its part, for parameters on meta. Collective.

        Args:
            own: From `room_for_own`, filled.

        Returns:
            As `adopt`.
        """
        is_rounded = own.dtype != self.flat.dtype
        if self.policy.shard_params:
            self.param_shard = own.to(self.flat.dtype) if is_rounded else own
            stand_in = placeholder(self.flat.dtype, self.flat.device)
            for param in self.params:
                give_memory(param, stand_in.expand(param.shape))
            self.state.free()
            self.is_whole = False
            return own if is_rounded else None
        if is_rounded:
            restore_storage(self.flat)
            self.param_shard.copy_(own)
        if self.policy.shard_optim:
            self._collectives.all_gather(self.flat, self.name).wait()
        for param, view in zip(self.params, self.views(self.flat), strict=True):
            give_memory(param, view)
        self.state.show()
        return own if is_rounded else None

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
                self._was_written = True
            self._free()

    def pop_written(self) -> bool:
        """Tell whether modules have written their weights in place since this was last asked."""
        if self.is_whole and not self.policy.shard_params and self.state.was_written():
            self._was_written = True
        was_written, self._was_written = self._was_written, False
        return was_written

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
        for spec, param, view in zip(self.layout.params, self.params, self.views(self.flat), strict=True):
            if param.shape != view.shape:
                raise _resized(spec.fqn, param.shape, view.shape)
            if param.data_ptr() != view.data_ptr():
                view.copy_(param.data)
        self.state.show()
        self._collectives.broadcast(self.flat)
        if self.policy.shard_params:
            self.param_shard.copy_(self._own_range(self.flat))
        self.state.note_write(is_whole=True)

    def take_rank_0s(self) -> bool:
        """Give all ranks rank 0's whole parameters; tell whether this rank's were others. Collective."""
        before = self.flat.clone()
        self._collectives.broadcast(self.flat)
        return not torch.equal(as_bytes(before), as_bytes(self.flat))

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

    def gather_shards_to_first(self, shard: Tensor) -> Tensor | None:
        """As `gather_shards`, on rank 0; on the others None where that takes a gather. Collective."""
        return self._collectives.gather_to_first(shard, self.name) if self.policy.shard_optim else shard

    def find_unbound(self) -> str | None:
        """Return the name of a parameter that is not where the bucket has put it; None if all are there."""
        index = self.state.find_unbound() if self.is_whole else None  # a placeholder cannot be elsewhere
        return None if index is None else self.layout.params[index].fqn

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's values in a whole flat buffer of this layout."""
        return views_of(flat, self.layout)

    def memory(self) -> MemoryUse:
        """Return the bytes held here: parameters and gradients, padding included and named."""
        whole_bytes = self.flat.untyped_storage().nbytes()
        kept = self.param_shard if self.policy.shard_params else self.flat
        if self._room is not None:
            wide_bytes = self._room.nbytes if self._room is not self.flat else 0
            return MemoryUse(unsharded=whole_bytes + wide_bytes)
        if not kept.untyped_storage().nbytes():
            return MemoryUse()  # no parameter has moved in
        use = MemoryUse(params=kept.nbytes)
        if self.policy.shard_params:
            use.unsharded = whole_bytes
        held_numel = self.owned_numel if self.policy.shard_params else self.layout.padded_numel
        used = self.slices if self.policy.shard_params else self.layout.slices(0, self.layout.num_shards)
        padding_numel = held_numel - sum(piece.numel for piece in used)
        use.padding = padding_numel * self.flat.element_size()
        use.add(self.grads.memory())
        return use

    # -- helpers --

    def _fill_flat(self, is_agreed: bool) -> Tensor | None:
        """Write rank 0's values into the flat buffer; return what this rank owns, if it was rounded."""
        places = self.make_room()
        target = self._room
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
        return flat[self._own.start : self._own.stop]

    def _free(self) -> None:
        self.state.free()
        self.is_whole = False
        free_storage(self.flat)


def publish_all(buckets: Sequence[Bucket]) -> None:
    """Make whole parameters agree with shards that have been written, and wait. Collective."""
    for handle in [bucket.start_publish() for bucket in buckets]:
        if handle is not None:
            handle.wait()


def _resized(fqn: str, found: torch.Size, wanted: torch.Size) -> ShardingError:
    return ShardingError(
        what=f"Parameter {fqn!r} has the shape {tuple(found)}, and had {tuple(wanted)} when it was sharded.",
        why="Its place in the shards, the masters and the optimizer is of that size.",
        fix="Resize the model (resize_token_embeddings) before sharding it, or save whole weights and build "
        "another engine for the new model.",
    )
