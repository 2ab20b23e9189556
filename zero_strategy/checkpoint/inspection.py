"""What a checkpoint folder holds, as numbers and as a table; a check of every stored byte.

Called by the command line. It reads the manifest and, to verify, the data; it changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pydantic import JsonValue
from tqdm import tqdm

from zero_strategy.checkpoint.extra import decode_extra, parts_of_extra
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.checkpoint.manifest import Manifest
from zero_strategy.checkpoint.records import Piece, TensorEntry, model_tensor_name
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile
from zero_strategy.checkpoint.tags import read_latest, tags_in
from zero_strategy.errors import CheckpointError, some


class OptimizerSummary(NamedTuple):
    """One optimizer of a checkpoint."""

    class_name: str
    groups: list[dict[str, JsonValue]]  # hyper-parameters, and "params" as a count


class Damage(NamedTuple):
    """A part of a checkpoint that is not as it was written."""

    file: str
    tensor: str | None  # None: the whole file
    start: int  # elements of the flattened tensor
    stop: int
    why: str

    def __str__(self) -> str:
        subject = "" if self.tensor is None else f", elements {self.start} to {self.stop} of {self.tensor!r}"
        return f"{self.file}{subject}: {self.why}"


class CheckpointSummary(NamedTuple):
    """What `inspect` shows, in bytes and elements."""

    checkpoint_id: str
    created: str
    world_size: int
    stage: int
    num_params: int
    param_numel: int
    trainable_numel: int
    bytes_by_kind: dict[str, int]  # "model", "optim", "extra", "rng", "average": how names begin
    file_bytes: dict[str, int]
    optimizers: list[OptimizerSummary]
    frozen_left_out: list[str]  # names of parameters that were not stored on purpose
    extra_keys: list[str]  # of the user's extra state, where that is a dict
    tags: list[str]  # of the checkpoints in the folder that holds this one, this one included
    latest: str | None  # of them, as the file there says


def summarize(reader: CheckpointReader) -> CheckpointSummary:
    """Count what a manifest describes, and look around it. Tied parameters count once."""
    manifest, outer = reader.manifest, reader.folder.absolute().parent
    bytes_by_kind = {"model": 0, "optim": 0, "extra": 0}
    for name, entry in manifest.tensors.items():
        kind = name.split("/", 1)[0]
        stored_numel = sum(piece.numel for piece in entry.pieces)
        bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + stored_numel * entry.torch_dtype.itemsize
    optimizers = []
    for optimizer in manifest.optimizers:
        groups = [dict(group) for group in optimizer.param_groups]
        for group in groups:
            fqns = group.get("params")
            group["params"] = len(fqns) if isinstance(fqns, list) else 0
        optimizers.append(OptimizerSummary(optimizer.class_name, groups))
    extra = decode_extra(parts_of_extra(manifest.extra)[0], str)  # tensors by name: they are not read
    latest: str | None = None
    with contextlib.suppress(CheckpointError):  # one that cannot be used is no reason not to show this one
        latest = read_latest(outer)
    return CheckpointSummary(
        checkpoint_id=manifest.checkpoint_id,
        created=manifest.created,
        world_size=manifest.world_size,
        stage=manifest.stage,
        num_params=len(manifest.params),
        param_numel=sum(param.numel for param in manifest.params.values()),
        trainable_numel=sum(param.numel for param in manifest.params.values() if param.trainable),
        bytes_by_kind=bytes_by_kind,
        file_bytes={name: record.num_bytes for name, record in manifest.files.items()},
        optimizers=optimizers,
        frozen_left_out=list(manifest.frozen_left_out),
        extra_keys=sorted(extra) if isinstance(extra, dict) else [],
        tags=tags_in(outer),
        latest=latest,
    )


def find_damage(reader: CheckpointReader) -> list[Damage]:
    """Read every stored byte and compare all checksums; return what is not as it was written.

    Args:
        reader: Opened with `check_files=False`, or the first file that does not fit ends it.
    """
    manifest = reader.manifest
    pieces: dict[str, list[tuple[TensorEntry, Piece]]] = {name: [] for name in manifest.files}
    for entry in manifest.tensors.values():
        for piece in entry.pieces:
            pieces[piece.file].append((entry, piece))
    damage: list[Damage] = []
    total_bytes = sum(record.num_bytes for record in manifest.files.values())
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="verify", disable=None) as progress:
        for name, inside in pieces.items():
            damage += _damage_of_file(reader, name, inside, progress.update)
    return damage


def _damage_of_file(
    reader: CheckpointReader,
    name: str,
    inside: list[tuple[TensorEntry, Piece]],
    advance: Callable[[int], object],  # by so many bytes
) -> Iterator[Damage]:
    """Yield what is damaged in one file: parts of tensors, or all of them if it is no longer that file."""
    try:
        file = reader.manifest.open_file(reader.folder, name)
        file.close()
    except (CheckpointError, OSError) as error:
        why = error.why if isinstance(error, CheckpointError) else f"{error}."
        yield Damage(name, None, 0, 0, f"{why} {_what_is_lost(reader, name, inside)}")
        return
    offsets = {key: stored.offset_bytes for key, stored in file.tensors.items()}
    for entry, piece in sorted(inside, key=lambda item: (offsets.get(item[1].key, 0), item[1].file_start)):
        try:
            reader.verify_piece(entry, piece)
        except CheckpointError as error:
            yield Damage(name, entry.name, piece.start, piece.stop, error.why)
        advance(piece.numel * entry.torch_dtype.itemsize)


def _what_is_lost(reader: CheckpointReader, name: str, inside: list[tuple[TensorEntry, Piece]]) -> str:
    """Say in one line what a file that cannot be used held; of one cut short, what lies beyond its end."""
    path, record = reader.folder / name, reader.manifest.files[name]
    lost = [entry.name for entry, _ in inside]
    text = f"None of its {_plural(len(lost), 'tensor')} can be read"
    with contextlib.suppress(CheckpointError, OSError):
        left_bytes = path.stat().st_size
        file = SafetensorsFile(path, record.num_bytes)
        file.close()
        if left_bytes < record.num_bytes and file.header_checksum == record.header_checksum:
            ends = {
                entry.name: file.tensors[piece.key].offset_bytes
                + (piece.file_start + piece.numel) * entry.torch_dtype.itemsize
                for entry, piece in inside
                if piece.numel
            }
            lost = sorted((name for name in ends if ends[name] > left_bytes), key=lambda name: ends[name])
            text = f"Of its {_plural(len(inside), 'tensor')} {len(lost)} end beyond that"
    names = [repr(lost[0]), *([repr(lost[-1])] if len(lost) > 1 else [])] if lost else []
    return f"{text}: {' to '.join(names)}." if names else f"{text}."


def render(reader: CheckpointReader, *, max_params: int | None = None) -> str:
    """Lay a checkpoint out as text for a terminal; `max_params` cuts the list of parameters."""
    summary, manifest = summarize(reader), reader.manifest
    kinds = ", ".join(f"{kind} {_size(num)}" for kind, num in summary.bytes_by_kind.items() if num)
    lines = [
        f"folder       {reader.folder}",
        *_lines_about_tags(reader.folder.absolute().name, summary),
        f"checkpoint   {summary.checkpoint_id}, saved {summary.created}",
        f"saved by     {_plural(summary.world_size, 'rank')} at stage {summary.stage} (loads at any other)",
        f"parameters   {summary.num_params} with {summary.param_numel:,} elements, "
        f"{summary.trainable_numel:,} of them trainable",
        *_lines_about_left_out(summary.frozen_left_out),
        f"stored       {kinds or 'nothing'}",
        *([f"extra state  {some(summary.extra_keys)}"] if summary.extra_keys else []),
        f"model type   {manifest.hf.config.get('model_type') if manifest.hf else 'no Hugging Face config'}",
        "",
        *_param_lines(manifest, max_params),
    ]
    for index, optimizer in enumerate(summary.optimizers):
        lines += ["", f"optimizer {index}: {optimizer.class_name}"]
        for number, group in enumerate(optimizer.groups):
            settings = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            lines.append(f"  group {number}: {group['params']} parameters; {settings}")
    lines += ["", f"{'file':<58} {'size':>12}"]
    lines += [f"{name:<58} {_size(num_bytes):>12}" for name, num_bytes in summary.file_bytes.items()]
    return "\n".join(lines)


def _lines_about_tags(own: str, summary: CheckpointSummary) -> list[str]:
    others = [f"{tag} (latest)" if tag == summary.latest else tag for tag in summary.tags if tag != own]
    lines = ["             the latest there"] if own == summary.latest else []
    return lines + ([f"beside it    {some(others)}"] if others else [])


def _lines_about_left_out(names: list[str]) -> list[str]:
    return [f"left out     {_plural(len(names), 'frozen parameter')} ({some(names, 2)})"] if names else []


def _param_lines(manifest: Manifest, max_params: int | None) -> list[str]:
    rows: list[tuple[str, str, str, str]] = [("name", "shape", "dtype", "note")]
    for fqn, param in manifest.params.items():
        notes = [] if param.trainable else ["frozen"]
        notes += [f"tied: {', '.join(param.aliases)}"] if param.aliases else []
        stored = manifest.tensors[model_tensor_name(fqn)].dtype
        notes += [f"stored as {stored}"] if stored != param.dtype else []
        rows.append((fqn, "x".join(map(str, param.shape)) or "scalar", param.dtype, "; ".join(notes)))
    num_hidden = 0 if max_params is None else max(0, len(rows) - 1 - max_params)
    rows = rows[: len(rows) - num_hidden]
    for fqn, buffer in manifest.buffers.items():
        shape = "x".join(map(str, buffer.shape)) or "scalar"
        rows.append((fqn, shape, buffer.dtype, "buffer"))
    width = [max(len(row[column]) for row in rows) for column in range(3)]
    hidden = [f"... and {num_hidden} more parameters (--all shows them)"] if num_hidden else []
    lines = [
        f"{fqn:<{width[0]}}  {shape:<{width[1]}}  {dtype:<{width[2]}}  {note}"
        for fqn, shape, dtype, note in rows
    ]
    return [line.rstrip() for line in lines] + hidden


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
