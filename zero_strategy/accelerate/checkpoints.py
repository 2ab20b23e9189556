"""What `ZeroAccelerator` does to save and load: whole states on rank 0, or a folder for each model.

A part of its class. Accelerate's own `save_state` and `load_state` run and do what is theirs (schedulers,
loaders, random numbers, registered objects); models and optimizers that an engine holds are written and read
here. How a folder is written is the engine's business.

[Note: Two kinds of state]
"full": `model.safetensors`, `optimizer.bin` and so on, as plain Accelerate writes and reads them; what those
cannot hold (fp32 masters of 16-bit weights, the engine's loss scale) is in `EXTRAS_NAME` beside them.
"sharded": a folder `zero_model`, `zero_model_1`, ... for each model, with its optimizers, and none of those
files. With hooks of the user's own, `save_state` is always "full": a hook is promised whole weights, and may
take them off the list to write them itself. Where parameters are sharded they are whole while hooks run.
A folder holds one state: what an earlier one of either kind has left in it is deleted (state_files.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.other import load as load_plain
from safetensors.torch import load_file, load_model
from torch import nn

from zero_strategy.accelerate.gradients import engine_of
from zero_strategy.accelerate.plugin import ZeroPlugin
from zero_strategy.accelerate.state_files import (
    EXTRAS_NAME,
    folder_of,
    folders_in,
    remove_others,
    whole_names,
)
from zero_strategy.checkpoint.full_weights import MorePreciseWeights, names_in
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError
from zero_strategy.front_ends.engines import has_16_bit_weights


class CheckpointMethods(Accelerator):  # type: ignore[misc]
    """The part of `ZeroAccelerator` that has to do with checkpoints."""

    zero_plugin: ZeroPlugin
    step: int  # Accelerate's counter of micro-batches
    _models: list[Any]
    _optimizers: list[Any]
    _save_model_state_pre_hook: OrderedDict[int, Any]
    _load_model_state_pre_hook: OrderedDict[int, Any]

    def living_engines(self) -> list[ZeroEngine]:
        """Return the engines of the models that were prepared and still exist, in that order."""
        raise NotImplementedError

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Gather whole weights. Collective.

        Args:
            model: Any; one without an engine has a state dict of its own.
            unwrap: As for `Accelerator`.

        Returns:
            CPU tensors under the names of `model.state_dict()` on rank 0, nothing on the others.
        """
        engine = engine_of(model)
        if engine is None:
            plain: dict[str, Any] = super().get_state_dict(model, unwrap)
            return plain
        return OrderedDict(engine.full_state_dict())  # by this type Accelerate knows that ties may be in it

    # -- saving --

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Any:
        """Save everything that was prepared or registered. Collective. See [Note: Two kinds of state].

        Args:
            output_dir: As for `Accelerator`.
            safe_serialization: As for `Accelerator`.
            **save_model_func_kwargs: As for `Accelerator`.

        Returns:
            The folder.

        Raises:
            CheckpointError: Something cannot be written; on all ranks.
        """
        hooks = self._save_model_state_pre_hook
        if self.zero_plugin.state_dict_type == "sharded" and not hooks:
            return self._save_sharded(output_dir, safe_serialization, save_model_func_kwargs)
        self._save_model_state_pre_hook = self._with_whole_models(hooks, writeback=False)
        try:
            location = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        finally:
            self._save_model_state_pre_hook = hooks
        extras = [self.extras_of(model) for model in self._models]
        kept = whole_names(len(self._models), len(self._optimizers), is_safe=safe_serialization)
        if any(extras):
            self._on_rank_0(lambda: torch.save(extras, Path(location, EXTRAS_NAME)))
            kept.add(EXTRAS_NAME)
        self._on_rank_0(lambda: remove_others(location, kept, keeps_whole=bool(hooks)))
        self.wait_for_everyone()  # who loads at once finds complete files
        return location

    def _save_sharded(self, output_dir: str | None, is_safe: bool, kwargs: dict[str, Any]) -> Any:
        models, optimizers = self._models, self._optimizers
        self._models = [model for model in models if engine_of(model) is None]
        self._optimizers = [optimizer for optimizer in optimizers if not optimizer.is_sharded]
        kept = whole_names(len(self._models), len(self._optimizers), is_safe=is_safe)
        try:
            location = super().save_state(output_dir, is_safe, **kwargs)
        finally:
            self._models, self._optimizers = models, optimizers
        engines = [engine for model in models if (engine := engine_of(model)) is not None]
        for number, engine in enumerate(engines):
            folder = folder_of(location, number)
            engine.save_checkpoint(folder)
            kept.add(folder.name)
        self._on_rank_0(lambda: remove_others(location, kept))
        return location

    def extras_of(self, model: nn.Module) -> dict[str, Any]:
        """Return on rank 0 what plain files of weights and states cannot hold of a model. Collective."""
        engine = engine_of(model)
        if engine is None:
            return {}
        extras: dict[str, Any] = {}
        if engine.optimizers and has_16_bit_weights(engine):
            extras["masters"] = engine.full_state_dict(dtype=torch.float32, trainable_only=True)
        if engine.loss_scaler.is_active:
            extras["loss_scaler"] = dict(engine.loss_scaler.state_dict())
        return extras

    # -- loading --

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load what `save_state` has written, at any number of ranks and any stage. Collective.

        Args:
            input_dir: As for `Accelerator`.
            load_kwargs: As for `Accelerator`.
            **load_model_func_kwargs: As for `Accelerator`; `strict` counts for models of engines.

        Raises:
            CheckpointError: Something is missing or does not fit; on all ranks.
        """
        folder = self._folder_to_load(input_dir)
        is_sharded = self._is_sharded(folder)
        models, optimizers, hooks = list(self._models), self._optimizers, self._load_model_state_pre_hook
        if is_sharded:
            self._optimizers = [optimizer for optimizer in optimizers if not optimizer.is_sharded]
        self._load_model_state_pre_hook = self._with_whole_models(hooks, writeback=True)
        handle = self.register_load_state_pre_hook(
            partial(self._take_ours, models, is_sharded, load_model_func_kwargs)
        )
        try:
            super().load_state(folder, load_kwargs, **load_model_func_kwargs)
        finally:
            handle.remove()
            self._optimizers, self._load_model_state_pre_hook = optimizers, hooks
        for engine in self.living_engines()[:1]:
            # Where there are more ranks than before, some have found no file with Accelerate's counter.
            self.step = engine.collectives.broadcast_json(self.step)

    def _take_ours(
        self, models: list[Any], is_sharded: bool, kwargs: dict[str, Any], remaining: list[Any], folder: str
    ) -> None:
        """Load models, as the last hook before Accelerate would, and take them off its list.

        Args:
            models: All that were prepared.
            is_sharded: The kind of state.
            kwargs: For loading a model's weights.
            remaining: Those that no hook of the user's has loaded.
            folder: Where the state is.
        """
        if is_sharded:
            self._load_folders(
                [engine for model in models if (engine := engine_of(model)) is not None], folder
            )
            remaining[:] = [model for model in remaining if engine_of(model) is None]
            return
        extras = self._read_extras(folder)
        for number, model in enumerate(remaining):
            place = next(place for place, known in enumerate(models) if known is model)
            of_model = extras[place] if place < len(extras) else {}
            _load_whole(model, Path(folder), number, of_model, strict=kwargs.get("strict", True))
        remaining.clear()

    def _load_folders(self, engines: list[ZeroEngine], folder: str) -> None:
        names = [folder_of(folder, number) for number in range(len(engines))]
        self._on_rank_0(lambda: _require_folders(folder, names))
        for engine, name in zip(engines, names, strict=True):
            engine.load_checkpoint(name, rng=False)  # Accelerate's own files have the generators' states

    def _is_sharded(self, folder: str) -> bool:
        """Whether a state is of that kind, as rank 0 finds it: others may see it later."""
        engines = self.living_engines()
        is_there = folder_of(folder, 0).is_dir()
        return bool(engines[0].collectives.broadcast_json(is_there)) if engines else is_there

    def _read_extras(self, folder: str) -> list[dict[str, Any]]:
        """Return the extras of every model on rank 0, and those that are no tensors on all ranks."""
        path = Path(folder, EXTRAS_NAME)
        engines = self.living_engines()
        if not engines:
            return []
        collectives = engines[0].collectives
        is_first = collectives.rank == 0
        read: list[dict[str, Any]] = (
            agreed(collectives, lambda: _load_extras(path) if is_first and path.is_file() else []) or []
        )
        scales = collectives.broadcast_json([extras.get("loss_scaler") for extras in read])
        masters = [extras.get("masters", {}) for extras in read] if is_first else [{} for _ in scales]
        return [{"loss_scaler": s, "masters": m} for s, m in zip(scales, masters, strict=True)]

    # -- helpers --

    def _folder_to_load(self, input_dir: str | None) -> str:
        """Return the folder that is asked for, or the latest of those that were named automatically."""
        if input_dir is not None or not self.project_configuration.automatic_checkpoint_naming:
            return str(Path(input_dir).expanduser()) if input_dir is not None else _no_folder()
        folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
        return str(
            max(folders, key=lambda path: int(path.name.rpartition("_")[2]), default=None) or _no_folder()
        )

    def _with_whole_models(self, hooks: OrderedDict[int, Any], *, writeback: bool) -> OrderedDict[int, Any]:
        """Return a user's hooks, to be called while parameters are whole; what they write is kept or not."""
        return OrderedDict((key, partial(self._call_whole, hook, writeback)) for key, hook in hooks.items())

    def _call_whole(self, hook: Any, writeback: bool, *args: Any) -> None:
        with ExitStack() as stack:
            for engine in self.living_engines():
                if writeback or engine.config.shards_params:
                    stack.enter_context(engine.unsharded_params(writeback=writeback))
            hook(*args)

    def _on_rank_0(self, work: Callable[[], object]) -> None:
        """Have rank 0 do something; all ranks raise what it raises. Where no engine is, nothing is done."""
        for engine in self.living_engines()[:1]:
            agreed(engine.collectives, work if engine.collectives.rank == 0 else lambda: None)


