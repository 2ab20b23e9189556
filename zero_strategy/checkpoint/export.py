"""A model written as one Hugging Face folder, tensor by tensor, beside its place and moved there at the end.

Called by `consolidate`, for the weights of a checkpoint, and by `sixteen_bit`, for those of a running engine.
It knows the layout of a Hugging Face folder and which files may be replaced; where the elements come from is
the caller's business.

[Note: Tied weights]
A tied parameter is stored once. transformers ties on loading when the config says `tie_word_embeddings`, so
the one name it was registered under first is enough. A config that says otherwise does not tie, and a
missing name would stay randomly initialised there, so every name is written. A model without a Hugging Face
config is written as safetensors' own `save_model` does it: one name, the others listed in the file's
metadata.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue
from torch import Tensor
from tqdm import tqdm

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.folders import lock_folder, sync_folder, to_readable_json
from zero_strategy.checkpoint.hf import config_with_dtype, copy_side_files, read_config, ties_word_embeddings
from zero_strategy.checkpoint.manifest import MANIFEST_NAME
from zero_strategy.checkpoint.records import BufferRecord, HFRecord, ParamRecord
from zero_strategy.checkpoint.safetensors_io import SafetensorsWriter, TensorSpec
from zero_strategy.errors import CheckpointError

MARKER_NAME = "zero_strategy.json"  # in every folder written here; says what the weights are of
DEFAULT_SHARD_SIZE_BYTES = 5 * 10**9  # a size every file system and hub takes

INDEX_NAME = "model.safetensors.index.json"
_STAGING_END = re.compile(r"\.[0-9a-f]{8}\.partial")
_WEIGHT_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class ExportOptions:
    """How to write the folder.

    Attributes:
        dtype: Of all floating-point parameters; None: each parameter's own in the model. Buffers keep theirs.
        max_shard_size_bytes: Of one weights file; a larger tensor gets a file of its own.
        trainable_only: Write the trainable parameters only, and no buffers.
        strip_prefix: Take what lies below this FQN prefix, and name it without; None: the prefix of the
            Hugging Face model in the source, if there is one.
        hf_files: A folder whose tokenizer files are copied. Its config.json and generation_config.json serve
            only where the source has none: the source's describe the model that was trained, say with a
            resized vocabulary.
        force: Write into a folder that holds anything else than an earlier output of the same source: of the
            same checkpoint, or of an engine whose model has the same names and shapes. Files of the same
            names and weight files are replaced.
    """

    dtype: torch.dtype | None = None
    max_shard_size_bytes: int = DEFAULT_SHARD_SIZE_BYTES
    trainable_only: bool = False
    strip_prefix: str | None = None
    hf_files: Path | None = None
    force: bool = False


class ExportReport(NamedTuple):
    """What was written."""

    out: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int  # of the weights
    left_out: tuple[str, ...]  # names outside the prefix
    tied: dict[str, str]  # name left out because it is tied -> name written


class Source(NamedTuple):
    """A model to write."""

    checkpoint_id: str | None  # of the checkpoint; None: the model of an engine, as it is now
    written: str  # when: the date of the checkpoint, or now
    params: Mapping[str, ParamRecord]
    buffers: Mapping[str, BufferRecord]
    hf: HFRecord | None
    chunks: Callable[[str], Iterator[Tensor]]  # the elements of a parameter or buffer, in order


class _Output(NamedTuple):
    """One tensor to write."""

    spec: TensorSpec
    fqn: str  # of the parameter or buffer


class _Candidate(NamedTuple):
    """A parameter or buffer that may be written."""

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype  # to write it in
    aliases: tuple[str, ...]


class _Marker(NamedTuple):
    """What the weights of a folder are of."""

    checkpoint_id: str | None  # None: of a model in training
    model: str  # a hash of the names and shapes of its parameters


class _Selection(NamedTuple):
    outputs: list[_Output]
    left_out: list[str]
    tied: dict[str, str]


def export(source: Source, out: str | os.PathLike[str], options: ExportOptions | None = None) -> ExportReport:
    """Write a model as a Hugging Face folder.

    The folder gets model.safetensors, or numbered files and model.safetensors.index.json, and the configs
    that the source or `hf_files` has. It is written beside its place and moved there at the end, so a
    failure leaves nothing behind, and a second run over an earlier output of the same source replaces it.
    Memory: two of the source's chunks. Tied weights: see [Note: Tied weights].

    Args:
        source: What to write.
        out: The folder to write.
        options: See `ExportOptions`.

    Raises:
        CheckpointError: The selection is empty or ambiguous, `out` holds other files, or the disk has too
            little space.
    """
    options = options or ExportOptions()
    target = Path(os.path.realpath(out))
    selection = _select(source, options)
    num_bytes = sum(output.spec.num_bytes for output in selection.outputs)
    _check_target(target, _marker_of(source), options.force)
    try:
        staging = _make_staging(target, num_bytes)
        lock = lock_folder(staging)
        try:
            _write_weights(source, selection, staging, options.max_shard_size_bytes)
            _write_side_files(source, selection, staging, options.hf_files)
            files = tuple(sorted(path.name for path in staging.iterdir()))
            _move(staging, target)
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise _not_written(target, str(error)) from error
    return ExportReport(
        target, files, len(selection.outputs), num_bytes, tuple(selection.left_out), selection.tied
    )


# -- selection --


def _select(source: Source, options: ExportOptions) -> _Selection:
    prefix = options.strip_prefix
    if prefix is None:
        prefix = source.hf.prefix if source.hf else ""
    writes_aliases = source.hf is not None and not ties_word_embeddings(source.hf.config)
    selection = _Selection([], [], {})
    seen: dict[str, str] = {}
    for fqn, shape, dtype, aliases in _candidates(source, options):
        inside = [name for name in (fqn, *aliases) if name.startswith(prefix)]
        if not inside:
            selection.left_out.append(fqn)
            continue
        written = inside if writes_aliases else inside[:1]
        for name in written:
            key = name.removeprefix(prefix)
            if not key or key == "__metadata__" or key in seen:
                why = f"{name!r} would be written as {key!r}, which is taken or not a name"
                raise _bad_selection(source, why)
            seen[key] = name
            selection.outputs.append(_Output(TensorSpec(key, shape, dtype), fqn))
        for name in inside[len(written) :]:
            selection.tied[name.removeprefix(prefix)] = written[0].removeprefix(prefix)
    if not selection.outputs:
        kind = "trainable parameter" if options.trainable_only else "parameter"
        names = ", ".join(list(source.params)[:3]) or "none"
        why = f"no {kind} has a name that begins with {prefix!r}; names are: {names}, ..."
        raise _bad_selection(source, why)
    return selection


def _candidates(source: Source, options: ExportOptions) -> Iterator[_Candidate]:
    for fqn, param in source.params.items():
        dtype = param.torch_dtype
        if options.dtype is not None and dtype.is_floating_point:
            dtype = options.dtype
        if param.trainable or not options.trainable_only:
            yield _Candidate(fqn, param.shape, dtype, param.aliases)
    if not options.trainable_only:
        for fqn, buffer in source.buffers.items():
            yield _Candidate(fqn, buffer.shape, buffer.torch_dtype, buffer.aliases)


def _split(outputs: list[_Output], max_bytes: int) -> list[list[_Output]]:
    """Fill one file after the other, in the model's order."""
    shards: list[list[_Output]] = [[]]
    filled_bytes = 0
    for output in outputs:
        if shards[-1] and filled_bytes + output.spec.num_bytes > max_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(output)
        filled_bytes += output.spec.num_bytes
    return shards


