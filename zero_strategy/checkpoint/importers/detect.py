"""What a folder is: the one place that tells the formats apart, and names what cannot be imported.

Called by `run`. It looks at names of files only; whether the files are whole is for the readers to find out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zero_strategy.checkpoint.importers import deepspeed_files
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.tags import LATEST_NAME, MAX_TAG_BYTES, check_tag
from zero_strategy.errors import CheckpointError, ConfigError, some


class Source(NamedTuple):
    """A folder to import."""

    format: str
    folder: Path  # that holds the files of one save


class _Other(NamedTuple):
    """A kind of folder that is recognised and not imported."""

    title: str
    is_one: Callable[[Path], bool]
    advice: str


def _has(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: next(folder.glob(pattern), None) is not None


_OTHERS = (
    _Other(
        "a checkpoint of zero_strategy",
        _has(MANIFEST_NAME),
        "It needs no import: engine.load_checkpoint takes it at any world size and stage.",
    ),
    _Other(
        "a universal checkpoint of DeepSpeed",
        lambda folder: (folder / "latest_universal").is_file() or _has("zero/*/fp32.pt")(folder),
        "Import the checkpoint that it was converted from.",
    ),
    _Other(
        "a checkpoint of torch.distributed.checkpoint (DCP)",
        _has(".metadata"),
        "Load it with torch.distributed.checkpoint into a plain model, and pass its state dict to "
        "engine.load_full_state_dict.",
    ),
    _Other(
        "a folder of Hugging Face weights",
        _has("*.safetensors"),
        "Load it with from_pretrained() before the engine is made: it holds weights only.",
    ),
    _Other(
        "a folder of torch files",
        lambda folder: any(_has(pattern)(folder) for pattern in ("*.bin", "*.ckpt", "*.pt", "*.pth")),
        "Load a single file with torch.load(...), and pass its weights to engine.load_full_state_dict.",
    ),
)


def find_source(given: Path, tag: str | None) -> Source:
    """Find out what a folder is, and which of the saves in it is meant.

    Args:
        given: A folder of one save, or one above it that has a `latest` file or one save.
        tag: The folder below `given` to take, instead of the one `latest` names.

    Raises:
        CheckpointError: It is no folder that can be imported; the text says what it is.
    """
    if not given.is_dir():
        is_there = given.exists()
        raise _not_importable(
            f"{given} {'is a file' if is_there else 'does not exist'}.",
            "A checkpoint of several ranks is a folder.",
            "Pass the folder that was given to DeepSpeed's save_checkpoint, or the folder of a tag in it."
            if not is_there
            else "A single file holds whole weights: read it with torch.load(..., weights_only=True), and "
            "pass them to engine.load_full_state_dict.",
        )
    for folder in _candidates(given, tag):
        if deepspeed_files.is_deepspeed(folder):
            return Source("deepspeed", folder)
    looked_at = given / tag if tag and (given / tag).is_dir() else given
    for other in _OTHERS:
        if other.is_one(looked_at):
            what = f"{looked_at} is {other.title}, which `zero-strategy import` does not read."
            raise _not_importable(what, f"It holds {_listed(looked_at)}.", other.advice)
    raise _not_importable(
        f"{looked_at} is nothing that can be imported.",
        f"It holds {_listed(looked_at)}.",
        "Pass a checkpoint folder of DeepSpeed (ZeRO stage 1, 2 or 3), or the folder of a tag in it.",
    )


def _candidates(given: Path, tag: str | None) -> Iterator[Path]:
    """Yield the folder that may be meant: the tag's, the given one, the one `latest` names, the only one."""
    if tag is not None:
        if not (given / tag).is_dir():
            raise _not_importable(
                f"{given} has no tag {tag!r}.", f"It holds {_listed(given)}.", "Choose one of these."
            )
        yield given / tag
        return
    yield given
    latest = given / LATEST_NAME
    if latest.is_file():
        yield _named_by(latest)
        return
    inner = sorted(path for path in given.iterdir() if path.is_dir() and deepspeed_files.is_deepspeed(path))
    if len(inner) > 1:
        raise _not_importable(
            f"{given} holds {len(inner)} checkpoints of DeepSpeed, and no file {LATEST_NAME!r} names one.",
            f"They are: {some(path.name for path in inner)}.",
            f"Choose one with --tag, such as --tag {inner[-1].name}.",
        )
    yield from inner


def _named_by(latest: Path) -> Path:
    tag = latest.read_text(encoding="utf-8", errors="replace").strip()[:MAX_TAG_BYTES]
    with suppress(ConfigError):  # a name such as ".." would lead elsewhere
        check_tag(tag)
        if (latest.parent / tag).is_dir():
            return latest.parent / tag
    raise _not_importable(
        f"{latest} names the tag {tag!r}, and there is no such folder beside it.",
        f"Beside it there is {_listed(latest.parent)}.",
        "Copy the whole folder, or choose a tag that is there with --tag.",
    )


def _listed(folder: Path) -> str:
    return some(sorted(path.name + "/" * path.is_dir() for path in folder.iterdir()))


def _not_importable(what: str, why: str, fix: str) -> CheckpointError:
    return CheckpointError(what=what, why=why, fix=fix)
