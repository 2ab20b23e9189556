"""The two kinds of checkpoints a front end writes: one file of whole tensors, or a folder of shards.

The file is the `CheckpointIO`'s, as with any strategy. The folder is the engine's own checkpoint; what a
framework or its user keeps beside weights and optimizers goes into its extra state, as one block that torch
has saved. Such blocks and files are unpickled with `weights_only=True` unless the user says otherwise, so
loading one runs no code. Called by the hooks of each front end, the Trainer's and Fabric's; must not know
either's hooks, and its messages hold for both.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor

from zero_strategy.bucket import Bucket
from zero_strategy.checkpoint.durable import CHUNK_BYTES
from zero_strategy.checkpoint.opened import OpenCheckpoint
from zero_strategy.checkpoint.staging import anything, delete
from zero_strategy.comm.together import agreed
from zero_strategy.engine import ZeroEngine
from zero_strategy.errors import CheckpointError, ConfigError, ZeroError
from zero_strategy.estimate import ADAM_STATE_BYTES, FP32_MASTER_BYTES
from zero_strategy.layout import nth_part
from zero_strategy.log import log_event, log_once

STATE_DICT_TYPES = ("full", "sharded")  # a file, a folder
MASTERS_KEY = "zero_strategy_masters"  # in a checkpoint file: fp32 weights under the names of the state dict
CONTENT_KEY = "lightning"  # of a folder's extra state: what the framework keeps, as torch has saved it

# Of whole state, above which folders are the default: rank 0 would have to hold as much at once, and to write
# it alone. A model of 0.8e9 parameters in fp32 with Adam is as large.
FULL_LIMIT_BYTES = 10 * 2**30

T = TypeVar("T")


def check_type(state_dict_type: str | None) -> None:
    """Refuse a kind of checkpoint that there is not; None leaves the choice to the size of the state.

    Raises:
        ConfigError: It is none of `STATE_DICT_TYPES`.
    """
    if state_dict_type is not None and state_dict_type not in STATE_DICT_TYPES:
        raise ConfigError(
            what=f"state_dict_type={state_dict_type!r} is not known.",
            why="'full' writes one file of whole tensors, which plain Lightning loads; 'sharded' a folder, "
            "into which every rank writes its part.",
            fix=f"Use one of {', '.join(map(repr, STATE_DICT_TYPES))}.",
        )


def check_async_save(async_save: Any, state_dict_type: str | None) -> None:
    """Refuse asynchronous saves of anything but folders.

    Raises:
        ConfigError: It is asked for without `state_dict_type="sharded"`, or is no bool.
    """
    if not isinstance(async_save, bool):
        raise ConfigError(
            what=f"async_save={async_save!r} is not known.",
            why="It says whether training goes on while a checkpoint folder is written.",
            fix="Use True or False.",
        )
    if async_save and state_dict_type != "sharded":
        raise ConfigError(
            what=f"async_save=True was given with state_dict_type={state_dict_type!r}.",
            why="Every rank writes its part of a folder beside its training; a single file is gathered on "
            "rank 0 and written by the CheckpointIO.",
            fix='Say state_dict_type="sharded", or leave async_save out. A file is written asynchronously by '
            "Lightning's AsyncCheckpointIO, of copies that rank 0 has memory for.",
        )


def prefers_folders(engine: ZeroEngine) -> bool:
    """Return whether the whole state is too large for one file, and say so once."""
    whole_bytes = sum(_whole_bytes(bucket, bool(engine.optimizers)) for bucket in engine.buckets)
    is_large = whole_bytes > FULL_LIMIT_BYTES
    log_once(
        f"Checkpoints are {'folders that every rank writes to' if is_large else 'single files'}: the whole "
        f"state has about {whole_bytes / 2**30:.1f} GiB, and folders are the default above "
        f"{FULL_LIMIT_BYTES / 2**30:g} GiB. state_dict_type='full' or 'sharded' decides otherwise."
    )
    return is_large


# -- folders --


def save_folder(
    engine: ZeroEngine, path: Any, content: dict[str, Any], *, weights_only: bool, asynchronous: bool
) -> None:
    """Write a folder. Collective.

    Args:
        engine: Its weights, masters and optimizers are stored, by every rank what it owns.
        path: A local path that all ranks share.
        content: What the framework keeps beside them; rank 0's counts.
        weights_only: Leave the optimizers out.
        asynchronous: Return as soon as the state has been copied. See `ZeroEngine.save_checkpoint`.

    Raises:
        CheckpointError: The path is remote or taken by a file, or something cannot be stored; on all ranks.
    """
    collectives = engine.collectives
    folder = agreed(collectives, lambda: _local_folder(path))
    packed = agreed(collectives, lambda: _pack(content, folder) if collectives.rank == 0 else None)
    extra = {CONTENT_KEY: packed}
    engine.save_checkpoint(folder, extra=extra, weights_only=weights_only, asynchronous=asynchronous)


def open_folder(
    engine: ZeroEngine, path: Any, *, weights_only: bool | None
) -> tuple[OpenCheckpoint, dict[str, Any]]:
    """Open a folder and return it with what the framework keeps in it. Collective.

    Args:
        engine: Takes the rest over, in the steps of `OpenCheckpoint`.
        path: The folder.
        weights_only: False lets the content hold objects of any class, and so run code.

    Raises:
        CheckpointError: It is no checkpoint, or holds other classes than torch loads safely; on all ranks.
    """
    opened = engine.open_checkpoint(_without_scheme(path))
    try:
        extra = opened.extra()
        packed = extra.get(CONTENT_KEY) if isinstance(extra, dict) else None
        if not isinstance(packed, Tensor):
            return opened, {}
        where = f"what {path} holds beside the weights"
        content: dict[str, Any] = agreed(
            engine.collectives, lambda: _load(io.BytesIO(packed.numpy().tobytes()), where, weights_only)
        )
    except BaseException:
        opened.close()
        raise
    return opened, content


def is_folder(path: Any) -> bool:
    """Whether a checkpoint is a folder; a path that does not exist is none."""
    return isinstance(path, str | os.PathLike) and os.path.isdir(_without_scheme(path))


def is_remote(path: Any) -> bool:
    """Whether a path is a URL of something else than the local file system."""
    return "://" in _without_scheme(path)


def refuse_storage_options(storage_options: Any) -> None:
    """Refuse what a folder has no use for.

    Raises:
        ConfigError: There are some.
    """
    if storage_options is not None:
        raise ConfigError(
            what="save_checkpoint was given storage_options, with state_dict_type='sharded'.",
            why="They are for a CheckpointIO, and a folder is not written through one.",
            fix="Leave them out, or use state_dict_type='full'.",
        )


# -- files --


def load_file(
    checkpoint_io: Any, path: Any, *, weights_only: bool | None, share: tuple[int, int]
) -> dict[str, Any]:
    """Read a file of whole tensors.

    Lightning's own reader would give every rank a copy; from a local file the tensors are memory-mapped
    instead.

    Args:
        checkpoint_io: Reads it, unless it is Lightning's own reader and the file a local one.
        path: The file.
        weights_only: False lets it hold objects of any class, and so run code.
        share: This rank and how many there are: each compares the CRCs of a part of a local file.

    Raises:
        CheckpointError: It is missing, damaged, or holds other classes than torch loads safely.
    """
    is_path = isinstance(path, str | os.PathLike)
    is_local = is_path and os.path.isfile(_without_scheme(path))
    if is_path and not is_local and os.path.exists(_without_scheme(path)):  # a pipe would be waited for
        raise CheckpointError(
            what=f"The checkpoint {path} is no ordinary file.",
            why="It is read in several places, and mapped into memory.",
            fix="Pass the path that a checkpoint was saved to.",
        )
    if is_local:
        _check_crcs(_without_scheme(path), f"the file {path}", share)
    if is_local and type(checkpoint_io).__name__ == "TorchCheckpointIO":
        return _load(_without_scheme(path), f"the file {path}", weights_only)
    try:
        content: dict[str, Any] = checkpoint_io.load_checkpoint(path, weights_only=weights_only)
    except FileNotFoundError as error:
        raise CheckpointError(
            what=f"The checkpoint {path} does not exist.",
            why="There is neither a file nor a folder of that name.",
            fix="Pass the path that the checkpoint was saved to; ModelCheckpoint has it in best_model_path.",
        ) from error
    except Exception as error:
        raise _not_loaded(path, f"the file {path}", error) from error
    return _require_dict(content, f"the file {path}")


def save_file(checkpoint_io: Any, path: Any, content: dict[str, Any], storage_options: Any) -> None:
    """Write a file of whole tensors; to be called on rank 0.

    Raises:
        CheckpointError: A folder is in the way.
    """
    if is_folder(path):
        raise CheckpointError(
            what=f"{path} is a folder, and a single file is to be written there.",
            why="state_dict_type='full' writes one file; the folder is kept, it may be a checkpoint.",
            fix="Save under another name, remove the folder, or use state_dict_type='sharded'.",
        )
    checkpoint_io.save_checkpoint(content, path, storage_options=storage_options)


def remove(checkpoint_io: Any, path: Any) -> None:
    """Delete a checkpoint of either kind; to be called on rank 0.

    Raises:
        CheckpointError: A save into the folder is going on.
    """
    if isinstance(path, str | os.PathLike) and os.path.islink(_without_scheme(path)):
        os.unlink(_without_scheme(path))
    elif is_folder(path):
        delete(Path(_without_scheme(path)), anything)
    else:
        checkpoint_io.remove_checkpoint(path)


def link(target: Any, path: Any) -> None:
    """Let a symbolic link lead to a checkpoint, whatever it led to before; to be called on rank 0.

    Args:
        target: The checkpoint.
        path: The link. A checkpoint that is there itself is deleted, as Lightning does.
    """
    place = Path(_without_scheme(path))
    if place.is_dir() and not place.is_symlink():
        delete(place, anything)
    beside = place.with_name(f".{place.name}.new")
    beside.unlink(missing_ok=True)
    beside.symlink_to(os.path.relpath(_without_scheme(target), place.parent))
    beside.replace(place)


def own(value: T) -> T:
    """Copy what is mapped from a file, which may be overwritten while it is still in use."""
    return copy.deepcopy(value)


# -- helpers --


def _whole_bytes(bucket: Bucket, is_trained: bool) -> int:
    """Return a bucket's bytes in a file: weights, and where it trains masters and as much state as Adam."""
    itemsize = bucket.flat.element_size()
    if bucket.trainable and is_trained:
        itemsize += ADAM_STATE_BYTES + (FP32_MASTER_BYTES if itemsize < FP32_MASTER_BYTES else 0)
    return bucket.layout.numel * itemsize