# -- writing --


def _write_weights(source: Source, selection: _Selection, folder: Path, max_bytes: int) -> None:
    shards = _split(selection.outputs, max_bytes)
    total_bytes = sum(output.spec.num_bytes for output in selection.outputs)
    metadata = {"format": "pt"}  # transformers refuses a file that does not name its framework
    if not source.hf:
        metadata |= selection.tied
    weight_map: dict[str, str] = {}
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights", disable=None) as progress:
        for index, shard in enumerate(shards, start=1):
            name = "model.safetensors"
            if len(shards) > 1:
                name = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
            fqn_of = {output.spec.key: output.fqn for output in shard}
            with SafetensorsWriter(folder / name, [output.spec for output in shard], metadata) as writer:
                for spec in writer.specs:
                    weight_map[spec.key] = name
                    _write_tensor(writer, source.chunks(fqn_of[spec.key]), spec)
                    progress.update(spec.num_bytes)
    if len(shards) > 1:
        ordered = {output.spec.key: weight_map[output.spec.key] for output in selection.outputs}
        index_json = {"metadata": {"total_size": total_bytes}, "weight_map": ordered}
        _write_json(folder / INDEX_NAME, index_json)


def _write_tensor(writer: SafetensorsWriter, chunks: Iterator[Tensor], spec: TensorSpec) -> None:
    # A function of its own, so that no chunk, a view of what the source keeps, outlives its tensor.
    for chunk in chunks:
        writer.write(_converted(chunk, spec))


def _converted(chunk: Tensor, spec: TensorSpec) -> Tensor:
    converted = chunk.to(spec.dtype)
    # Of the usual targets only float16 has a smaller range than what it is converted from.
    if spec.dtype == torch.float16 and chunk.dtype != spec.dtype:
        num_lost = int((converted.isinf() & ~chunk.isinf()).sum())
        if num_lost:
            raise CheckpointError(
                what=f"{num_lost} elements of {spec.key!r} do not fit into float16.",
                why=f"They would become infinite: one is {float(chunk.abs().max()):.6g}, the limit is 65504.",
                fix="Write bfloat16 or float32: --dtype bf16.",
            )
    return converted


