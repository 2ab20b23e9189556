"""What a `Trainer` saves and loads, when its model is sharded: the files of plain transformers.

The functions stand in for methods of `Trainer`; see methods.py. They must not know buckets.

[Note: Two kinds of checkpoint]
"full": `checkpoint-N` is what any Trainer writes, and reads: whole weights, `optimizer.pt`, `scheduler.pt`.
All ranks take part, rank 0 writes and reads. What those files cannot hold (fp32 masters of 16-bit weights,
the engine's loss scale) is in `EXTRAS_NAME` beside them.
"sharded": weights and optimizer are in a folder `zero_model` there, of which every rank writes its part.
Weights that are loaded before the model is sharded wait until the optimizer is loaded, which is after.
`save_model`, when the user calls it, writes whole weights all the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from zero_strategy.accelerate.checkpoints import under_all_names
from zero_strategy.accelerate.gradients import engine_of
from zero_strategy.accelerate.state_files import EXTRAS_NAME, FOLDER_NAME
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError
from zero_strategy.front_ends.upstream import Stock


def save_model(
    trainer: Any, stock: Stock, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """Write a model as `from_pretrained` reads it. Collective.

    Args:
        trainer: Whose model.
        stock: Saves a model that is whole on every rank.
        output_dir: As for `Trainer`.
        _internal_call: As for `Trainer`.

    Raises:
        CheckpointError: It cannot be written; on all ranks.
    """
    engine = engine_of(trainer.model)
    if engine is None:
        stock(output_dir, _internal_call)
        return
    folder = trainer.args.output_dir if output_dir is None else output_dir
    if _internal_call and trainer.accelerator.zero_plugin.state_dict_type == "sharded":
        _save_shards(trainer, engine, Path(folder))
        return
    with _adapters_alone(trainer.model) as state:
        if state is None:
            state = trainer.accelerator.get_state_dict(trainer.model)
        agreed(engine.collectives, lambda: trainer._save(folder, state_dict=state))
    if trainer.args.push_to_hub and not _internal_call:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def save_optimizer_and_scheduler(trainer: Any, stock: Stock, output_dir: str) -> None:
    """Write the states of optimizer and scheduler as plain torch has them. Collective.

    Args:
        trainer: Whose states.
        stock: Writes them where there is no engine.
        output_dir: The folder.

    Raises:
        CheckpointError: They cannot be written; on all ranks.
    """
    engine = engine_of(trainer.model)
    if engine is None:
        stock(output_dir)
        return
    is_sharded = trainer.accelerator.zero_plugin.state_dict_type == "sharded"
    state = {} if is_sharded else trainer.optimizer.state_dict()
    extras = {} if is_sharded else trainer.accelerator.extras_of(trainer.model)

    def write() -> None:
        if engine.collectives.rank:
            return
        if not is_sharded:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
        torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))
        if extras:
            torch.save(extras, Path(output_dir, EXTRAS_NAME))

    agreed(engine.collectives, write)


def load_from_checkpoint(
    trainer: Any, stock: Stock, resume_from_checkpoint: str, model: nn.Module | None = None
) -> None:
    """Load weights: into shards, if the model has been sharded. Collective then.

    Args:
        trainer: Whose model.
        stock: Loads into a model that is whole on every rank.
        resume_from_checkpoint: The folder.
        model: As for `Trainer`.

    Raises:
        CheckpointError: There are none, or they do not fit; on all ranks.
    """
    target = trainer.model if model is None else model
    engine = engine_of(target)
    if _shards_in(resume_from_checkpoint).is_dir():
        return  # see [Note: Two kinds of checkpoint]
    if engine is None:
        stock(resume_from_checkpoint, model)
    elif _has_adapters(target):
        # Adapters are made and filled by PEFT, which must find whole parameters.
        with engine.unsharded_params(writeback=True):
            stock(resume_from_checkpoint, model)
    else:
        _load_weights(trainer, engine, resume_from_checkpoint)


def load_best_model(trainer: Any, stock: Stock) -> None:
    """Load the weights of the best checkpoint. Collective.

    Args:
        trainer: Whose model.
        stock: Loads into a model that is whole on every rank.

    Raises:
        CheckpointError: There are none, or they do not fit; on all ranks.
    """
    engine = engine_of(trainer.model)
    folder = _shards_in(trainer.state.best_model_checkpoint)
    if engine is None:
        stock()
    elif engine.collectives.broadcast_json(folder.is_dir()):
        engine.load_checkpoint(folder, weights_only=True)
    elif _has_adapters(trainer.model):
        with engine.unsharded_params(writeback=True):
            stock()
    else:
        _load_weights(trainer, engine, trainer.state.best_model_checkpoint)


def load_optimizer_and_scheduler(trainer: Any, stock: Stock, checkpoint: str | None) -> None:
    """Load the states of optimizer and scheduler, of plain transformers too. Collective.

    Args:
        trainer: Whose states.
        stock: Loads them where there is no engine.
        checkpoint: The folder, or None.

    Raises:
        CheckpointError: They cannot be read, or do not fit; on all ranks.
    """
    engine = engine_of(trainer.model)
    if engine is None or checkpoint is None:
        stock(checkpoint)
        return
    folder, shards = Path(checkpoint), _shards_in(checkpoint)
    names = (SCHEDULER_NAME,) if shards.is_dir() else (OPTIMIZER_NAME, SCHEDULER_NAME)
    is_there = all((folder / name).is_file() for name in names)
    is_there, is_sharded = engine.collectives.broadcast_json([is_there, shards.is_dir()])
    if is_sharded:
        engine.load_checkpoint(shards, weights_only=not is_there, rng=False)  # a Trainer keeps its own
    if not is_there:  # saved with save_only_model
        return
    if not is_sharded:
        _load_whole_states(trainer, engine, folder)
    schedule = agreed(engine.collectives, lambda: _read(folder / SCHEDULER_NAME))
    trainer.lr_scheduler.load_state_dict(schedule)


# -- helpers --


@contextmanager
def _adapters_alone(model: nn.Module) -> Iterator[dict[str, Any] | None]:
    """Gather the adapters of a model, if it has some, without what they are put around. Collective."""
    if not _has_adapters(model):
        yield None
        return
    from zero_strategy.peft.adapters import adapter_state_dict, whole_for_saving

    state = adapter_state_dict(model)
    with whole_for_saving(model):
        yield state


def _shards_in(folder: str | Path) -> Path:
    return Path(folder, FOLDER_NAME)


def _save_shards(trainer: Any, engine: ZeroEngine, folder: Path) -> None:
    """Write weights and optimizer, every rank its part, and what else a Trainer's folder has of a model."""
    engine.save_checkpoint(_shards_in(folder), weights_only=trainer.args.save_only_model)

    def write() -> None:
        if engine.collectives.rank:
            return
        for part in (trainer.model, trainer.processing_class):
            config = getattr(part, "config", part)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)
        torch.save(trainer.args, folder / TRAINING_ARGS_NAME)

    agreed(engine.collectives, write)