def _without_scheme(path: Any) -> str:
    """Return a path as the operating system knows it; a local one may be written as a URL."""
    text: str = os.fspath(path)
    return text.removeprefix("file://")


def _local_folder(path: Any) -> str:
    text = _without_scheme(path)
    if is_remote(path):
        raise CheckpointError(
            what=f"A checkpoint folder cannot be written to {text!r}.",
            why="Every rank writes its own part, into a file system that all ranks share.",
            fix="Save to a path of such a file system, or use state_dict_type='full', which writes one file "
            "through the CheckpointIO.",
        )
    if os.path.isfile(text):
        raise CheckpointError(
            what=f"{text} is a file, and a folder is to be written there.",
            why="state_dict_type='sharded' writes a folder; the file is kept, it may be a checkpoint.",
            fix="Save under another name, remove the file, or use state_dict_type='full'.",
        )
    return text


def _pack(content: dict[str, Any], folder: str) -> Tensor:
    buffer = io.BytesIO()
    try:
        torch.save(content, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise CheckpointError(
            what=f"What goes into {folder} beside the weights cannot be stored: {error}.",
            why="It is pickled, as in a single file, and something in it cannot be: of the state that was "
            "given to save, or what a callback, a hyper-parameter or on_save_checkpoint has added.",
            fix="Store tensors, numbers, strings, and lists and dicts of these.",
        ) from error
    buffer.seek(0)
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    if unsafe:
        log_event(
            f"{folder} holds objects of {', '.join(sorted(unsafe))} beside the weights: loading it will need "
            f"weights_only=False. Whoever puts them there (the state that is given to save, a callback, "
            f"hyper-parameters, on_save_checkpoint) can store plain values instead."
        )
    return torch.from_numpy(numpy.frombuffer(buffer.getvalue(), dtype=numpy.uint8).copy())


def _load(source: Any, subject: str, weights_only: bool | None) -> dict[str, Any]:
    safely = True if weights_only is None else weights_only
    try:
        can_map = not isinstance(source, io.BytesIO) and zipfile.is_zipfile(source)
        content = torch.load(source, map_location="cpu", mmap=can_map, weights_only=safely)
    except Exception as error:
        raise _not_loaded(source, subject, error) from error
    return _require_dict(content, subject)


def _check_crcs(path: str, subject: str, share: tuple[int, int]) -> None:
    """Compare the CRCs that `torch.save` has written beside every tensor; `torch.load` does not."""
    try:
        if zipfile.is_zipfile(path):
            _compare_crcs(path, share)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            what=f"{subject[:1].upper()}{subject[1:]} is damaged: {error}.",
            why="What is there has another checksum than what was written.",
            fix="Use another copy, or an earlier checkpoint.",
        ) from error
    except Exception as error:
        raise _not_loaded(path, subject, error) from error


