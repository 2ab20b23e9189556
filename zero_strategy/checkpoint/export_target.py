"""The folder that is exported into: whether it may be written, and how it is replaced at a stroke.

Called by `export`. It knows which files belong to an earlier output, and not what is in them.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.folders import sync_folder
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.staging import Staging, publish
from zero_strategy.checkpoint.weight_files import INDEX_NAMES, WEIGHT_FILE
from zero_strategy.errors import CheckpointError

MARKER_NAME = "zero_strategy.json"  # in every folder written here; says what the weights are of


class Marker(NamedTuple):
    """What the weights of a folder are of."""

    checkpoint_id: str | None  # None: of a model in training
    model: str  # a hash of the names and shapes of its parameters


def check_target(target: Path, own: Marker, *, force: bool) -> None:
    """Check that a folder may be written.

    Args:
        target: The folder, or where it is to be.
        own: What is to be written.
        force: Whether it may hold anything else than an earlier output of the same.

    Raises:
        CheckpointError: It holds something that would be lost, or is no folder.
    """
    if target.exists() and not target.is_dir():
        raise not_written(target, "it is a file")
    if _holds_checkpoints(target):
        raise CheckpointError(
            what=f"{target} holds a checkpoint, or several.",
            why="Weights beside them would look like a part of them, and be deleted with them.",
            fix="Pass another folder.",
        )
    inside = next((path for path in target.parents if (path / MANIFEST_NAME).exists()), None)
    if inside is not None:
        raise CheckpointError(
            what=f"{target} is inside the checkpoint {inside}.",
            why="What is in its folder is moved and deleted with it.",
            fix="Pass another folder.",
        )
    if force or not target.exists() or not any(target.iterdir()):
        return
    found = _read_marker(target)
    if found == own:
        return  # a second run: what is replaced can be written again at any time
    what, why = f"{target} is not empty, and was not written from this source.", "Files in it might be lost"
    if found is not None:
        origin = "a model in training" if own.checkpoint_id else "another model in training"
        if found.checkpoint_id:
            origin = f"checkpoint {found.checkpoint_id}"
        what, why = f"{target} holds weights of {origin}.", "They would be replaced by others"
    names = ", ".join(sorted(path.name for path in target.iterdir())[:5])
    raise CheckpointError(
        what=what,
        why=f"{why}: {names}.",
        fix="Pass a new folder, or remove what is there. `zero-strategy consolidate` takes --force to "
        "replace weights and files of equal names.",
    )


def put_in_place(staging: Staging) -> None:
    """Put the finished folder in its place: by one rename where that is free, else file by file.

    File by file, the index of an earlier output goes first and the new one comes last but for the marker: who
    is stopped in between leaves a folder that does not load, never one that mixes old and new weights.

    Raises:
        CheckpointError: Something else has got there first.
        OSError: The system refuses.
    """
    sync_folder(staging.target)
    target = staging.final
    if not target.exists() or not any(target.iterdir()):
        publish(staging)
        return
    last = (*INDEX_NAMES, MARKER_NAME)
    written = sorted(
        staging.target.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1
    )
    for name in INDEX_NAMES:
        if (staging.target / name).exists():
            (target / name).unlink(missing_ok=True)
    for path in written:
        destination = target / path.name
        if path.is_dir() and destination.is_dir():
            shutil.rmtree(destination)
        os.replace(path, destination)
    names = {path.name for path in written}
    for path in target.iterdir():
        if path.name not in names and WEIGHT_FILE.fullmatch(path.name):
            path.unlink()  # an earlier output had more files; beside the new ones they would be loaded too
    sync_folder(target)


def not_written(target: Path, why: str) -> CheckpointError:
    """Return the error of a folder that could not be written."""
    return CheckpointError(
        what=f"The folder {target} could not be written.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix="Choose a folder with enough space that you may write to.",
    )


def _holds_checkpoints(target: Path) -> bool:
    """Whether a folder is a checkpoint or the outer one of several."""
    return any(path.exists() for path in (target / MANIFEST_NAME, *target.glob(f"*/{MANIFEST_NAME}")))


def _read_marker(target: Path) -> Marker | None:
    """Return what a folder was written from; None: it was not written here."""
    if not (target / MARKER_NAME).is_file():
        return None
    try:
        marker = json.loads((target / MARKER_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or "checkpoint_id" not in marker:
        return None
    return Marker(marker["checkpoint_id"], marker.get("model", ""))
