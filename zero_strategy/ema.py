"""`ShardedEMA`: an exponential moving average of the weights that costs each rank its shard.

It stands on an engine: the bytes are `average.AverageShards`, checkpoints save them with the rest. Called by
the user, or by the callback `ZeroEMA` for Lightning. It must not know how weights are stored or moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from zero_strategy.average import AverageShards
from zero_strategy.bucket import publish_all
from zero_strategy.checkpoint import full_weights
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError, ConfigError, ShardingError


class ShardedEMA:
    """An exponential moving average of what an engine trains, at any stage; updates talk to no other rank.

    The fp32 masters are averaged, slice by slice. The first update takes the weights as they are, each later
    one gives them the part `1 - decay`, as torch's `AveragedModel` with `get_ema_avg_fn` does. Weights that
    no optimizer trains are their own average. Buffers are not averaged: evaluation and export use those of
    the model (`AveragedModel(use_buffers=False)`).

    Example:
        ema = zs.ShardedEMA(engine, decay=0.999)  # on all ranks; saved and loaded with engine checkpoints
        ...
        optimizer.step()
        ema.update()
        ...
        with ema.swapped():  # collective: the model is the average, then again what is trained, bit for bit
            evaluate(model)
        weights = ema.full_state_dict()

    Attributes:
        engine: The engine.
        decay: Weight of the average so far, at each update.
        shards: This rank's part of the average.
    """

    def __init__(self, engine: ZeroEngine, decay: float = 0.999, *, warmup: bool = False) -> None:
        """Begin an average; memory is taken at the first update. Collective.

        Args:
            engine: Its optimizers say what is averaged.
            decay: Between 0 and 1. 0.999 looks back about 1,000 updates.
            warmup: Let the decay rise as min(decay, (1 + n) / (10 + n)) over updates n, so that a short run
                is not dominated by its beginning.

        Raises:
            ConfigError: The decay is no number between 0 and 1, or ranks differ.
        """
        parts = engine.parts()
        error = None if 0.0 <= decay < 1.0 else _bad_decay(decay)
        parts.collectives.agree(error)
        parts.collectives.require_same([f"decay={decay} warmup={warmup}"], "The average of the weights")
        self.engine = engine
        self.decay = decay
        self._warmup = warmup
        self.shards = AverageShards()
        engine.averages.all.append(self.shards)

    @property
    def num_updates(self) -> int:
        """Updates so far, over all runs that were resumed; 0: there is no average yet."""
        return self.shards.num_updates

    # -- training --

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights into the average; to be called after a step. No communication.

        Raises:
            ShardingError: The average is in the model's place.
        """
        self._require_out("update()")
        parts = self.engine.parts()
        decay = self.decay
        if self._warmup:
            decay = min(decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.shards.update(parts.buckets, parts.masters, decay)

    # -- evaluation --

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Make the model the average for a block of code, if there is one yet. Collective at both ends.

        After an exception the average stays in place: it may have met this rank alone, and the others would
        wait. Steps and saves are refused until `swap_out()` was called on all ranks.
        """
        if not self.num_updates:
            yield
            return
        self.swap_in()
        yield
        self.swap_out()

    def swap_in(self) -> None:
        """Make the model the average, until `swap_out`. Collective.

        Raises:
            ShardingError: There is no average yet, or one is in place already.
        """
        self.engine.averages.require_out()
        if not self.num_updates:
            raise ShardingError(
                what="swap_in() was called on an average that has never been updated.",
                why="There is nothing to put into the model.",
                fix="Call update() after a step first, or use swapped(), which then changes nothing.",
            )
        self._exchange()

    def swap_out(self) -> None:
        """Give the model its own weights back, bit for bit. Collective."""
        if self.shards.is_in_place:
            self._exchange()

    def _exchange(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.engine.wait_for_weights()
            parts = self.engine.parts()
            self.shards.exchange(parts.masters)
            publish_all(parts.buckets)
            parts.reshard_idle()

    # -- whole values --

    def full_state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Gather the averaged weights, and with them all that is not averaged. Collective.

        Args:
            dtype: Cast floating-point parameters to this; by default each has the model's. fp32 gives the
                average unrounded.

        Returns:
            On rank 0 CPU tensors under the very keys of `model.state_dict()`; on other ranks {}.
        """
        return self._gather(dtype, trainable_only=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes at any world size and stage. Collective.

        Returns:
            `num_updates` and `weights`: on rank 0 the whole averages in fp32, by name; on other ranks {}.
        """
        weights = self._gather(torch.float32, trainable_only=True) if self.num_updates else {}
        return {"num_updates": self.num_updates, "weights": weights}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a whole average. Collective.

        Args:
            state_dict: As `state_dict()` returned it. Rank 0's is used. A parameter that is not in it begins
                at its present weights; one that is frozen here is left alone.

        Raises:
            CheckpointError: It is no state of an average, or a tensor has another shape than the parameter of
                its name.
        """
        self._require_out("load_state_dict()")
        parts = self.engine.parts()
        given = state_dict if parts.collectives.rank == 0 else {}
        weights, num_updates = agreed(parts.collectives, lambda: _content(given))
        shards = AverageShards()
        shards.start(parts.buckets, parts.masters, untrained=True)
        with torch.inference_mode(False), torch.no_grad():
            full_weights.scatter_shards(parts.model, shards.shards, weights, parts.collectives)
        num_updates = parts.collectives.broadcast_json(num_updates)
        self.shards.num_updates = num_updates
        self.shards.shards = shards.shards if num_updates else {}

    def _gather(self, dtype: torch.dtype | None, *, trainable_only: bool) -> dict[str, Any]:
        self._require_out("full_state_dict()")
        parts = self.engine.parts()
        parts.collectives.require_same([f"num_updates={self.num_updates}"], "The average of the weights")
        return full_weights.gather(
            parts.model,
            parts.buckets,
            parts.collectives,
            self.shards.slices,
            dtype=dtype,
            trainable_only=trainable_only,
        )

    # -- helpers --

    def _require_out(self, call: str) -> None:
        if self.shards.is_in_place:
            raise ShardingError(
                what=f"{call} was called while the average is in the model's place.",
                why="The weights that are trained are kept aside meanwhile.",
                fix="Call it outside of `swapped()`, or after swap_out().",
            )


def _bad_decay(decay: float) -> ConfigError:
    return ConfigError(
        what=f"decay={decay!r} is no decay of an average.",
        why="It is the part of the average that stays at an update: at least 0, and less than 1.",
        fix="Pass a number such as 0.999, which looks back about 1,000 updates.",
    )


def _content(state_dict: Any) -> tuple[Any, int]:
    """Return the weights and the number of updates.

    Raises:
        CheckpointError: They are something else.
    """
    if not isinstance(state_dict, Mapping):
        raise _no_state(f"a {type(state_dict).__name__}")
    weights, num_updates = state_dict.get("weights", {}), state_dict.get("num_updates", 0)
    if not isinstance(weights, Mapping):
        raise _no_state(f"its 'weights' is of type {type(weights).__name__}")
    try:
        count = int(num_updates)
    except (TypeError, ValueError):
        count = -1
    if count < 0:
        raise _no_state(f"its 'num_updates' is {num_updates!r}")
    return weights, count


def _no_state(found: str) -> CheckpointError:
    return CheckpointError(
        what=f"This is no state of an average: {found}.",
        why="It is a dict of 'num_updates', a number, and of 'weights', tensors by name; rank 0's is used.",
        fix="Pass what `state_dict()` of a ShardedEMA returned on rank 0.",
    )
