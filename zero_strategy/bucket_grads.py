"""The gradients of one bucket, on their way from autograd to this rank's shard of the mean.

Stashed parameter by parameter into a whole flat buffer, reduced in one piece, and then held as the shard that
the optimizer reads. The reducer decides when; nothing here knows an order of buckets, a backward or a hook.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zero_strategy.bucketing import BucketPolicy
from zero_strategy.buffers import Cuts, empty_flat
from zero_strategy.comm.collectives import Collectives, Handle
from zero_strategy.comm.ledger import MemoryUse
from zero_strategy.errors import ShardingError
from zero_strategy.gradient_wire import GradWire
from zero_strategy.layout import BucketLayout, OwnPart, ShardSlice
from zero_strategy.log import span


class BucketGrads:
    """What a bucket knows of its gradients.

    Attributes:
        dtype: Of `shard`.
        wire_dtype: In which gradients travel, unless they have accumulated in another dtype.
        full: [padded_numel] param_dtype (`dtype` while it accumulates) or None; gradients of this rank, until
            they are reduced.
        shard: [owned_numel] `dtype` or None; mean over ranks, sum of this step's micro-batches.
        stashed: Which parameters have one in `full`.
        has_grad: Which parameters have one on some rank since `clear()`.
    """

    def __init__(
        self,
        name: str,
        layout: BucketLayout,
        policy: BucketPolicy,
        collectives: Collectives,
        *,
        own: OwnPart,
        like: Tensor,
        wire: GradWire,
    ) -> None:
        """Begin with no gradients.

        Args:
            name: The bucket's, for messages.
            layout: Where each parameter lies.
            policy: What of them is sharded.
            collectives: For reductions.
            own: What of the bucket this rank owns.
            like: Has the parameters' dtype, which is that of what autograd delivers, and their device.
            wire: How they accumulate and travel.
        """
        self._name = name
        self._layout = layout
        self._policy = policy
        self._collectives = collectives
        self._own, self._pieces = own
        self._param_dtype, self._device = like.dtype, like.device
        self._wire = wire
        self.dtype = wire.accum_dtype or like.dtype
        self.wire_dtype = wire.wire_dtype or like.dtype
        whole = ((param.start, param.numel) for param in layout.params)
        self._whole_cuts = Cuts(whole, layout.padded_numel)
        self._shard_cuts = Cuts(((piece.shard_start, piece.numel) for piece in self._pieces), len(self._own))
        self.full: Tensor | None = None
        self.shard: Tensor | None = None
        self._places: list[Tensor] = []  # each parameter's part of `full`, in its shape
        self._gaps: list[Tensor] = []
        self._reducing: tuple[Tensor, ...] = ()  # gradients and mean of a reduction under way
        self.stashed = [False] * len(layout.params)
        self.has_grad = [False] * len(layout.params)

    # -- from autograd to the shard --

    def stash(self, index: int, grad: Tensor, *, accumulates: bool = False) -> None:
        """Add a parameter's gradient to the whole buffer.

        Args:
            index: Which parameter of the bucket.
            grad: Its gradient, of the parameter's shape; free to be dropped afterwards.
            accumulates: Whether more backwards will add to it before it is reduced: then it is kept, and
                travels, in `dtype`.

        Raises:
            ShardingError: The gradient is sparse.
        """
        if grad.is_sparse:
            raise self._is_sparse(index)
        if self.full is None:
            self._begin(self.dtype if accumulates else self._param_dtype)
        values = grad.detach() if grad.requires_grad else grad
        if self.stashed[index]:
            self._places[index].add_(values)
        else:
            self._places[index].copy_(values)
            self.stashed[index] = True

    def start_reduce(self) -> Handle:
        """Start averaging the stashed gradients over all ranks; parameters without one here contribute zeros.

        Shapes:
            full [padded_numel], travelling as `GradWire` says -> mean of this rank's range [shard_numel]
            (whole at stage 0)
        Source: ZeRO, arXiv:1910.02054, section 5.2 (gradient partitioning).
        """
        with span("ZeRO::reduce", self._name):
            full = self.full if self.full is not None else self._begin(self._param_dtype)
            pairs = zip(self._places, self.stashed, strict=True)
            unwritten = self._gaps + [place for place, stashed in pairs if not stashed]
            if unwritten:
                torch._foreach_zero_(unwritten)
            self._reducing = (full,)
            self._forget_full()  # a gradient that comes in late must not land in a buffer under way
            mean = self._mean_target(full)
            shard = mean if self._policy.shard_optim else self._rank_range(mean)
            packed = self._wire.pack(full)
            self._reducing = (packed, mean)
            divisor = self._wire.divide_after
            handle = self._collectives.reduce_scatter_mean(packed, shard, self._name, divisor=divisor)
            return Handle([], lambda: self._accept(handle, mean))

    def clear(self, indices: set[int] | None = None, *, keep_zeros: bool = False) -> None:
        """Forget gradients: reduced, and stashed under `no_sync`.

        Args:
            indices: Which parameters of the bucket; None for all.
            keep_zeros: Leave zeros where there were gradients, which an optimizer steps all the same.
        """
        indices = set(range(len(self.has_grad))) if indices is None else indices
        if len(indices) == len(self.has_grad) and not keep_zeros:
            self._forget_full()
            self.shard = None
            self.has_grad = [False] * len(self.has_grad)
            return
        for piece in self._pieces:
            if self.shard is not None and piece.param_index in indices:
                self._slice(self.shard, piece).zero_()
        for index in indices:
            if not keep_zeros:
                self.has_grad[index] = self.stashed[index] = False
            elif self.stashed[index]:
                self._places[index].zero_()

    def note_used(self, used: Sequence[bool]) -> None:
        """Note which parameters have had a gradient on some rank."""
        self.has_grad = [a or b for a, b in zip(self.has_grad, used, strict=True)]

    def multiply(self, factor: float) -> None:
        """Multiply what there is, reduced and stashed: the loss scale has changed under it."""
        for grads in (self.full, self.shard):
            if grads is not None:
                grads.mul_(factor)

    # -- queries --

    def has_any(self) -> bool:
        """Whether there is any gradient, reduced or stashed."""
        return any(self.has_grad) or any(self.stashed)

    def by_slice(self) -> list[Tensor | None]:
        """Return the reduced gradient of each slice, [slice.numel] `dtype`; None for what no rank used."""
        if self.shard is None:
            return [None] * len(self._pieces)
        pairs = zip(self._shard_cuts.inside(self.shard), self._pieces, strict=True)
        return [grad if self.has_grad[piece.param_index] else None for grad, piece in pairs]

    def own(self, indices: set[int]) -> Iterator[Tensor]:
        """Yield the reduced gradients of some parameters within this rank's range; ranks never overlap."""
        if self.shard is None:
            return
        shard = self.shard if self._policy.shard_optim else self._rank_range(self.shard)
        for piece in self._layout.slices(self._collectives.rank):
            if piece.param_index in indices and self.has_grad[piece.param_index]:
                yield self._slice(shard, piece)

    def memory(self) -> MemoryUse:
        """Return the bytes held here, padding included and named."""
        use = MemoryUse()
        held = (grad for grad in (self.full, self.shard, *self._reducing) if grad is not None)
        for grad in {grad.untyped_storage().data_ptr(): grad for grad in held}.values():
            nbytes = grad.untyped_storage().nbytes()
            numel = nbytes // grad.element_size()
            is_shard = numel == len(self._own) and self._policy.shard_optim
            used = sum(piece.numel for piece in self._pieces) if is_shard else self._layout.numel
            use.grads += nbytes
            use.padding += (numel - used) * grad.element_size()
        return use

    # -- helpers --

    def _begin(self, dtype: torch.dtype) -> Tensor:
        """Allocate the whole buffer."""
        shard = self.shard
        if shard is not None and shard.untyped_storage().nbytes() > shard.nbytes:
            # A second reduction before the step: the mean of the first moves out of its whole buffer.
            self.shard = shard.clone()
        self.full = empty_flat(self._layout.padded_numel, dtype, self._device)
        flat_places, self._gaps = self._whole_cuts(self.full)
        pairs = zip(flat_places, self._layout.params, strict=True)
        self._places = [place.view(param.shape) for place, param in pairs]
        return self.full

    def _forget_full(self) -> None:
        self.full, self._places, self._gaps = None, [], []
        self.stashed = [False] * len(self.stashed)

    def _mean_target(self, full: Tensor) -> Tensor:
        """Return where the mean goes: in place where whole gradients are kept, else a new tensor."""
        if not self._policy.shard_grads and self.dtype == full.dtype:
            return full[self._own.start : self._own.stop]
        return empty_flat(len(self._own), self.dtype, full.device)

    def _accept(self, handle: Handle, mean: Tensor) -> None:
        handle.wait()
        self._reducing = (mean,)
        if not self._policy.shard_optim:
            self._collectives.all_gather(mean, self._name).wait()
        if self.shard is None:
            self.shard = mean
        else:
            self.shard.add_(mean)
        self._reducing = ()

    def _rank_range(self, flat: Tensor) -> Tensor:
        start = self._collectives.rank * self._layout.shard_numel
        return flat[start : start + self._layout.shard_numel]

    def _slice(self, shard: Tensor, piece: ShardSlice) -> Tensor:
        return shard[piece.shard_start : piece.shard_start + piece.numel]

    def _is_sparse(self, index: int) -> ShardingError:
        return ShardingError(
            what=f"Parameter {self._layout.params[index].fqn!r} got a sparse gradient.",
            why="A sparse gradient cannot be reduced into a flat buffer.",
            fix="Use a dense operation (nn.Embedding(sparse=False)).",
        )
