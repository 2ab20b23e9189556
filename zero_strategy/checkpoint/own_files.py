"""Which names in a checkpoint folder are of saves, and their removal; everything else is somebody else's.

Used by `manifest`, whose commit deletes what earlier saves left, and by whoever tidies up or deletes a
checkpoint. It goes by names and reads nothing but the id in a manifest.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from pathlib import Path

MANIFEST_NAME = "manifest.json"

_OWN_FILE = re.compile(
    r"rank-\d{5,}-of-\d{5,}-(?P<id>[0-9a-f]{16})\.safetensors"
    r"|manifest\.json(\.(?P<its_id>[0-9a-f]{16})\.tmp)?"
)


def is_own_file(path: Path) -> bool:
    """Whether a save has written something, by its name."""
    return _OWN_FILE.fullmatch(path.name) is not None


def remove_own_files(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete what saves have written into a folder, but for some names, and nothing else.

    Raises:
        OSError: Something could not be deleted.
    """
    for path in folder.iterdir():
        if path.name not in keep and is_own_file(path):
            path.unlink(missing_ok=True)


def remove_save(folder: Path, checkpoint_id: str) -> None:
    """Delete the files of one save, unless they have become the checkpoint: it may end at any moment.

    Raises:
        OSError: Something could not be read or deleted.
    """
    with contextlib.suppress(FileNotFoundError):
        if checkpoint_id.encode() in (folder / MANIFEST_NAME).read_bytes():
            return
    for path in folder.iterdir():
        match = _OWN_FILE.fullmatch(path.name)
        if match and checkpoint_id in (match["id"], match["its_id"]):
            path.unlink(missing_ok=True)


def saves_in(folder: Path) -> set[str]:
    """Return the ids of the saves that have files in a folder, apart from its manifest."""
    found = (_OWN_FILE.fullmatch(path.name) for path in folder.iterdir())
    return {match["id"] or match["its_id"] for match in found if match} - {None}


def foreign_files(folder: Path) -> list[str]:
    """Return the names in a folder that no save has written."""
    return sorted(path.name for path in folder.iterdir() if not is_own_file(path))
