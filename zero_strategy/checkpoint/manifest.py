"""The index of a checkpoint folder: which element run of which tensor lies in which file.

Owns the schema of `manifest.json`, its checks, and the commit: the atomic rename that turns a set of
written rank files into the checkpoint. Called by `format`, `save`, `consolidate` and the command line.
It reads no tensor data and does not know what a stage or a shard is.

[Note: Commit by rename]
A folder holds one checkpoint, and one that exists is updated in place. Every save draws a new random
`checkpoint_id`; the ranks write files that carry it in their names, beside those of the previous save. Only
when all of them are on the disk does one rank rename a complete manifest over the old one. A crash before the
rename leaves the old checkpoint whole, a crash after it leaves the new one whole, and what either left over
is deleted by the next commit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import (
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
)

from zero_strategy.checkpoint.elements import MAX_COUNT, checksum
from zero_strategy.checkpoint.folders import replace_file, sync_folder, to_readable_json
from zero_strategy.checkpoint.own_files import MANIFEST_NAME, remove_own_files
from zero_strategy.checkpoint.records import (
    FORMAT,
    BufferRecord,
    FileName,
    FileRecord,
    HFRecord,
    OptimizerRecord,
    ParamRecord,
    Piece,
    Record,
    TensorEntry,
    TypedRecord,
    model_tensor_name,
    param_of,
)
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile
from zero_strategy.errors import CheckpointError, some

VERSION: Final = 1

_TENSOR_NAME = re.compile(
    r"model/.+|extra/.+|rng/[0-9]{1,9}|average/[0-9]{1,9}/(num_updates|weights/.+)|optim/(?P<optimizer>[0-9]{1,9})/(?P<fqn>.+)/[^/]+",
    re.DOTALL,
)


class Manifest(Record):
    """The content of `manifest.json`. Build one and `write()` it; `read()` gives only whole ones."""

    format: Literal["zero_strategy"] = FORMAT
    version: Literal[1] = VERSION
    checkpoint_id: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
    world_size: Annotated[int, Field(strict=True, ge=1, le=MAX_COUNT)]
    stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    created: str = Field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="microseconds")
    )
    files: dict[FileName, FileRecord]
    params: dict[str, ParamRecord]
    buffers: dict[str, BufferRecord] = Field(default_factory=dict)
    frozen_left_out: tuple[str, ...] = ()  # all names of frozen parameters that were not stored on purpose
    tensors: dict[str, TensorEntry]
    optimizers: tuple[OptimizerRecord, ...] = ()
    loss_scaler: dict[str, float | int] | None = None  # its `state_dict`, where losses are scaled
    extra: JsonValue = None  # see `extra.encode_extra`
    hf: HFRecord | None = None

    @field_validator("tensors", mode="before")
    @classmethod
    def _name_entries(cls, tensors: object) -> object:
        if not isinstance(tensors, Mapping):
            return tensors
        return {k: {**v, "name": k} if isinstance(v, dict) else v for k, v in tensors.items()}

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, check_files: bool = True) -> Manifest:
        """Read and check the manifest of a checkpoint folder.

        Args:
            folder: The checkpoint.
            check_files: Also check every file's presence, size, id and contents table (not its data). One
                rank suffices where all ranks see one file system.

        Raises:
            CheckpointError: The folder is missing, incomplete, foreign, from a newer version, or damaged.
        """
        path = Path(folder)
        content = _read_bytes(path)
        document = _decode(path, content)
        _check_seal(path, content)
        manifest = _parse(path, document)
        _check_references(path, manifest)
        if check_files:
            manifest.check_files(path)
        return manifest

    def write(self, folder: str | os.PathLike[str], *, is_commit: bool = True) -> None:
        """Commit the checkpoint, then delete what earlier saves left. See [Note: Commit by rename].

        All ranks must have written their files and said so before one rank calls this, and must not begin
        another save into the folder before it returns.

        Args:
            folder: Where the files are.
            is_commit: The manifest makes the checkpoint; False: the folder is moved into its place later.

        Raises:
            CheckpointError: A file is missing or has another size than declared (often: the folder is not
                on a file system all ranks share), a tensor is not covered, or the disk refuses.
        """
        path = Path(folder)
        _check_references(path, self)
        self.check_files(path)
        content = seal(to_readable_json(self.model_dump(by_alias=True)))
        try:
            if is_commit:  # then the files' names must be on the disk before the manifest that needs them
                sync_folder(path)
            replace_file(path / MANIFEST_NAME, content, path / f"{MANIFEST_NAME}.{self.checkpoint_id}.tmp")
        except OSError as error:
            raise CheckpointError(
                what=f"{path / MANIFEST_NAME} could not be written: {error.strerror or error}.",
                why="Without it the new files are no checkpoint. One that was there before still is.",
                fix="Check free space, quota and permissions of the folder, then save again.",
            ) from error
        # From here on the checkpoint is the new one. A failure must not be reported as if it were not, or the
        # caller would delete the files that the manifest now names.
        with contextlib.suppress(OSError):
            remove_own_files(path, {MANIFEST_NAME, *self.files})

    def check_files(self, folder: str | os.PathLike[str]) -> None:
        """Check presence, size, id and header of every file, and that every piece lies inside its file.

        Raises:
            CheckpointError: Naming the first file that does not fit.
        """
        path = Path(folder)
        pieces_of: dict[str, list[tuple[TensorEntry, Piece]]] = {name: [] for name in self.files}
        for entry in self.tensors.values():
            for piece in entry.pieces:
                pieces_of[piece.file].append((entry, piece))
        for name, pieces in pieces_of.items():
            file = self.open_file(path, name)
            try:
                for entry, piece in pieces:
                    check_piece(file, entry, piece)
            finally:
                file.close()

    def open_file(self, folder: Path, name: str) -> SafetensorsFile:
        """Open one of the checkpoint's files after checking that it is the one that was saved.

        Raises:
            CheckpointError: The file is missing, of another size, or from another save.
        """
        path = folder / name
        if path.is_symlink() and path.resolve().parent != folder.resolve():
            raise _wrong_file(path, f"it is a link to {path.resolve()}, outside the folder")
        if not path.is_file():
            others = sorted(entry.name for entry in folder.iterdir())
            raise _wrong_file(path, f"it is missing; the folder holds {some(others)}")
        expected_bytes = self.files[name].num_bytes
        if path.stat().st_size != expected_bytes:
            raise _wrong_file(
                path, f"it has {path.stat().st_size} bytes and was written with {expected_bytes}"
            )
        file = SafetensorsFile(path)
        found_id = file.metadata.get("checkpoint_id")
        if found_id != self.checkpoint_id:
            file.close()
            raise _wrong_file(path, f"it is from save {found_id!r}, the manifest from {self.checkpoint_id!r}")
        if file.header_checksum != self.files[name].header_checksum:
            file.close()
            raise _wrong_file(
                path, f"its table of contents is damaged: its checksum is {file.header_checksum}"
            )
        return file


# -- checks --


def seal(text: str) -> bytes:
    """Add a checksum over all that comes before it as the last line of a JSON object.

    A flipped bit can turn a number or a name into another that makes sense, which only this shows.
    """
    body = (text.rstrip().removesuffix("}").rstrip() + ",\n").encode()
    return body + _last_line(body)


def _last_line(body: bytes) -> bytes:
    return f'  "checksum": "{checksum(body)}"\n}}\n'.encode()


def _check_seal(folder: Path, content: bytes) -> None:
    length_bytes = len(_last_line(b""))
    if content[-length_bytes:] != _last_line(content[:-length_bytes]):
        raise _bad_manifest(
            folder,
            "its last line is not the checksum of what comes before, so it was changed since it was written, "
            "by a fault or by hand",
        )


def _read_bytes(folder: Path) -> bytes:
    if not folder.is_dir():
        kind = "is a file, not a folder" if folder.exists() else "does not exist"
        raise CheckpointError(
            what=f"The checkpoint {folder} {kind}.",
            why=f"A checkpoint is a folder with a {MANIFEST_NAME} and one safetensors file per rank.",
            fix="Pass the folder given to save_checkpoint(). If it is a single file of Lightning's: that has "
            "whole weights already; LightningModule.load_from_checkpoint reads it, fit(ckpt_path=...) goes "
            'on from it, and torch.load(...)["state_dict"] are the weights.'
            if folder.exists()
            else "Pass the folder given to save_checkpoint().",
        )
    path = folder / MANIFEST_NAME
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise _bad_manifest(folder, "it is no ordinary file")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise _incomplete(folder) from None
    except OSError as error:
        raise _bad_manifest(folder, f"it cannot be read ({error.strerror or error})") from error


def _decode(folder: Path, content: bytes) -> dict[str, Any]:
    """Decode a manifest that this version may read; what another wrote is named before checksums are."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _bad_manifest(folder, f"it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad_manifest(folder, f'it does not say "format": "{FORMAT}", so another program wrote it')
    version = document.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            what=f"{folder / MANIFEST_NAME} has schema version {version}.",
            why=f"This version of zero_strategy reads version {VERSION}.",
            fix="Upgrade zero_strategy: pip install --upgrade zero-strategy.",
        )
    return document


