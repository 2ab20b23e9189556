"""What the parts of the optimizer side tell one another about parameters, slices and their state.

Used by `sharded_optimizer` and `full_state`, so that the latter need not import the optimizer's class, and by
the engine and `intact` for `Place`. Types, and what may be in an optimizer at all: nothing here computes or
communicates, or knows a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from zero_strategy.bucket import Bucket
from zero_strategy.errors import ConfigError
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


def check_params(
    params: Iterable[nn.Parameter],
    places: Mapping[nn.Parameter, Place],
    is_claimed: Callable[[nn.Parameter], bool],
    *,
    may_be_frozen: bool = False,
) -> ConfigError | None:
    """Return why parameters cannot be optimized by this engine, or None."""
    for position, param in enumerate(params):
        place = places.get(param)
        if place is None:
            return ConfigError(
                what=f"The optimizer holds a parameter that the sharded model does not have: number "
                f"{position}, of shape {tuple(param.shape)}.",
                why="Its gradient would never be reduced, so each rank would train its own copy.",
                fix="Build the optimizer from the parameters of the model that was given to ZeroEngine, and "
                "one engine for each model.",
            )
        if is_claimed(param):
            return ConfigError(
                what=f"Parameter {place.fqn!r} belongs to an optimizer of this engine already.",
                why="Two optimizers would update the same master weights.",
                fix="Give each parameter to one optimizer, and call shard_optimizer once for each.",
            )
        if not (place.bucket.trainable or param.requires_grad or may_be_frozen):
            return ConfigError(
                what=f"The optimizer holds the frozen parameter {place.fqn!r}.",
                why="Masters and gradients of a parameter that is not trained would be memory for nothing.",
                fix="Give the optimizer only parameters with requires_grad=True. To train this one later: "
                "param.requires_grad_(True), then optimizer.add_param_group({'params': [param]}).",
            )
    return None
