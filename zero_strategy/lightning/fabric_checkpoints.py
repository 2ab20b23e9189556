"""What Fabric calls to write and read checkpoints: one plain file, the format of any other strategy.

`FabricCheckpointHooks` stands in front of a Fabric's `DDPStrategy`. Fabric's user says what goes into a file;
models and optimizers that have been set up are gathered for it and scattered from it, the rest is Fabric's
affair. It must not know how engines are built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from zero_strategy.checkpoint.full_weights import more_precise
from zero_strategy.errors import CheckpointError
from zero_strategy.lightning.checkpoints import MASTERS_KEY, has_16_bit_weights
from zero_strategy.lightning.forward_module import engine_behind
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

_Base: Any = object


class FabricCheckpointHooks(_Base):  # type: ignore[misc]
    """The part of `FabricZeroStrategy` that has to do with checkpoints."""

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Gather the whole state dict. Collective; CPU tensors on rank 0, {} elsewhere."""
        engine = engine_behind(module)
        return module.state_dict() if engine is None else engine.full_state_dict()

    def load_module_state_dict(
        self, module: nn.Module, state_dict: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load whole weights, of any strategy, into shards. Collective."""
        engine = engine_behind(module)
        if engine is None:
            module.load_state_dict(state_dict, strict=strict)
        else:
            engine.load_full_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write one file through the `CheckpointIO`, on rank 0. Collective.

        Beside what the user has put there, a file with an optimizer holds the fp32 masters of 16-bit weights.
        """
        masters: dict[str, Any] = {}
        for key, value in state.items() if any(map(_is_sharded, state.values())) else ():
            engine = engine_behind(value)
            if engine is not None and has_16_bit_weights(engine):
                whole = engine.full_state_dict(dtype=torch.float32, trainable_only=True)
                wanted = filter.get(key) if filter else None
                masters[key] = {k: v for k, v in whole.items() if wanted is None or wanted(k, v)}
        content = {**state, MASTERS_KEY: masters} if masters else state
        super().save_checkpoint(path, content, storage_options=storage_options, filter=filter)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file that any strategy has written into what `state` names. Collective.

        Returns:
            What has not been asked for; everything without `state`.

        Raises:
            CheckpointError: `strict`, and the file lacks something that was asked for.
        """
        if not isinstance(state, dict) or not state:  # everything, or one raw state dict
            rest: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
            return rest
        content: dict[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=weights_only)
        masters = content.pop(MASTERS_KEY, {})
        _check_keys(state, content, strict, path)
        stateful = importlib.import_module(f"{self.namespace}.utilities.types")._Stateful
        for key in [key for key in state if key in content]:
            target, value = state[key], content.pop(key)
            if isinstance(target, nn.Module):
                if self.is_global_zero and key in masters:
                    value = {**value, **more_precise(value, masters[key])}
                self.load_module_state_dict(target, value, strict=strict)
            elif isinstance(target, stateful):
                target.load_state_dict(value)
            else:
                state[key] = value
        return content


def _is_sharded(value: Any) -> bool:
    return isinstance(value, ShardedOptimizer)


def _check_keys(state: Mapping[str, Any], content: Mapping[str, Any], strict: bool, path: Any) -> None:
    missing = [key for key in state if key not in content]
    if strict and missing:
        raise CheckpointError(
            what=f"The checkpoint {path} has no {', '.join(map(repr, missing))}.",
            why=f"fabric.load was asked for it; there are {', '.join(map(repr, content))}.",
            fix="Name in `state` what the file holds, or pass strict=False.",
        )
