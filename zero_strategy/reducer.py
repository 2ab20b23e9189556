"""The gradient side: from autograd's hooks to reduced shards.

A parameter's gradient is stashed in its bucket when autograd has accumulated it; a bucket whose parameters
have all reported is reduced while the backward goes on. At its end the ranks compare notes in one small
message, reduce what is left, and know which parameters had a gradient anywhere. Nothing here may hang because
ranks used different parameters.

[Note: One order of reductions]
All ranks must issue the same reductions in the same order, and none may wait for a rank that waits for it,
while which parameters a rank uses, and when, is its own affair.

Where parameters stay whole, a bucket is reduced when all its parameters have reported, in an agreed order
(reverse registration at first, then rank 0's order of readiness, agreed anew when it changes). A rank that
waits for another's reduction is not waited for in anything else: the other gets to the end of its backward on
its own.

Where parameters are sharded, the gathers of a backward run in one order on all ranks anyway, and the
reductions are tied to it: a unit's buckets are reduced when the backward has passed all of its uses, whether
or not this rank has used all of its parameters.

At the end every rank starts what it has not started, in order, and only then compares notes: which parameters
were used anywhere, and which gradients came in after their bucket had gone. Those are reduced once more.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from zero_strategy import compat
from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan
from zero_strategy.comm.collectives import Collectives, Handle
from zero_strategy.errors import ShardingError
from zero_strategy.log import log_event
from zero_strategy.passes import BackwardPass

_MOST_RANKS = 8  # in a message


class Doings(NamedTuple):
    """What a rank has done that every other must have done too by the end of a backward."""

    gather_order: bytes  # 8 bytes that stand for what it has gathered in this micro-batch, in order
    num_steps: int  # of the engine's optimizers, so far

    def digest(self) -> bytes:
        """Return 8 bytes that stand for both."""
        steps = self.num_steps.to_bytes(8, "little")
        return bytes(one ^ other for one, other in zip(self.gather_order, steps, strict=True))


@dataclass
class _Progress:
    """How far the reductions of one backward have come; lists have an entry per bucket."""

    fired: list[list[int]]  # for each parameter, how often its gradient has come in
    num_missing: list[int]  # parameters whose gradient has not come in as often as expected
    was_stashed: list[list[bool]]  # for each parameter, whether the reduction took a gradient of it
    is_reduced: list[bool]
    is_late: list[bool]  # a gradient came in after the reduction
    ready: list[int]  # positions of the buckets that had all they expected, in that order
    turn: int  # how many of the agreed order have been reduced

    @classmethod
    def of(cls, buckets: Sequence[Bucket]) -> _Progress:
        """Return the state before a backward."""
        return cls(
            fired=[[0] * len(bucket.params) for bucket in buckets],
            num_missing=[len(bucket.params) for bucket in buckets],
            was_stashed=[[] for _ in buckets],
            is_reduced=[False] * len(buckets),
            is_late=[False] * len(buckets),
            ready=[],
            turn=0,
        )


class GradReducer:
    """Stashes gradients, reduces buckets in the agreed order, and settles the rest at the end.

    Attributes:
        is_syncing: False inside `no_sync`.
        took_unscaled: Whether gradients of a loss that should have been scaled have come in: on some rank,
            once ranks have compared notes, on this one since.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        collectives: Collectives,
        backward: BackwardPass,
        *,
        overlap: bool,
        accumulate_whole: bool,
        doings: Callable[[], Doings],
        is_scaled: Callable[[], bool | None],
    ) -> None:
        """Register the hooks.

        Args:
            buckets: All buckets of the engine.
            collectives: For the message at the end of a backward.
            backward: Is told when a backward begins, and tells when it ends.
            overlap: Let a reduction run while the backward goes on.
            accumulate_whole: Keep whole gradients under `no_sync` also where they are sharded.
            doings: Returns what is compared between ranks.
            is_scaled: Whether the backward that ends is that of a scaled loss; None where none needs to be.
        """
        self.is_syncing = True
        self.took_unscaled = False
        self._buckets: list[Bucket] = []  # those that are trainable; a position in this list never changes
        self._frozen: list[Bucket] = []
        self._collectives = collectives
        self._backward = backward
        self._overlap = overlap
        self._doings = doings
        self._is_scaled = is_scaled
        self._accumulate_whole = accumulate_whole
        # Tied to the gathers, or by readiness; see [Note: One order of reductions].
        self._follows_gathers = any(bucket.policy.shard_params for bucket in buckets)
        self._position_of: dict[Bucket, int] = {}
        self._expected: list[list[int]] = []
        self._told_unused = False
        self._under_way: deque[Handle] = deque()
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        for bucket in buckets:
            self._add(bucket)
        self._settle()
        backward.listen(on_end=self._on_backward_end, on_abort=self._on_backward_abort)

    def exchange(self, old: Bucket, new: Sequence[tuple[Bucket, BucketPlan]]) -> None:
        """Let buckets take the place of a frozen one with the same parameters, between two backwards."""
        self._frozen.remove(old)
        for bucket, _ in new:
            self._add(bucket)
        self._settle()

    def _add(self, bucket: Bucket) -> None:
        if not bucket.trainable:
            self._frozen.append(bucket)
            return
        self._position_of[bucket] = len(self._buckets)
        self._buckets.append(bucket)
        self._expected.append([1] * len(bucket.params))
        self._hook(bucket)

    def _hook(self, bucket: Bucket) -> None:
        position = self._position_of[bucket]
        for index, param in enumerate(bucket.params):
            # torch takes the hook only while a gradient is required, and keeps it for when one is again.
            required = param.requires_grad
            param.requires_grad_(True)
            hook = partial(_on_grad, weakref.ref(self), position, index)
            self._hooks.append(param.register_post_accumulate_grad_hook(hook))
            param.requires_grad_(required)

    def _settle(self) -> None:
        """Decide in which order buckets are reduced in the next backward, and whether under `no_sync` too."""
        # What is sharded is reduced in every backward, unless whole gradients are asked for.
        self._may_defer = self._accumulate_whole or not any(b.policy.shard_grads for b in self._buckets)
        indices = [bucket.index for bucket in self._buckets]
        self._next_order = sorted(range(len(indices)), key=indices.__getitem__, reverse=True)
        self._forget_backward()

    @contextmanager
    def syncing(self, is_syncing: bool) -> Iterator[None]:
        """Say whether backwards in here end an accumulation window; the innermost such block counts."""
        before, self.is_syncing = self.is_syncing, is_syncing
        try:
            yield
        finally:
            self.is_syncing = before

    def reduces_now(self) -> bool:
        """Tell whether a backward here and now is reduced at its end, or its gradients are kept."""
        return self.is_syncing or not self._may_defer

    def close(self) -> None:
        """Take the hooks off: gradients stay where autograd puts them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def reopen(self) -> None:
        """Put the hooks on again; gradients that others have left are dropped."""
        for bucket in self._buckets:
            self._hook(bucket)
            for param in bucket.params:
                param.grad = None

    # -- runtime --

    def on_grad(self, position: int, index: int, param: nn.Parameter) -> None:
        """Stash a gradient that autograd has finished; reduce what is complete with it and has its turn."""
        self._backward.begin()
        reduces_now = self.reduces_now()
        grad = param.grad
        assert grad is not None, self._buckets[position].layout.params[index].fqn
        self._buckets[position].grads.stash(index, grad, accumulates=not reduces_now)
        param.grad = None
        progress = self._progress
        progress.fired[position][index] += 1
        if progress.fired[position][index] == self._expected[position][index]:
            progress.num_missing[position] -= 1
        if not reduces_now:
            return
        if progress.is_reduced[position]:
            # Re-entrant checkpointing delivers a shared parameter's gradient in parts: next time the
            # bucket waits for all of them.
            progress.is_late[position] = True
        elif not (self._follows_gathers or progress.num_missing[position] or position in progress.ready):
            progress.ready.append(position)
            self._reduce_in_order()

    def on_passed(self, buckets: Sequence[Bucket]) -> None:
        """Note that the backward has passed on from a unit of these buckets; all ranks do so at one point.

        All that is reduced of a unit is under way at a time: its gradients are all there already, and one
        after the other would leave no time for the backward of the next unit to hide them.
        """
        if not self.reduces_now():
            return
        positions = [self._position_of[bucket] for bucket in buckets if bucket in self._position_of]
        positions = [position for position in positions if not self._progress.is_reduced[position]]
        if not positions:
            return
        self._wait()
        for position in positions:
            self._start(position)
            if not self._overlap:
                self._wait()

    def _reduce_in_order(self) -> None:
        """Reduce every bucket whose turn it is."""
        while self._progress.turn < len(self._order):
            position = self._order[self._progress.turn]
            if position not in self._progress.ready:
                return
            self._progress.turn += 1
            self._reduce(position)

    def _reduce(self, position: int) -> None:
        """Reduce one bucket; the one before must have arrived, so that no more than one is under way."""
        self._wait()
        self._start(position)
        if not self._overlap:
            self._wait()

    def _start(self, position: int) -> None:
        bucket = self._buckets[position]
        # Gradients of earlier backwards under `no_sync` count as used too.
        self._progress.was_stashed[position] = list(bucket.grads.stashed)
        self._progress.is_reduced[position] = True
        self._under_way.append(bucket.grads.start_reduce())

    def _wait(self) -> None:
        while self._under_way:
            self._under_way.popleft().wait()

    def _on_backward_end(self) -> None:
        if self._is_scaled() is False and any(any(fired) for fired in self._progress.fired):
            self.took_unscaled = True
        if self.reduces_now():
            for position in self._order:
                if not self._progress.is_reduced[position]:
                    self._reduce(position)
            used, late = self._exchange_usage()
            for position in self._order:
                if late[position]:
                    self._reduce(position)
            self._wait()
            self._tell_unused(used)
            for bucket, bucket_used in zip(self._buckets, used, strict=True):
                bucket.grads.note_used(bucket_used)
            self._expected = [[max(1, count) for count in fired] for fired in self._progress.fired]
        self._forget_backward()

    def _exchange_usage(self) -> tuple[list[list[bool]], list[bool]]:
        """Tell the others which parameters were used here, and learn which were used anywhere.

        One byte a parameter, one a bucket for late gradients, one for "a frozen parameter requires a
        gradient", one for "rank 0 has seen another order", and where losses are scaled one for "this one was
        not"; combined by maximum. What ranks have done travels along with its complement: two maxima that
        complement each other are one value.
        """
        progress = self._progress
        new_order = progress.ready + [place for place in self._order if place not in progress.ready]
        message: list[bool] = []
        for fired_here, stashed_here in zip(progress.fired, progress.was_stashed, strict=True):
            pairs = zip(fired_here, stashed_here, strict=True)
            message += [fired > 0 or stashed for fired, stashed in pairs]
        message += progress.is_late
        unfrozen = self._unfrozen()
        message.append(bool(unfrozen))
        message.append(self._collectives.rank == 0 and new_order != self._order)
        if self._is_scaled() is not None:
            message.append(self.took_unscaled)
        done = self._doings().digest()
        digests = [*done, *(255 - byte for byte in done)]
        stop = self._collectives.stop
        flags = torch.tensor([*message, *digests, stop.asked], dtype=torch.uint8, device="cpu")
        self._collectives.maximum(flags)
        *others_digests, asked = flags[len(message) :].tolist()
        self._require_same_doings(others_digests)
        stop.agree(asked)
        answer = [bool(flag) for flag in flags[: len(message)].tolist()]
        self.took_unscaled = self._is_scaled() is not None and answer.pop()
        if answer[-2]:
            self._refuse(unfrozen)
        used, start = [], 0
        for bucket in self._buckets:
            used.append(answer[start : start + len(bucket.params)])
            start += len(bucket.params)
        late = answer[start : start + len(self._buckets)]
        if answer[-1]:
            # For the next backward only: this one goes on in the order it began with.
            self._next_order = self._collectives.broadcast_json(new_order)
        return used, late

    def _on_backward_abort(self) -> None:
        self._wait()
        if any(bucket.grads.has_any() for bucket in self._buckets):
            log_event("A backward has ended by an exception: all gradients accumulated so far are dropped.")
        for bucket in self._buckets:
            bucket.grads.clear()
        self.took_unscaled = False
        self._forget_backward()

    def _forget_backward(self) -> None:
        """Start afresh for the next backward."""
        self._collectives.end_reductions()
        self._order = self._next_order
        self._progress = _Progress.of(self._buckets)

    # -- helpers --

    def _require_same_doings(self, digest_and_complement: list[int]) -> None:
        """Raise on all ranks if they have not all done the same."""
        half = len(digest_and_complement) // 2
        pairs = zip(digest_and_complement[:half], digest_and_complement[half:], strict=True)
        if all(byte + complement == 255 for byte, complement in pairs):
            return
        num_steps: list[int] = self._collectives.gather_json(self._doings().num_steps)
        raise _other_order() if len(set(num_steps)) == 1 else _other_steps(num_steps)

    def _tell_unused(self, used: list[list[bool]]) -> None:
        """Say once which parameters no rank has used: often a slip, sometimes meant."""
        if self._told_unused:
            return
        self._told_unused = True
        names = [
            spec.fqn
            for bucket, flags in zip(self._buckets, used, strict=True)
            for spec, param, flag in zip(bucket.layout.params, bucket.params, flags, strict=True)
            if not flag and param.requires_grad  # one that is frozen for a while is meant to be
        ]
        if names:
            log_event(
                f"{len(names)} trainable parameters were used on no rank in the first backward; such a step "
                f"leaves them as they are: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            )

    def _unfrozen(self) -> list[str]:
        """Return the parameters that require a gradient now and have no place for one."""
        return [
            spec.fqn
            for bucket in self._frozen
            for spec, param in zip(bucket.layout.params, bucket.params, strict=True)
            if param.requires_grad
        ]

    def _refuse(self, unfrozen: list[str]) -> NoReturn:
        """Raise on all ranks because some rank has unfrozen parameters that no optimizer has taken."""
        for bucket in self._frozen:
            for param in bucket.params:
                param.grad = None
        by_rank = self._collectives.gather_json(unfrozen)
        at_fault = [rank for rank, fqns in enumerate(by_rank) if fqns]
        fqns = by_rank[at_fault[0]]
        more = f" (and {len(fqns) - 1} more)" if len(fqns) > 1 else ""
        raise ShardingError(
            what=f"Parameter {fqns[0]!r}{more} requires a gradient now, but was frozen when the model was "
            f"sharded, and no optimizer has taken it since (on ranks {at_fault}).",
            why="Frozen parameters have no place for gradients, masters or optimizer state, so each rank "
            "would keep a gradient of its own.",
            fix="Give it to an optimizer after unfreezing it, on all ranks: "
            "optimizer.add_param_group({'params': [param]}), or engine.shard_optimizer with another "
            "optimizer. Or freeze it again (param.requires_grad_(False)).",
        )


def is_watched(param: nn.Parameter) -> bool:
    """Tell whether the reducer of some engine takes this parameter's gradient."""
    hooks = compat.post_accumulate_hooks(param)
    return any(isinstance(hook, partial) and hook.func is _on_grad for hook in hooks)


def _on_grad(reducer: weakref.ref[GradReducer], position: int, index: int, param: nn.Parameter) -> None:
    # A parameter's hooks are held in C++, where the garbage collector does not look: a strong reference would
    # keep an engine, which refers to its parameters, for ever. The model keeps its engine alive.
    living = reducer()
    if living is not None:
        living.on_grad(position, index, param)


def _other_order() -> ShardingError:
    return ShardingError(
        what="Ranks have gathered parameters in different orders in this micro-batch.",
        why="A gather takes the shard of every rank, so weights of different modules may have been mixed; "
        "the gradients of this backward cannot be used.",
        fix="A module that runs on some ranks only (an expert, a branch that depends on the data) must be "
        "one unit with its siblings: name its parent in zero_optimization.leaf_module.classes or .names.",
    )


def _other_steps(num_steps: Sequence[int]) -> ShardingError:
    said = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(num_steps[:_MOST_RANKS]))
    return ShardingError(
        what=f"Ranks have called step() a different number of times: {said}.",
        why="Every rank updates its own part of the weights, so some parts are of another step than others, "
        "and so are the gradients of this backward.",
        fix="Decide on all ranks alike whether to step (reduce the condition over ranks first), and resume "
        "from a checkpoint.",
    )