def _load_whole_states(trainer: Any, engine: ZeroEngine, folder: Path) -> None:
    _load_extras(engine, folder / EXTRAS_NAME)
    is_first = engine.collectives.rank == 0
    state = agreed(engine.collectives, lambda: _read(folder / OPTIMIZER_NAME) if is_first else {})
    trainer.optimizer.load_state_dict(state)


def _has_adapters(model: nn.Module) -> bool:
    return hasattr(model, "peft_config")


def _load_weights(trainer: Any, engine: ZeroEngine, folder: str) -> None:
    is_first = engine.collectives.rank == 0
    weights = agreed(
        engine.collectives,
        lambda: under_all_names(engine.model, read_weights(Path(folder))) if is_first else {},
    )
    result = engine.load_full_state_dict(weights, strict=False)
    trainer._issue_warnings_after_load(result)


def read_weights(folder: Path) -> dict[str, Any]:
    """Return the weights in a folder that `save_pretrained` has written, in one file or several.

    Raises:
        CheckpointError: There are none.
    """
    for name, index_name, read in (
        (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, load_file),
        (WEIGHTS_NAME, WEIGHTS_INDEX_NAME, _read),
    ):
        if (folder / name).is_file():
            return dict(read(folder / name))
        if (folder / index_name).is_file():
            files = sorted(set(json.loads((folder / index_name).read_text())["weight_map"].values()))
            return {key: value for file in files for key, value in read(folder / file).items()}
    raise CheckpointError(
        what=f"{os.fspath(folder)} has no weights.",
        why=f"There is neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}, nor an index of several.",
        fix="Name a folder checkpoint-N that a Trainer has written.",
    )


def _load_extras(engine: ZeroEngine, path: Path) -> None:
    """Load what plain files cannot hold, if it is there."""
    collectives = engine.collectives
    is_first = collectives.rank == 0
    extras = agreed(collectives, lambda: _read(path) if is_first and path.is_file() else {})
    has_masters, scale = collectives.broadcast_json(["masters" in extras, extras.get("loss_scaler")])
    if has_masters:
        engine.load_full_state_dict(extras.get("masters", {}), strict=False)
    if scale:
        engine.loss_scaler.load_state_dict(scale)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content
