"""In which order buckets are needed, and what the last pass says comes next.

A pass is a forward and its backward, or a forward without gradients. Its order is recorded and is the plan of
the next one, as long as that goes the same way. Read by the lifecycle, which gathers and reshards; nothing
here moves data. Must not know hooks, modules or how much may be whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import accumulate

from zero_strategy.bucket import Bucket


class _Plan:
    """The order of a pass, with what is asked of it worked out at the first question."""

    def __init__(self, order: list[Bucket]) -> None:
        self.order = order
        self._next_use: list[int | None] = []
        self._starts: list[int] = []  # elements needed before each position

    def next_use(self, position: int) -> tuple[int, int] | None:
        """Return where the bucket of a position is needed next, and how many elements are needed between."""
        if not self._next_use:
            self._work_out()
        following = self._next_use[position]
        if following is None:
            return None
        return following, self._starts[following] - self._starts[position + 1]

    def _work_out(self) -> None:
        seen: dict[Bucket, int] = {}
        self._next_use = [None] * len(self.order)
        for position in range(len(self.order) - 1, -1, -1):
            self._next_use[position] = seen.get(self.order[position])
            seen[self.order[position]] = position
        self._starts = [0, *accumulate(bucket.layout.padded_numel for bucket in self.order)]


class NeedOrder:
    """Records the order of a pass and compares it with the last one's."""

    def __init__(self) -> None:
        self._needed: list[Bucket] = []
        self._last_use: dict[Bucket, int] = {}
        self._plans = {True: _Plan([]), False: _Plan([])}
        self._plan: _Plan | None = None
        self._began_with_grads: bool | None = None

    def begin(self, *, grad_enabled: bool) -> None:
        """Note that a forward of the root begins; what runs without gradients inside is part of it."""
        if not self._needed:
            self._began_with_grads = grad_enabled

    def note(self, bucket: Bucket, *, grad_enabled: bool) -> bool:
        """Note that a bucket is needed now.

        Args:
            bucket: The bucket.
            grad_enabled: Which of the two kinds of pass this is, if it begins here and no forward has.

        Returns:
            False if the plan has turned out wrong just now; from then on nothing is known of what comes.
        """
        position = len(self._needed)
        if not position:
            began = self._began_with_grads
            self._plan = self._plans[grad_enabled if began is None else began]
        was_lost = self._plan is not None and self.planned(position) is not bucket
        if was_lost:
            self._plan = None
        self._last_use[bucket] = position
        self._needed.append(bucket)
        return not was_lost

    def end_pass(self, *, grad_enabled: bool) -> None:
        """Make what was recorded the plan of the next pass of this kind."""
        if self._plans[grad_enabled].order != self._needed:
            self._plans[grad_enabled] = _Plan(self._needed)
        self._needed, self._last_use, self._plan = [], {}, None
        self._began_with_grads = None

    def exchange(self, old: Bucket, new: Sequence[Bucket]) -> None:
        """Put some buckets where another was."""
        for grad_enabled, plan in self._plans.items():
            self._plans[grad_enabled] = _Plan(_replaced(plan.order, old, new))
        self._needed = _replaced(self._needed, old, new)
        self._last_use = {bucket: position for position, bucket in enumerate(self._needed)}
        self._plan = None

    # -- queries --

    @property
    def position(self) -> int:
        """How many buckets the pass has needed."""
        return len(self._needed)

    def planned(self, position: int) -> Bucket | None:
        """Return what is needed at a position if all goes as in the last pass; None where that is unknown."""
        if self._plan is None or position >= len(self._plan.order):
            return None
        return self._plan.order[position]

    def next_use(self, bucket: Bucket, within_numel: int) -> int | None:
        """Return the position at which a bucket is needed again, if that is near.

        Args:
            bucket: One that this pass has needed.
            within_numel: Near is when fewer elements than this are needed in between.

        Returns:
            The position; None if it is far away, or unknown.
        """
        if not within_numel or self._plan is None or bucket not in self._last_use:
            return None
        following = self._plan.next_use(self._last_use[bucket])
        return following[0] if following is not None and following[1] < within_numel else None

    def names(self) -> list[str]:
        """Return the names of what the pass has needed."""
        return [bucket.name for bucket in self._needed]

    def digest(self) -> bytes:
        """Return 8 bytes that stand for the order; ranks must agree."""
        order = ",".join(str(bucket.index) for bucket in self._needed)
        return hashlib.blake2b(order.encode(), digest_size=8).digest()


def _replaced(buckets: list[Bucket], old: Bucket, new: Sequence[Bucket]) -> list[Bucket]:
    return [item for bucket in buckets for item in (new if bucket is old else [bucket])]