def _write_side_files(source: Source, selection: _Selection, folder: Path, hf_files: Path | None) -> None:
    configs: dict[str, dict[str, JsonValue] | None] = {"config.json": None, "generation_config.json": None}
    if source.hf:
        configs = {"config.json": source.hf.config, "generation_config.json": source.hf.generation_config}
    if hf_files is not None:
        copy_side_files(hf_files, folder)
        for name, config in configs.items():
            if config is None and (hf_files / name).is_file():
                configs[name] = read_config(hf_files / name)
    if configs["config.json"] is not None:
        configs["config.json"] = config_with_dtype(configs["config.json"], _main_dtype(selection.outputs))
    for name, config in configs.items():
        if config is not None:
            _write_json(folder / name, config)
    marker = {**_marker_of(source)._asdict(), "saved": source.written, "tied": selection.tied}
    _write_json(folder / MARKER_NAME, marker)


def _main_dtype(outputs: list[_Output]) -> str:
    """Name the floating-point dtype that most bytes are written in."""
    num_bytes: dict[torch.dtype, int] = {}
    for spec, _ in outputs:
        if spec.dtype.is_floating_point:
            num_bytes[spec.dtype] = num_bytes.get(spec.dtype, 0) + spec.num_bytes
    return dtype_name(max(num_bytes, key=lambda dtype: num_bytes[dtype])) if num_bytes else "float32"


def _write_json(path: Path, value: object) -> None:
    with open(path, "w", encoding="utf-8") as file:  # plain open: permissions as the umask says
        file.write(to_readable_json(value) + "\n")
        file.flush()
        os.fsync(file.fileno())


# -- the target folder --


def _check_target(target: Path, own: _Marker, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise _not_written(target, "it is a file")
    if (target / MANIFEST_NAME).exists():
        raise _not_written(target, "it holds a checkpoint; pass another folder")
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


def _marker_of(source: Source) -> _Marker:
    shapes = sorted((fqn, list(param.shape)) for fqn, param in source.params.items())
    return _Marker(source.checkpoint_id, hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16])


def _read_marker(target: Path) -> _Marker | None:
    """Return what a folder was written from; None: it was not written here."""
    if not (target / MARKER_NAME).is_file():
        return None
    try:
        marker = json.loads((target / MARKER_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or "checkpoint_id" not in marker:
        return None
    return _Marker(marker["checkpoint_id"], marker.get("model", ""))


def _make_staging(target: Path, num_bytes: int) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < num_bytes:
        raise _not_written(target, f"it needs {num_bytes} bytes and the disk has {free_bytes}")
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    staging.mkdir()
    return staging


def _remove_leftovers(target: Path) -> None:
    """Delete what runs that were killed have left beside the target; a run that goes on holds its lock."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        if not _STAGING_END.fullmatch(path.name[len(target.name) + 1 :]) or path.is_symlink():
            continue
        with contextlib.suppress(CheckpointError, OSError):
            lock = lock_folder(path)
            if lock is not None:
                shutil.rmtree(path)
                os.close(lock)


def _move(staging: Path, target: Path) -> None:
    """Put the finished folder in its place: by one rename where that is free, else file by file.

    File by file, the index of an earlier output goes first and the new one comes last but for the marker: who
    is stopped in between leaves a folder that does not load, never one that mixes old and new weights.
    """
    with contextlib.suppress(OSError):  # not there yet, or empty
        os.rename(staging, target)
        sync_folder(target.parent)
        return
    last = (INDEX_NAME, MARKER_NAME)
    written = sorted(staging.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1)
    if (staging / INDEX_NAME).exists():
        (target / INDEX_NAME).unlink(missing_ok=True)
    for path in written:
        destination = target / path.name
        if path.is_dir() and destination.is_dir():
            shutil.rmtree(destination)
        os.replace(path, destination)
    names = {path.name for path in written}
    for path in target.iterdir():
        if path.name not in names and _WEIGHT_FILE.fullmatch(path.name):
            path.unlink()  # an earlier output had more files; beside the new ones they would be loaded too
    sync_folder(target)


# -- errors --


def _not_written(target: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"The Hugging Face folder {target} could not be written.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix="Choose a folder with enough space that you may write to.",
    )


def _bad_selection(source: Source, why: str) -> CheckpointError:
    fix = "Choose another --strip-prefix (strip_prefix), or leave --trainable-only (trainable_only) out."
    if source.checkpoint_id is None:
        fix = (
            "Leave trainable_only out, or write a part of a checkpoint: `zero-strategy consolidate CKPT OUT "
            "--strip-prefix PREFIX`."
        )
    return CheckpointError(
        what="The model has nothing that could be written like this.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix=fix,
    )