def _compare_crcs(path: str, share: tuple[int, int]) -> None:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        for entry in nth_part(entries, [entry.file_size for entry in entries], *share):
            # torch compresses nothing; torch.serialization.set_crc32_options(False) leaves the CRCs out.
            if entry.compress_type == zipfile.ZIP_STORED and entry.CRC != 0:
                with archive.open(entry) as content:
                    while content.read(CHUNK_BYTES):
                        pass


def _require_dict(content: Any, subject: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise CheckpointError(
            what=f"{subject[:1].upper()}{subject[1:]} is a {type(content).__name__}.",
            why="A checkpoint is a dict.",
            fix="Pass the path that a checkpoint was saved to.",
        )
    return content


def _not_loaded(source: Any, subject: str, error: Exception) -> Exception:
    """Return what to raise for whatever unpickling has raised: a damaged pickle raises anything."""
    is_local = isinstance(error, OSError) and error.errno != errno.EINVAL
    if is_local or isinstance(error, ZeroError):  # EINVAL: torch seeks before the start of a file cut short
        return error
    classes = _unsafe_classes(source) if isinstance(error, pickle.UnpicklingError) else []
    if not classes:
        return _unreadable(subject, error)
    return CheckpointError(
        what=f"{subject[:1].upper()}{subject[1:]} holds objects of {', '.join(classes)}.",
        why="Unpickling other classes than tensors and plain values can run code, so it needs your word.",
        fix="If you trust it, pass weights_only=False (trainer.fit, validate, test and predict take it, and "
        "fabric.load), or name the classes in torch.serialization.add_safe_globals.",
    )


def _unsafe_classes(source: Any) -> list[str]:
    """Return the classes that torch does not load safely; none where that cannot be found out."""
    with contextlib.suppress(Exception):
        if zipfile.is_zipfile(source):
            if isinstance(source, io.BytesIO):
                source.seek(0)
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(source))
    return []


def _unreadable(subject: str, error: Exception) -> CheckpointError:
    said = str(error).partition("\n")[0].partition(". ")[0]
    lacks_classes = isinstance(error, ImportError | AttributeError)
    otherwise = "holds objects of classes that are not to be found here" if lacks_classes else "no checkpoint"
    return CheckpointError(
        what=f"{subject[:1].upper()}{subject[1:]} cannot be read: {type(error).__name__}: {said}",
        why=f"It is damaged, or {otherwise}.",
        fix="Use another copy, or an earlier checkpoint.",
    )
