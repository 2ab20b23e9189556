"""Which sharded buckets are whole or on their way, and how many elements that may be.

Starts and drops gathers on behalf of the lifecycle, which knows why. `stage3_max_live_parameters` is kept
here and nowhere else: what is gathered ahead or kept for later has to fit, what is needed now is gathered
anyway once all the rest has gone. Must not know modules, passes or hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero_strategy.bucket import Bucket
from zero_strategy.bucketing import BucketPlan
from zero_strategy.comm.collectives import Handle
from zero_strategy.config_blocks import ZeroOptimization


class LiveLimits(NamedTuple):
    """What of the parameters may be whole besides what is in use; all in elements, padding included."""

    max_live_numel: int  # whole or on their way at a time
    max_reuse_numel: int  # a bucket stays whole if fewer are needed before it is needed again
    prefetch_numel: int | None  # on their way ahead of use; None: those of the next unit

    @classmethod
    def of(cls, zero: ZeroOptimization) -> LiveLimits:
        """Read them from the config."""
        ahead = zero.stage3_prefetch_bucket_size
        return cls(
            zero.stage3_max_live_parameters,
            zero.stage3_max_reuse_distance,
            None if isinstance(ahead, str) else ahead,
        )


class LiveBuckets:
    """The buckets that hold memory for whole parameters.

    Attributes:
        whole: In order of their gathers.
        under_way: Gathered ahead; in order of their use.
        kept: Those of `whole` that nobody uses now, each with the position of its next use.
    """

    def __init__(self, max_numel: int) -> None:
        self.whole: dict[Bucket, None] = {}
        self.under_way: dict[Bucket, Handle] = {}
        self.kept: dict[Bucket, int] = {}
        self._max_numel = max_numel
        self._numel = 0
        self._ahead_numel = 0

    def gather(self, bucket: Bucket) -> None:
        """Make a bucket whole that is needed now. Collective."""
        handle = self.under_way.pop(bucket, None)
        if handle is None:
            self._make_space(_numel(bucket))
            handle = self._start(bucket)
        else:
            self._ahead_numel -= _numel(bucket)
        bucket.finish_unshard(handle)
        self.whole[bucket] = None

    def is_next(self, unit: str, *, after: str) -> bool:
        """Tell whether no other unit but the one in use has buckets on their way."""
        return {bucket.unit for bucket in self.under_way} <= {unit, after}

    def gather_ahead(self, bucket: Bucket, position: int, prefetch_numel: int | None) -> bool:
        """Start gathering a bucket that will be needed, if that is within the limits. Collective.

        Args:
            bucket: The next to come that is neither whole nor on its way.
            position: When it is needed; what is kept for later than that makes room for it.
            prefetch_numel: What may be on its way at a time; None: as much as there is room for.

        Returns:
            Whether it was started.
        """
        may_start = prefetch_numel is None or self._ahead_numel + _numel(bucket) <= prefetch_numel
        later = [kept for kept, next_use in self.kept.items() if next_use > position] if may_start else []
        evictable_numel = sum(map(_numel, later))
        if not may_start or self._numel - evictable_numel + _numel(bucket) > self._max_numel:
            return False
        while self._numel + _numel(bucket) > self._max_numel:
            self.reshard(max(later, key=self.kept.__getitem__))
            later = [kept for kept in later if kept in self.kept]
        self.under_way[bucket] = self._start(bucket)
        self._ahead_numel += _numel(bucket)
        return True

    def reshard(self, bucket: Bucket, *, keep_written: bool = True) -> None:
        """Let go of a whole bucket, and of what was written into it unless `keep_written`."""
        del self.whole[bucket]
        self.kept.pop(bucket, None)
        self._numel -= _numel(bucket)
        bucket.reshard(keep_written=keep_written)

    def drop_ahead(self, *, but: Bucket | None = None) -> None:
        """Let go of what was gathered ahead and what is kept, which may never be needed, except for one."""
        for bucket in [bucket for bucket in self.under_way if bucket is not but]:
            self._drop(bucket)
        for bucket in [bucket for bucket in self.kept if bucket is not but]:
            self.reshard(bucket)

    def forget(self, bucket: Bucket) -> None:
        """Forget a bucket that is no longer there."""
        if bucket in self.whole:
            del self.whole[bucket]
            self._numel -= _numel(bucket)

    # -- helpers --

    def _start(self, bucket: Bucket) -> Handle:
        self._numel += _numel(bucket)
        return bucket.start_unshard()

    def _drop(self, bucket: Bucket) -> None:
        handle = self.under_way.pop(bucket)
        self._numel -= _numel(bucket)
        self._ahead_numel -= _numel(bucket)
        bucket.drop_gather(handle)

    def _make_space(self, numel: int) -> None:
        """Let go of what is not in use, the latest needed first, until so much more may be whole."""
        while self._numel + numel > self._max_numel and (self.kept or self.under_way):
            if self.kept:
                self.reshard(max(self.kept, key=self.kept.__getitem__))
            else:
                self._drop(next(reversed(self.under_way)))


def describe_excess(buckets: Iterable[tuple[Bucket, BucketPlan]], max_numel: int) -> str | None:
    """Return a line that names the units of which one alone, with the root, is more than may be whole."""
    root_numel, units = 0, dict[object, list[Bucket]]()
    for bucket, plan in buckets:
        root_numel += _numel(bucket) if bucket.is_root else 0
        units.setdefault(plan.modules[0], []).append(bucket)
    needs = {}
    for members in units.values():
        numel = sum(map(_numel, members))
        total_numel = numel if members[0].is_root else numel + root_numel
        if total_numel > max_numel:
            needs[members[0].name] = total_numel
    if not needs:
        return None
    named = ", ".join(f"{name} ({numel:,})" for name, numel in list(needs.items())[:5])
    return (
        f"stage3_max_live_parameters = {max_numel:,} elements is less than what has to be whole at once for "
        f"{named}{f' and {len(needs) - 5} more' if len(needs) > 5 else ''}, the root of {root_numel:,} "
        f"included. They are gathered all the same, with nothing besides."
    )


def _numel(bucket: Bucket) -> int:
    return bucket.layout.padded_numel