def _parse(folder: Path, document: dict[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(document)
    except ValidationError as error:
        problems = [
            f"{'/'.join(map(str, problem['loc']))}: {problem['msg']}, found {str(problem['input'])[:80]!r}"
            for problem in error.errors(include_url=False)
        ]
        raise _bad_manifest(folder, some(problems, 3, "; ")) from error


def _check_references(folder: Path, manifest: Manifest) -> None:
    """Check what one field says about another."""
    for entry in manifest.tensors.values():
        _check_name(folder, manifest, entry.name)
        if entry.numel > MAX_COUNT:
            raise _bad_manifest(
                folder, f"tensor {entry.name!r} of shape {list(entry.shape)} has too many elements"
            )
        for piece in entry.pieces:
            if piece.file not in manifest.files:
                raise _bad_manifest(
                    folder, f"tensor {entry.name!r} refers to {piece.file!r}, which is not listed"
                )
            if piece.stop > entry.numel:
                raise _bad_manifest(
                    folder,
                    f"a piece of {entry.name!r} covers elements {piece.start} to {piece.stop}, "
                    f"and the tensor has {entry.numel}",
                )
        _check_covered(entry, folder)
    records: Iterable[tuple[str, TypedRecord]] = [*manifest.params.items(), *manifest.buffers.items()]
    for fqn, record in records:
        stored = manifest.tensors.get(model_tensor_name(fqn))
        if stored is None or stored.shape != record.shape:
            found = "no tensor" if stored is None else f"a tensor of shape {list(stored.shape)}"
            raise _bad_manifest(
                folder, f"{fqn!r} has shape {list(record.shape)}, and there is {found} for it"
            )
    for index, optimizer in enumerate(manifest.optimizers):
        for group in optimizer.param_groups:
            fqns = group.get("params")
            if not isinstance(fqns, list) or not all(fqn in manifest.params for fqn in fqns):
                raise _bad_manifest(
                    folder, f"optimizer {index} lists parameters that the model does not have"
                )


def _check_name(folder: Path, manifest: Manifest, name: str) -> None:
    """Check that a tensor belongs to something: a weight, the state of a listed optimizer, extra state."""
    found = _TENSOR_NAME.fullmatch(name)
    if found is None:
        raise _bad_manifest(folder, f"{name!r} is not a name of a tensor in this version of the format")
    known = found["fqn"] in manifest.params and int(found["optimizer"] or 0) < len(manifest.optimizers)
    if found["optimizer"] is not None and not known:
        raise _bad_manifest(folder, f"{name!r} is the state of an optimizer or parameter that is not listed")
    if name.startswith("model/"):  # which is compared with its own record
        return
    param, shape = manifest.params.get(param_of(name) or ""), manifest.tensors[name].shape
    if param is not None and shape not in ((), param.shape):
        raise _bad_manifest(folder, f"{name!r} has shape {list(shape)}, its parameter {list(param.shape)}")


def _check_covered(entry: TensorEntry, folder: Path) -> None:
    """Check that the pieces of a tensor leave no element out.

    Raises:
        CheckpointError: Naming the tensor and the first missing range.
    """
    covered = 0
    for piece in sorted(entry.pieces, key=lambda piece: piece.start):
        if piece.start > covered:
            break
        covered = max(covered, piece.stop)
    else:
        if covered == entry.numel:
            return
    following = min((piece.start for piece in entry.pieces if piece.start > covered), default=entry.numel)
    raise _bad_manifest(folder, f"no file holds elements {covered} to {following} of {entry.name!r}")


def check_piece(file: SafetensorsFile, entry: TensorEntry, piece: Piece) -> None:
    """Check that a file holds a piece: key, dtype and range.

    Raises:
        CheckpointError: Naming the file and the key.
    """
    stored = file.tensors.get(piece.key)
    if stored is None:
        raise _wrong_file(file.path, f"it has no tensor {piece.key!r}")
    if stored.dtype != entry.torch_dtype or piece.file_start + piece.numel > stored.numel:
        raise _wrong_file(
            file.path,
            f"{piece.key!r} holds {stored.numel} elements of {stored.dtype}, the manifest expects elements "
            f"{piece.file_start} to {piece.file_start + piece.numel} of {entry.torch_dtype}",
        )


# -- errors --


def _incomplete(folder: Path) -> CheckpointError:
    names = sorted(path.name for path in folder.iterdir())
    return CheckpointError(
        what=f"The checkpoint {folder} is incomplete: it has no {MANIFEST_NAME}.",
        why=f"The manifest is written last, so a save that was cut off leaves none. Found: {some(names)}.",
        fix="Load an earlier checkpoint, or save again.",
    )


def _bad_manifest(folder: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{folder / MANIFEST_NAME} is not a valid checkpoint manifest.",
        why=f"Checked on reading: {why}.",
        fix="Use another copy of the folder, or an earlier checkpoint. Nothing on disk was changed.",
    )


def _wrong_file(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{path.name} in {path.parent} is not the file the checkpoint was saved with.",
        why=f"Checked against {MANIFEST_NAME}: {why}.",
        fix="Copy the whole folder again from where it was saved; all ranks must save to one file system.",
    )
