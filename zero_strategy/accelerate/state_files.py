"""The files and folders of a saved state that are ours or depend on its kind; removal of an earlier state's.

A state may be saved into the folder of an earlier one, of the other kind or of more models. What that left
would be loaded with the new state, or instead of it, without a word. Called by checkpoints.py, which says
what it has written; names only, never contents.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from zero_strategy.checkpoint.own_files import foreign_files
from zero_strategy.checkpoint.staging import delete
from zero_strategy.errors import CheckpointError, some

EXTRAS_NAME = "zero_strategy.bin"
FOLDER_NAME = "zero_model"

_FOLDER = re.compile(rf"{FOLDER_NAME}(_\d+)?")
# Of Accelerate: weights of a model in either format, states of an optimizer.
_WHOLE = re.compile(r"(model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin|optimizer(_\d+)?\.bin)")


def folder_of(state: str | Path, number: int) -> Path:
    """Return the folder of a model in a sharded state, by its place among those that were prepared."""
    return Path(state, _numbered(FOLDER_NAME, number))


def folders_in(state: str | Path) -> list[Path]:
    """Return the folders of all models in a sharded state."""
    return sorted(path for path in Path(state).iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name))


def whole_names(num_models: int, num_optimizers: int, *, is_safe: bool) -> set[str]:
    """Return the names of the files in which Accelerate writes whole models and optimizers.

    Args:
        num_models: How many models it was given.
        num_optimizers: How many optimizers.
        is_safe: Whether weights are written as safetensors.
    """
    stem, end = ("model", ".safetensors") if is_safe else ("pytorch_model", ".bin")
    models = {_numbered(stem, number) + end for number in range(num_models)}
    return models | {_numbered("optimizer", number) + ".bin" for number in range(num_optimizers)}


def remove_others(state: str | Path, kept: Collection[str], *, keeps_whole: bool = False) -> None:
    """Delete what an earlier state has left beside the one that has just been written.

    Args:
        state: The folder of both.
        kept: The names of what was written.
        keeps_whole: Leave all files of whole models and optimizers, since hooks of the user's may have
            written some.

    Raises:
        CheckpointError: A folder of the earlier state holds something else too.
        OSError: Something could not be deleted.
    """
    for path in Path(state).iterdir():
        is_of_state = path.name == EXTRAS_NAME or (not keeps_whole and _WHOLE.fullmatch(path.name))
        if path.name in kept:
            continue
        if is_of_state and not path.is_dir():
            path.unlink()
        elif _FOLDER.fullmatch(path.name) and path.is_dir():
            _remove_folder(path)


def _remove_folder(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
        return
    foreign = foreign_files(folder)
    if foreign:
        raise CheckpointError(
            what=f"{folder} is of an earlier state in the same folder, and {some(foreign)} in it is not.",
            why="Left there, load_state would take it for a part of the state that has just been saved, "
            "which is complete otherwise. So it is deleted, but for what others have written.",
            fix="Move it out of the folder, then save again, or save each state into a folder of its own.",
        )
    delete(folder)


def _numbered(stem: str, number: int) -> str:
    return f"{stem}_{number}" if number else stem
