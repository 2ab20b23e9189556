"""What every source is turned into, and its writing as a checkpoint folder, one source file at a time.

The readers of each format build an `Imported`; `write` makes the folder of it with the same files, in the
same place beside its own (`staging`) and with the same commit as a save of an engine. It must not know any
source.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue
from tqdm import tqdm

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.own_files import MANIFEST_NAME, foreign_files
from zero_strategy.checkpoint.parts import Description, manifest_of
from zero_strategy.checkpoint.records import (
    BufferRecord,
    HFRecord,
    OptimizerRecord,
    ParamRecord,
    file_metadata,
    new_checkpoint_id,
    rank_file_name,
)
from zero_strategy.checkpoint.safetensors_io import SafetensorsWriter, TensorSpec
from zero_strategy.checkpoint.save import Run, encode_with_modules
from zero_strategy.checkpoint.staging import begin, publish, staging_of, undo
from zero_strategy.errors import CheckpointError

SOURCE_KEY = "imported_from"  # of extra state: what the folder was imported from


class Imported(NamedTuple):
    """A checkpoint of another program, in the terms of a checkpoint folder.

    Attributes:
        source: What it was, for people, and for a second run to know its own output.
        world_size: Ranks that saved it; as many files are written.
        stage: Of ZeRO, that it was saved at.
        params: The parameters, by name.
        buffers: The persistent buffers, by name.
        optimizers: None or one.
        loss_scaler: Its state, where losses were scaled.
        extra: What `load_checkpoint` is to return, but for `SOURCE_KEY`.
        module_states: What modules keep beside parameters and buffers (`get_extra_state`), by name.
        hf: Configs of a transformers model, if they lie with the source.
        runs_of: Gives what one rank has saved, checked; the values may be mapped from its files.
        notes: What was left out or assumed, a sentence each.
    """

    source: dict[str, JsonValue]
    world_size: int
    stage: int
    params: dict[str, ParamRecord]
    buffers: dict[str, BufferRecord]
    optimizers: tuple[OptimizerRecord, ...]
    loss_scaler: dict[str, float | int] | None
    extra: dict[str, object]
    module_states: dict[str, object]
    hf: HFRecord | None
    runs_of: Callable[[int], Iterator[Run]]
    notes: list[str]


class ImportReport(NamedTuple):
    """What was written."""

    out: Path
    source: dict[str, JsonValue]
    num_params: int
    num_bytes: int
    optimizer: str | None  # class
    notes: list[str]


def files_id(files: list[Path]) -> str:
    """Name a set of files by their names, sizes and times, without reading them."""
    facts = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def write(imported: Imported, out: str | os.PathLike[str], *, force: bool) -> ImportReport:
    """Write a checkpoint folder.

    Every source file is looked at before anything is written. The folder is there when it is complete, and a
    checkpoint that was there stays until then. What a run that was killed has left, the next one removes.

    Args:
        imported: What to write.
        out: The folder: new, empty, or an earlier output of the same source.
        force: Replace another checkpoint that is there.

    Raises:
        CheckpointError: A source file is damaged, the folder holds something else, or the disk refuses.
    """
    target = Path(os.path.realpath(out))
    extra, tensors = encode_with_modules(
        {**imported.extra, SOURCE_KEY: imported.source}, imported.module_states
    )
    extra_runs = [Run(name, tuple(tensor.shape), 0, tensor.reshape(-1)) for name, tensor in tensors.items()]
    _check_target(target, imported.source, force=force)

    def runs_of(rank: int) -> list[Run]:
        return [*imported.runs_of(rank), *(extra_runs if rank == 0 else [])]

    total_bytes = sum(_num_bytes(run) for rank in range(imported.world_size) for run in runs_of(rank))
    checkpoint_id, description = new_checkpoint_id(), _description(imported, extra)
    manifest_of(description, checkpoint_id, [])  # what it would refuse is refused before anything is written
    staging = staging_of(target, checkpoint_id, in_place=target.exists())
    lock = begin(staging, num_bytes=total_bytes)
    try:
        tables = _write_files(staging.target, checkpoint_id, imported.world_size, runs_of, total_bytes)
        tables[0][-1] = [record.plain_state for record in imported.optimizers]
        manifest = manifest_of(description, checkpoint_id, tables)
        manifest.write(staging.target, is_commit=staging.is_in_place)
        publish(staging)
    except BaseException:
        undo(staging, checkpoint_id)
        raise
    finally:
        lock.release()
    class_name = imported.optimizers[0].class_name if imported.optimizers else None
    return ImportReport(
        target, imported.source, len(imported.params), total_bytes, class_name, imported.notes
    )


# -- writing --


def _write_files(
    folder: Path, checkpoint_id: str, world_size: int, runs_of: Callable[[int], list[Run]], total_bytes: int
) -> list[list[Any]]:
    """Write the file of every rank; return what `manifest_of` needs of each."""
    tables = []
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="import", disable=None) as progress:
        for rank in range(world_size):
            file = folder / rank_file_name(rank, world_size, checkpoint_id)
            metadata = file_metadata(rank, world_size, checkpoint_id)
            tables.append(_write_file(file, runs_of(rank), metadata, progress))
    return tables


def _write_file(file: Path, runs: list[Run], metadata: dict[str, str], progress: tqdm[None]) -> list[Any]:
    named = {run.name: run for run in runs}
    assert len(named) == len(runs), f"{file.name}: a tensor has two runs on one rank"
    specs = [TensorSpec(run.name, (run.values.numel(),), run.values.dtype) for run in runs]
    with SafetensorsWriter(file, specs, metadata) as writer:
        for spec in writer.layout.specs:
            writer.write(named[spec.key].values)
            progress.update(spec.num_bytes)
    written = writer.written()
    rows = []
    for stored in written.tensors:
        run = named[stored.key]
        rows.append(
            [run.name, run.shape, dtype_name(run.values.dtype), run.start, stored.numel, stored.checksum]
        )
    record = {"num_bytes": written.num_bytes, "header_checksum": written.header_checksum}
    return [file.name, record, rows, []]


def _description(imported: Imported, extra: JsonValue) -> Description:
    return Description(
        world_size=imported.world_size,
        stage=imported.stage,
        params=imported.params,
        buffers=imported.buffers,
        frozen_left_out=(),
        optimizers=list(imported.optimizers),
        loss_scaler=imported.loss_scaler,
        extra=extra,
        hf=imported.hf,
    )


def _num_bytes(run: Run) -> int:
    return run.values.numel() * run.values.element_size()


# -- the target folder --


def _check_target(target: Path, source: dict[str, JsonValue], *, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise _not_written(target, "it is a file")
    if not target.exists():
        return
    if (target / MANIFEST_NAME).is_file():
        if not force and not _is_of(target, source):
            raise CheckpointError(
                what=f"{target} holds another checkpoint.",
                why="It would be replaced by the imported one.",
                fix="Pass a new folder, or --force to replace it.",
            )
        return
    others = foreign_files(target)
    if others:
        raise _not_written(target, f"it is not empty: {', '.join(others[:5])}")


def _is_of(target: Path, source: dict[str, JsonValue]) -> bool:
    """Whether a checkpoint was imported from the very same files."""
    with contextlib.suppress(CheckpointError):
        extra = Manifest.read(target, check_files=False).extra
        found = json.dumps(extra, sort_keys=True)
        return f'"{SOURCE_KEY}": {json.dumps(source, sort_keys=True)}' in found
    return False


def _not_written(target: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"The checkpoint folder {target} could not be written.",
        why=f"{why[0].upper()}{why[1:]}.",
        fix="Choose a new folder, with enough space, that you may write to.",
    )
