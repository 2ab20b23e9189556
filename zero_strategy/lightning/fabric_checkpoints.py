"""What Fabric calls to write and read checkpoints: one file, the format of any other strategy, or a folder.

`FabricCheckpointHooks` stands in front of a Fabric's `DDPStrategy`. Fabric's user says what goes into a
checkpoint; models and optimizers that have been set up are gathered for it and scattered from it, the rest is
stored as it is. How either kind is written and read is `checkpoint_files`' business. It must not know how
engines are built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from zero_strategy.checkpoint.full_weights import MorePreciseWeights
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError
from zero_strategy.front_ends.engines import has_16_bit_weights
from zero_strategy.lightning import checkpoint_files
from zero_strategy.lightning.checkpoint_files import MASTERS_KEY, own
from zero_strategy.lightning.forward_module import engine_behind
from zero_strategy.optim.sharded_optimizer import ShardedOptimizer

T = TypeVar("T")
Filters = Mapping[str, Callable[[str, Any], bool]]

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

    # -- saving --

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Filters | None = None,
    ) -> None:
        """Write one file through the `CheckpointIO`, on rank 0, or a folder. Collective.

        Beside what the user has put there, a file with an optimizer holds the fp32 masters of 16-bit weights.

        Raises:
            CheckpointError: It cannot be written; on all ranks.
        """
        if self._is_sharded:
            checkpoint_files.refuse_storage_options(storage_options)
            self._save_folder(path, state, filter)
            return
        content: dict[str, Any] = self._convert_stateful_objects_in_state(state, filter=filter or {})
        masters = _masters_in(state, filter or {})
        if masters:
            content[MASTERS_KEY] = masters
        io, first = self.checkpoint_io, self.is_global_zero
        self._together(
            state, lambda: checkpoint_files.save_file(io, path, content, storage_options) if first else None
        )

    def _save_folder(self, path: Any, state: dict[str, Any], filter: Filters | None) -> None:
        engine = _only_engine(state)
        if filter:
            raise CheckpointError(
                what=f"fabric.save was given a filter for {sorted(filter)}, with state_dict_type='sharded'.",
                why="A folder holds what the ranks own, as it lies in memory.",
                fix="Leave the filter out, or use state_dict_type='full'.",
            )
        rest = {key: value for key, value in state.items() if not _is_engines(value)}
        content = {"keys": list(state), "rest": self._convert_stateful_objects_in_state(rest, filter={})}
        has_optimizers = any(isinstance(value, ShardedOptimizer) for value in state.values())
        checkpoint_files.save_folder(
            engine, path, content, weights_only=not has_optimizers, asynchronous=self._async_save
        )

    # -- loading --

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a file that any strategy has written, or a folder, into what `state` names. Collective.

        With an optimizer in `state` a folder also restores every rank's random number generators.

        Returns:
            What has not been asked for; of a file everything if there is no `state`.

        Raises:
            CheckpointError: It cannot be read, or `strict` and it lacks something that was asked for.
        """
        for engine in self._living_engines():  # one of them may be writing it
            engine.saves.join()
        if checkpoint_files.is_folder(path):
            return self._load_folder(path, state, strict, weights_only)
        io = self.checkpoint_io
        # A rank that looks at its share only needs to hear of the others.
        share = (0, 1) if self._meeting_point(state) is None else (self.global_rank, self.world_size)
        content: dict[str, Any] = self._together(
            state, lambda: checkpoint_files.load_file(io, path, weights_only=weights_only, share=share)
        )
        if isinstance(state, nn.Module):
            self.load_module_state_dict(state, content, strict=strict)
            return {}
        if isinstance(state, torch.optim.Optimizer):
            state.load_state_dict(content if _is_engines(state) else own(content))
            return {}
        if not state:
            return own(content)
        masters = content.pop(MASTERS_KEY, {})
        _check_keys(state, content, strict, path)
        for key in [key for key in state if key in content]:
            value = content.pop(key)
            if key in masters and isinstance(state[key], nn.Module):
                value = self._together(state, lambda: MorePreciseWeights(value, masters[key].get))  # noqa: B023
            self._put(state, key, value, strict)
        return own(content)

    def _load_folder(self, path: Any, state: Any, strict: bool, weights_only: bool | None) -> dict[str, Any]:
        is_raw = isinstance(state, nn.Module)
        wanted = {"": state} if is_raw else state if isinstance(state, dict) else {}
        opened, content = checkpoint_files.open_folder(_only_engine(wanted), path, weights_only=weights_only)
        with opened:
            rest: dict[str, Any] = content.get("rest", {})
            if not is_raw:
                _check_keys(wanted, content.get("keys", list(wanted)), strict, path)
            opened.load_weights(opened.weights(), strict=strict)
            if any(isinstance(value, ShardedOptimizer) for value in wanted.values()):
                opened.load_optimizers()
                opened.load_rng()  # a folder to go on from has every rank's; one of weights alone has none
        if is_raw:
            return {}
        for key in [key for key in wanted if key in rest]:
            self._put(wanted, key, rest.pop(key), strict)
        return rest

    def _put(self, state: dict[str, Any], key: str, value: Any, strict: bool) -> None:
        """Take one entry of a checkpoint over into what the user has under its key."""
        target = state[key]
        stateful = importlib.import_module(f"{self.namespace}.utilities.types")._Stateful
        if isinstance(target, nn.Module):
            self.load_module_state_dict(target, value, strict=strict)
        elif isinstance(target, stateful):
            target.load_state_dict(value if _is_engines(target) else own(value))
        else:
            state[key] = own(value)

    # -- helpers --

    def _together(self, state: Any, work: Callable[[], T]) -> T:
        """Do a rank's part of something all ranks do; where no model has been set up, nobody waits."""
        engine = self._meeting_point(state)
        return work() if engine is None else agreed(engine.collectives, work)

    def _meeting_point(self, state: Any) -> ZeroEngine | None:
        """Return the engine by whose groups ranks meet over `state`: the first in it, the same on every rank.

        Which of the others still live is not: that depends on when each rank's garbage is collected.
        """
        found = state.values() if isinstance(state, Mapping) else [state]
        living = self._living_engines()
        named = [engine for engine in (_engine_among(living, value) for value in found) if engine is not None]
        engines = named or living[-1:]
        return engines[0] if engines else None


