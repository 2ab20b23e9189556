"""`TrainingArguments` with `deepspeed=`, without DeepSpeed: a config that the Trainer's engine is built from.

transformers would import deepspeed as soon as it sees one. Here the field is hidden while the arguments are
completed, and read later, when a Trainer makes its Accelerator. It must not know the Trainer.
"""

from __future__ import annotations

from typing import Any

from zero_strategy.front_ends.upstream import Stock


def complete_arguments(arguments: Any, stock: Stock) -> None:
    """Complete `TrainingArguments`, without DeepSpeed; the field `deepspeed` stays as it was given.

    Args:
        arguments: What is made.
        stock: Completes them, and would look for deepspeed.
    """
    asked, arguments.deepspeed = arguments.deepspeed, None
    try:
        stock()
    finally:
        arguments.deepspeed = asked


class ZeroArgumentsMixin:
    """Lets `TrainingArguments` take `deepspeed=` where deepspeed is not installed; to stand before it.

    Example:
        @dataclass
        class MyArguments(ZeroArgumentsMixin, TrainingArguments): ...
    """

    def __post_init__(self) -> None:
        """Complete the arguments."""
        complete_arguments(self, super().__post_init__)  # type: ignore[misc]
