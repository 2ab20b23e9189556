"""What the Trainer calls to write and read checkpoints: one plain file, the format of any other strategy.

`CheckpointHooks` stands in front of a `DDPStrategy`, below `ZeroStrategy`. It gathers whole weights and state
for the file and scatters what a file holds; the file itself is the `CheckpointIO`'s. It must not know how the
engine is built or run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError

MASTERS_KEY = "zero_strategy_masters"  # in a checkpoint file: fp32 weights under the names of the state dict

_Base: Any = object


class CheckpointHooks(_Base):  # type: ignore[misc]
    """The part of `ZeroStrategy` that has to do with checkpoints; it stands on the other part's `engine`."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights are loaded into shards, so the engine must exist."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Gather the whole state dict. Collective; CPU tensors on rank 0, {} elsewhere."""
        weights: dict[str, Any] = self.engine.full_state_dict()
        return weights

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Gather an optimizer's state in torch's own format. Collective; no tensors but on rank 0."""
        unwrapped = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        state: dict[str, Any] = unwrapped.state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file through the `CheckpointIO`, on rank 0. Collective.

        Beside what Lightning has put there, a file to resume from holds the fp32 masters of 16-bit weights.
        """
        if checkpoint.get("optimizer_states") and has_16_bit_weights(self.engine):
            checkpoint[MASTERS_KEY] = self.engine.full_state_dict(dtype=torch.float32, trainable_only=True)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, of any strategy, into shards. Collective."""
        self.engine.load_full_state_dict(checkpoint["state_dict"], strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load whole optimizer states and masters, of any strategy, into shards. Collective."""
        if MASTERS_KEY in checkpoint:
            # `on_load_checkpoint` may have edited weights: a master counts only where it still rounds to one.
            weights, masters = checkpoint["state_dict"], checkpoint[MASTERS_KEY]
            merged = more_precise(weights, masters) if self.is_global_zero else {}
            self.engine.load_full_state_dict(merged, strict=False)
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                what=f"The checkpoint has {len(states)} optimizers, the module {len(self.optimizers)}.",
                why="Their states are matched by position.",
                fix="Let configure_optimizers return what it did when the file was written, or load weights "
                "only: load_from_checkpoint, then fit without ckpt_path.",
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def more_precise(weights: Mapping[str, Any], masters: Mapping[str, Any]) -> dict[str, Any]:
    """Return, element by element, the master where it rounds to the weight, else the weight, in fp32."""
    return {
        name: torch.where(master.to(weights[name].dtype) == weights[name], master, weights[name].float())
        for name, master in masters.items()
        if name in weights
    }


def has_16_bit_weights(engine: ZeroEngine) -> bool:
    """Whether the engine keeps masters, which are more precise than its weights."""
    return any(param.is_floating_point() and param.element_size() < 4 for param in engine.model.parameters())
