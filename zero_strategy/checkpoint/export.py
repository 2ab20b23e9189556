"""A model written as one folder of whole weights, beside its place, and moved there at the end.

Called by `consolidate`, for the weights of a checkpoint, and by `sixteen_bit`, for those of a running engine.
It knows the steps and the small files beside the weights; names are `export_selection`'s business, weight
files `weight_files`', the folder `export_target`'s, and where the elements come from is the caller's.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import JsonValue

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.export_selection import (
    DEFAULT_SHARD_SIZE_BYTES,
    ExportOptions,
    Selection,
    Source,
    select,
)
from zero_strategy.checkpoint.export_target import (
    MARKER_NAME,
    Marker,
    check_target,
    not_written,
    put_in_place,
)
from zero_strategy.checkpoint.folders import write_json
from zero_strategy.checkpoint.hf import config_with_dtype, copy_side_files, read_config
from zero_strategy.checkpoint.records import new_checkpoint_id
from zero_strategy.checkpoint.staging import anything, begin, discard, staging_of
from zero_strategy.checkpoint.weight_files import write_weights

__all__ = [
    "DEFAULT_SHARD_SIZE_BYTES",
    "MARKER_NAME",
    "ExportOptions",
    "ExportReport",
    "Source",
    "export",
]


class ExportReport(NamedTuple):
    """What was written."""

    out: Path
    files: tuple[str, ...]
    num_tensors: int
    num_bytes: int  # of the weights
    left_out: tuple[str, ...]  # names outside the prefix, and of what safetensors cannot hold
    tied: dict[str, str]  # name left out because it is tied -> name written


def export(source: Source, out: str | os.PathLike[str], options: ExportOptions | None = None) -> ExportReport:
    """Write a model as a folder that transformers, safetensors and torch read.

    The folder gets model.safetensors or pytorch_model.bin, or numbered files and their index, and the configs
    that the source or `hf_files` has. It is written beside its place and moved there at the end, so a failure
    leaves nothing behind, and a second run over an earlier output of the same source replaces it.

    Memory: a few buffers of 4 MiB and two of the source's chunks. Tied weights: see [Note: Tied weights] in
    `export_selection`.

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
    selection = select(source, options)
    check_target(target, _marker_of(source), force=options.force)
    metadata = {"format": "pt"}  # transformers refuses a file that does not name its framework
    if not source.hf:
        metadata |= selection.tied
    staging = staging_of(target, new_checkpoint_id(), in_place=False, is_ours=anything)
    folder = staging.target
    try:
        with begin(staging, num_bytes=selection.num_bytes):
            try:
                write_weights(selection, folder, options.format, options.max_shard_size_bytes, metadata)
                _write_side_files(source, selection, folder, options)
                files = tuple(sorted(path.name for path in folder.iterdir()))
                put_in_place(staging)
            finally:
                discard(staging)
    except OSError as error:
        raise not_written(target, str(error)) from error
    facts = len(selection.tensors), selection.num_bytes, tuple(selection.left_out), selection.tied
    return ExportReport(target, files, *facts)


def _write_side_files(source: Source, selection: Selection, folder: Path, options: ExportOptions) -> None:
    hf_files = options.hf_files
    configs: dict[str, dict[str, JsonValue] | None] = {"config.json": None, "generation_config.json": None}
    left_out = options.trainable_only and any(not param.trainable for param in source.params.values())
    is_whole = source.is_whole and not left_out
    # Beside weights under other names, or some of them, a config would have transformers load a model of
    # random numbers.
    if is_whole and source.hf and selection.prefix == source.hf.prefix:
        configs = {"config.json": source.hf.config, "generation_config.json": source.hf.generation_config}
    if hf_files is not None:
        copy_side_files(hf_files, folder)
        for name, config in configs.items():
            if is_whole and config is None and (hf_files / name).is_file():
                configs[name] = read_config(hf_files / name)
    if configs["config.json"] is not None:
        configs["config.json"] = config_with_dtype(configs["config.json"], _main_dtype(selection))
    for name, config in configs.items():
        if config is not None:
            write_json(folder / name, config)
    marker = {**_marker_of(source)._asdict(), "saved": source.written, "tied": selection.tied}
    write_json(folder / MARKER_NAME, marker)


def _main_dtype(selection: Selection) -> str:
    """Name the floating-point dtype that most bytes are written in."""
    num_bytes: dict[torch.dtype, int] = {}
    for tensor in selection.tensors:
        if tensor.dtype.is_floating_point:
            num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.num_bytes
    return dtype_name(max(num_bytes, key=lambda dtype: num_bytes[dtype])) if num_bytes else "float32"


def _marker_of(source: Source) -> Marker:
    shapes = sorted((fqn, list(param.shape)) for fqn, param in source.params.items())
    return Marker(source.checkpoint_id, hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16])