def _require_folders(folder: str, names: list[Path]) -> None:
    there = folders_in(folder)
    if sorted(names) != there:
        raise CheckpointError(
            what=f"{folder} holds {len(there)} models, and {len(names)} were prepared.",
            why="Each has a folder of its own, by its place among those that were prepared.",
            fix="Prepare the same models in the same order as when the state was saved.",
        )


def _no_folder() -> str:
    raise CheckpointError(
        what="load_state was given no folder, and there is none that was named automatically.",
        why="Folders are named and found automatically with automatic_checkpoint_naming only.",
        fix="Pass the folder that save_state returned.",
    )


def _load_extras(path: Path) -> list[dict[str, Any]]:
    extras: list[dict[str, Any]] = torch.load(path, map_location="cpu", weights_only=True)
    return extras


def _load_whole(model: nn.Module, folder: Path, number: int, extras: dict[str, Any], *, strict: bool) -> None:
    """Load a model from the file that plain Accelerate writes of it. Collective if it has an engine."""
    suffix = f"_{number}" if number else ""
    safe, plain = folder / f"model{suffix}.safetensors", folder / f"pytorch_model{suffix}.bin"
    engine = engine_of(model)
    if engine is None and safe.is_file():
        load_model(model, safe, strict=strict)
        return
    if engine is None:
        model.load_state_dict(load_plain(plain, map_location="cpu"), strict=strict)
        return
    is_first = engine.collectives.rank == 0
    weights = agreed(engine.collectives, lambda: _read_weights(engine, safe, plain) if is_first else {})
    masters = extras.get("masters") or {}
    precise = MorePreciseWeights(weights, masters.get) if masters else weights
    engine.load_full_state_dict(precise, strict=strict)
    if extras.get("loss_scaler"):
        engine.loss_scaler.load_state_dict(extras["loss_scaler"])


def _read_weights(engine: ZeroEngine, safe: Path, plain: Path) -> dict[str, Any]:
    """Read a file of whole weights; a tied weight, stored under one name, is returned under all."""
    if not safe.is_file() and not plain.is_file():
        raise CheckpointError(
            what=f"There is neither {safe} nor {plain.name}.",
            why="Every model that was prepared is loaded from a file of its own.",
            fix="Prepare the same models in the same order as when the state was saved.",
        )
    weights: dict[str, Any] = load_file(safe) if safe.is_file() else load_plain(plain, map_location="cpu")
    return under_all_names(engine.model, weights)


def under_all_names(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return weights of which a tied one is stored under one name, under all its names."""
    weights = dict(weights)
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in names_in(model).items():
        by_tensor.setdefault(id(tensor), []).append(name)
    for names in by_tensor.values():
        found = next((name for name in names if name in weights), None)
        if found is not None:
            weights |= dict.fromkeys(names, weights[found])
    return weights