def _engine_among(engines: Iterable[ZeroEngine], value: Any) -> ZeroEngine | None:
    """Return the engine of a module or an optimizer, None for anything else."""
    if isinstance(value, ShardedOptimizer):
        return next((e for e in engines if any(value is held for held in e.optimizers)), None)
    return engine_behind(value)


def _is_engines(value: Any) -> bool:
    return isinstance(value, ShardedOptimizer) or engine_behind(value) is not None


def _masters_in(state: Mapping[str, Any], filters: Filters) -> dict[str, Any]:
    """Gather the masters of all 16-bit models, if training is to go on from the file. Collective."""
    masters: dict[str, Any] = {}
    if not any(isinstance(value, ShardedOptimizer) for value in state.values()):
        return masters
    for key, value in state.items():
        engine = engine_behind(value)
        if engine is not None and has_16_bit_weights(engine):
            whole = engine.full_state_dict(dtype=torch.float32, trainable_only=True)
            wanted = filters.get(key)
            masters[key] = {k: v for k, v in whole.items() if wanted is None or wanted(k, v)}
    return masters


def _only_engine(state: Mapping[str, Any]) -> ZeroEngine:
    engines = [engine for engine in map(engine_behind, state.values()) if engine is not None]
    if len(engines) == 1:
        return engines[0]
    raise CheckpointError(
        what=f"A checkpoint folder holds one model, and {len(engines)} are in the state {list(state)}.",
        why="Every rank writes and reads its own part of that model, which the model's engine knows.",
        fix="Name one model that has been set up, with its optimizers, and use a folder for each; or write "
        "files, with state_dict_type='full'.",
    )


def _check_keys(state: Iterable[str], there: Iterable[str], strict: bool, path: Any) -> None:
    missing = [key for key in state if key not in there]
    if strict and missing:
        raise CheckpointError(
            what=f"The checkpoint {path} has no {', '.join(map(repr, missing))}.",
            why=f"fabric.load was asked for it; there are {', '.join(map(repr, there))}.",
            fix="Name in `state` what the checkpoint holds, or pass strict=False.",
        )
