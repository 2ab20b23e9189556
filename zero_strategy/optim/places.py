"""What the parts of the optimizer side tell one another about parameters, slices and their state.

Used by `sharded_optimizer` and `full_state`, so that the latter need not import the optimizer's class, and by
the engine and `intact` for `Place`. Types only: nothing here computes or communicates, or knows a stage.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from zero_strategy.bucket import Bucket
from zero_strategy.layout import ShardSlice


class Place(NamedTuple):
    """Where a parameter lies."""

    bucket: Bucket
    param_index: int  # within the bucket

    @property
    def fqn(self) -> str:
        """The parameter's name."""
        return self.bucket.layout.params[self.param_index].fqn


class SliceState(NamedTuple):
    """One entry of an optimizer's state for one slice."""

    fqn: str
    piece: ShardSlice
    key: str
    value: Any  # Tensor of [piece.numel], or a 0-d tensor or a number that all slices of the parameter share


class SlicedOptimizer(Protocol):
    """An optimizer whose param groups hold whole parameters, and whose state is keyed by slices."""

    param_groups: list[dict[str, Any]]
    state: Any

    @property
    def buckets(self) -> list[Bucket]:
        """The buckets that hold one of its parameters."""

    def params(self) -> Iterator[nn.Parameter]:
        """Yield its parameters in the order of the param groups."""

    def place_of(self, param: nn.Parameter) -> Place:
        """Return where one of them lies."""

    def slices_of(self, param: nn.Parameter) -> list[tuple[ShardSlice, Tensor]]:
        """Return this rank's slices of one of them, each with its master weights."""

    def slice_states(self) -> Iterator[SliceState]:
        """Yield this rank's state, slice by slice."""
