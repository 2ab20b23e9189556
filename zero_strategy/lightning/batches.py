"""Requires as many batches on every rank, where a rank that has run out would leave the others waiting.

That is in training, whose backwards reduce together, and at stage 3 in every loop, whose forwards gather
weights together. Validation, test and prediction below stage 3 need no other rank: there, as under DDP,
loaders may end apart, and the strategy does not ask.

One message when a loop starts, none per batch. A loader that does not know its length (an `IterableDataset`)
cannot be checked, nor is one that `reload_dataloaders_every_n_epochs` makes later. Must not know the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from zero_strategy.comm.collectives import Collectives
from zero_strategy.errors import ShardingError

# What a loop is called -> its option of the Trainer.
LIMITS = {
    "training": "limit_train_batches",
    "validation": "limit_val_batches",
    "test": "limit_test_batches",
    "predict": "limit_predict_batches",
}


def require_as_many_batches(kind: str, num_batches: Sequence[float], collectives: Collectives) -> None:
    """Raise on all ranks if their loaders have different lengths. Collective.

    Args:
        kind: A key of `LIMITS`.
        num_batches: Of each loader on this rank; infinite where it does not know.
        collectives: The engine's.

    Raises:
        ShardingError: A loader has more batches on one rank than on another.
    """
    own = [None if math.isinf(number) else int(number) for number in num_batches]
    of_ranks = collectives.gather_json(own)
    for loader, numbers in enumerate(zip(*of_ranks, strict=False)):
        if None in numbers or len(set(numbers)) == 1:
            continue
        fewest, most = min(numbers), max(numbers)
        raise ShardingError(
            what=f"The {kind} loader {loader} has {fewest} batches on rank {numbers.index(fewest)} and "
            f"{most} on rank {numbers.index(most)}.",
            why="Ranks reduce gradients, and at stage 3 gather weights, together: one that has run out of "
            "batches would leave the others waiting for it.",
            fix="Leave Trainer(use_distributed_sampler=True), which gives every rank as many, or pass "
            f"Trainer({LIMITS[kind]}={max(fewest, 1)}).",
        )
