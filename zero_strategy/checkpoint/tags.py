"""Checkpoints under tags in one outer folder: which one is meant, which is the latest, which are too old.

`OUTER/latest` is a text file that holds the tag of the checkpoint saved last, as DeepSpeed has it, so
`OUTER/<tag>` is what a resumed run loads. Called by whoever reads a checkpoint and by `save`, on one rank. It
knows of a checkpoint what its manifest says, and reads no data.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.folders import replace_file
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.own_files import MANIFEST_NAME, foreign_files, remove_own_files, saves_in
from zero_strategy.checkpoint.staging import delete, if_unused
from zero_strategy.errors import CheckpointError, ConfigError, first_line, some
from zero_strategy.log import log_event

LATEST_NAME = "latest"
MAX_TAG_BYTES = 200  # a file name has at most 255, and a save adds 26 to this one
LEFT_S = 3600.0  # a temporary file as old as this is of a save that was killed: it lives for some ms


class Complete(NamedTuple):
    """A checkpoint under a tag, all of whose files are there in full length."""

    tag: str
    manifest: Manifest


# -- reading --


def choose(path: str | os.PathLike[str], tag: str | None = None) -> str | None:
    """Find out which checkpoint is meant.

    Args:
        path: A checkpoint's folder, or the outer folder of several.
        tag: Of one in the outer folder; None: the one that `latest` names, else the only one there is.

    Returns:
        The tag of the checkpoint in `path`; None: `path` is the checkpoint itself, or nothing at all.

    Raises:
        CheckpointError: There is none of that tag, `latest` names none, or several might be meant.
    """
    outer = Path(path)
    is_itself = (outer / MANIFEST_NAME).exists()
    if tag is not None:
        check_tag(tag)
        if is_itself:
            raise CheckpointError(
                what=f"{outer} is a checkpoint, and the tag {tag!r} was asked for in it.",
                why=f"A tag is the name of a checkpoint's folder inside another one; {outer} has a "
                f"{MANIFEST_NAME} of its own.",
                fix="Leave the tag out, or pass the outer folder.",
            )
        if not (outer / tag).is_dir():
            raise _nothing_there(outer, f"There is no checkpoint {tag!r} in {outer}.", "It was asked for")
        return tag
    if is_itself or not outer.is_dir():
        return None
    named = read_latest(outer)
    if named is not None:
        if not (outer / named).is_dir():
            what = f"{outer / LATEST_NAME} names {named!r}, and there is no such checkpoint."
            raise _nothing_there(outer, what, "It was moved, deleted, or the file was damaged")
        return named
    tags = tags_in(outer)
    if len(tags) > 1:
        raise _ambiguous(outer, tags)
    return tags[0] if tags else None


def read_latest(outer: Path) -> str | None:
    """Return the tag in `OUTER/latest`; None: there is no such file.

    Raises:
        CheckpointError: What it holds is no tag.
    """
    path = outer / LATEST_NAME
    if not path.is_file():
        return None
    try:
        content = path.read_bytes()[: MAX_TAG_BYTES + 100]
        tag = content.decode().strip()
        check_tag(tag)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        said = error.strerror if isinstance(error, OSError) else f"it holds {content[:60]!r}"
        raise _nothing_there(
            outer, f"{path} cannot be used: {said}.", "It holds the name of a folder"
        ) from error
    return tag


def tags_in(outer: Path) -> list[str]:
    """Return the names of the folders in `outer` that have a manifest, sorted; hidden ones are of no save."""
    with contextlib.suppress(OSError):
        return sorted(
            path.parent.name for path in outer.glob(f"*/{MANIFEST_NAME}") if path.parent.name[0] != "."
        )
    return []


def complete_in(outer: Path) -> list[Complete]:
    """Return the checkpoints in `outer` whose files are all there in full length, oldest first; no links."""
    found = []
    for tag in _own_tags_in(outer):
        with contextlib.suppress(CheckpointError, OSError):
            manifest = Manifest.read(outer / tag, check_files=False)
            sizes = {name: (outer / tag / name).stat().st_size for name in manifest.files}
            if all(sizes[name] == record.num_bytes for name, record in manifest.files.items()):
                found.append(Complete(tag, manifest))
    return sorted(found, key=lambda complete: complete.manifest.created)


def with_others(error: CheckpointError, folder: Path) -> CheckpointError:
    """Return an error about a checkpoint that also names those beside it which can be loaded instead."""
    others = [complete.tag for complete in complete_in(folder.parent) if complete.tag != folder.name]
    if not others or not (folder.parent / LATEST_NAME).exists():
        return error
    fix = f"{error.fix} Complete in {folder.parent}: {some(others[::-1])}; pass one as the tag."
    return CheckpointError(what=error.what, why=error.why, fix=fix)


# -- writing --


def check_tag(tag: str) -> None:
    """Check that a tag can be the name of a folder.

    Raises:
        ConfigError: It cannot.
    """
    is_text = isinstance(tag, str) and tag.isprintable() and tag == tag.strip()
    is_name = is_text and not set(tag) & {"/", "\\"} and len(os.fsencode(tag)) <= MAX_TAG_BYTES
    if not is_name or not tag or tag.startswith(".") or tag == LATEST_NAME:
        raise ConfigError(
            what=f"{tag!r} is no tag for a checkpoint.",
            why=f"A tag becomes the name of a folder beside the file {LATEST_NAME!r}: a string of at most "
            f"{MAX_TAG_BYTES} bytes without '/', not hidden, with no blanks around it.",
            fix='Pass something like tag="step-100".',
        )


def check_outer(outer: Path, tag: str | None) -> None:
    """Check, before anything is written, that a save with or without a tag is found again by a load.

    Raises:
        CheckpointError: It would hide what is there, or be hidden by it.
    """
    if tag is not None and (outer / MANIFEST_NAME).exists():
        what, fix = (
            f"{outer} is itself a checkpoint, and {tag!r} was to be saved inside it.",
            "Use another folder.",
        )
    elif tag is not None and (outer / LATEST_NAME).is_dir():
        what, fix = f"{outer / LATEST_NAME} is a folder.", "Rename it, or use another folder."
    elif tag is None and (outer / LATEST_NAME).is_file():
        what = f"{outer} holds checkpoints under tags, and a checkpoint was to be saved into it without one."
        fix = "Pass a tag, or another folder."
    else:
        return
    raise CheckpointError(
        what=what, why=f"Who loads {outer} later could not tell which checkpoint is meant.", fix=fix
    )


def point_to(outer: Path, tag: str, checkpoint_id: str) -> None:
    """Make `OUTER/latest` name a checkpoint, in one step.

    Args:
        outer: The folder that holds it.
        tag: Its name.
        checkpoint_id: Its id, so that two saves do not write under one name.

    Raises:
        CheckpointError: It cannot be written; it names what it named before.
    """
    try:
        temporary = outer / f".{LATEST_NAME}.{checkpoint_id}.tmp"
        replace_file(outer / LATEST_NAME, f"{tag}\n".encode(), temporary)
    except OSError as error:
        raise CheckpointError(
            what=f"{outer / LATEST_NAME} could not be written: {error.strerror or error}.",
            why=f"The checkpoint {tag!r} is complete, and whoever loads {outer} still gets the one before.",
            fix=f"Check free space, quota and permissions. To load it, pass tag={tag!r}.",
        ) from error


def remove_superseded(outer: Path) -> None:
    """Delete what saves that were killed have left in checkpoints which they were to replace, and beside."""
    for path in outer.glob(f".{LATEST_NAME}.*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > LEFT_S:
                path.unlink()
    for tag in _own_tags_in(outer):
        folder = outer / tag
        if len(saves_in(folder)) > 1:
            if_unused(folder, partial(_remove_superseded, folder))


def remove_oldest(outer: Path, newest: str, keep_last: int) -> None:
    """Delete the oldest complete checkpoints until so many are left; what cannot be deleted stays.

    Neither the newest nor what holds files of others, is damaged or being saved into is deleted, nor what a
    link beside it (`best`, say) leads to. Who reads one of the others meanwhile finds its files gone.

    Args:
        outer: The folder that holds them.
        newest: The tag that was saved last.
        keep_last: How many to keep, at least 1.
    """
    tags = tags_in(outer)
    if len(tags) <= keep_last or newest not in tags:
        return
    kept = {newest, *_linked_in(outer)}
    others = [complete for complete in complete_in(outer) if complete.tag not in kept]
    for tag, _ in others[: max(0, len(others) + 1 - keep_last)]:
        folder = outer / tag
        foreign = foreign_files(folder)
        if foreign:
            log_event(
                f"{folder} is kept beyond keep_last={keep_last}: {some(foreign)} in it is not of a save."
            )
            continue
        try:
            delete(folder)
        except (CheckpointError, OSError) as error:
            log_event(f"{folder} is kept beyond keep_last={keep_last}: {first_line(error)}")


def _own_tags_in(outer: Path) -> list[str]:
    """Return the tags of folders that are there themselves: what a link leads to is not ours to change."""
    return [tag for tag in tags_in(outer) if not (outer / tag).is_symlink()]


def _linked_in(outer: Path) -> set[str]:
    """Return the tags that a link in `outer` leads to."""
    real = os.path.realpath(outer)
    targets = (os.path.realpath(path) for path in outer.iterdir() if path.is_symlink())
    return {os.path.basename(target) for target in targets if os.path.dirname(target) == real}


def _remove_superseded(folder: Path) -> None:
    remove_own_files(folder, {MANIFEST_NAME, *Manifest.read(folder, check_files=False).files})


# -- errors --


def _ambiguous(outer: Path, tags: list[str]) -> CheckpointError:
    return CheckpointError(
        what=f"{outer} holds {len(tags)} checkpoints: {some(tags)}.",
        why=f"None of them is named by a file {LATEST_NAME!r}, so which one is meant is not known.",
        fix="Pass the folder of one of them, or its tag.",
    )


def _nothing_there(outer: Path, what: str, why: str) -> CheckpointError:
    complete = [complete.tag for complete in complete_in(outer)][::-1]
    if complete:
        return CheckpointError(
            what=what,
            why=f"{why}. Complete, newest first: {some(complete)}.",
            fix="Pass one of these as the tag, or its folder.",
        )
    try:
        found = sorted(path.name for path in outer.iterdir())
    except OSError as error:
        found = [str(error.strerror)]
    return CheckpointError(
        what=what,
        why=f"{why}. There is no complete checkpoint in {outer}; found: {some(found)}.",
        fix="Pass the folder given to save_checkpoint().",
    )
