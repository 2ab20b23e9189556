"""Checkpoints for tests, written as several ranks would, in one process and without an engine.

All tensors are laid end to end, as in a bucket, and cut into as many uneven runs as there are ranks; each
rank stores the slices that fall into its run. Some tensors then lie in one file, some in several, some
ranks hold nothing: what the readers have to cope with.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero_strategy.checkpoint.elements import dtype_name
from zero_strategy.checkpoint.extra import encode_extra
from zero_strategy.checkpoint.manifest import Manifest, seal
from zero_strategy.checkpoint.own_files import MANIFEST_NAME
from zero_strategy.checkpoint.records import (
    BufferRecord,
    FileRecord,
    HFRecord,
    OptimizerRecord,
    ParamRecord,
    Piece,
    TensorEntry,
    file_metadata,
    model_tensor_name,
    new_checkpoint_id,
    rank_file_name,
)
from zero_strategy.checkpoint.safetensors_io import RankFile, WrittenFile


@dataclass(frozen=True)
class Description:
    """What a manifest says about a model beside its tensors; names are FQNs."""

    dtypes: Mapping[str, str] = field(default_factory=dict)  # the model's, where the stored dtype differs
    frozen: frozenset[str] = frozenset()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()
    hf: HFRecord | None = None
    extra: object = None


def same_bits(left: Tensor, right: Tensor) -> bool:
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return left.numel() == 0 or torch.equal(
        left.reshape(-1).contiguous().view(torch.uint8), right.reshape(-1).contiguous().view(torch.uint8)
    )


def small_state() -> dict[str, Tensor]:
    """Odd shapes, a scalar, an empty tensor, several dtypes; NaNs and infinities in the bits."""
    generator = torch.Generator().manual_seed(42)
    bits = torch.randint(-(2**31), 2**31 - 1, (7, 15), generator=generator, dtype=torch.int32)
    return {
        "block.weight": bits.view(torch.float32),
        "block.bias": torch.randn(15, generator=generator).bfloat16(),
        "step": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "mask": torch.rand(13, generator=generator) > 0.5,
        "counter": torch.arange(11),
    }


def cut(numel: int, world_size: int, seed: int = 0) -> list[tuple[int, int]]:
    """Cut `numel` elements into one run a rank, uneven and possibly empty."""
    borders = sorted(random.Random(seed).choices(range(numel + 1), k=world_size - 1))
    return list(zip([0, *borders], [*borders, numel], strict=True))


def write_rank_file(
    path: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Write a rank's file; see `RankFile`."""
    return RankFile(path, tensors, metadata).write()


def write_rank_files(
    folder: Path, tensors: Mapping[str, Tensor], world_size: int, checkpoint_id: str
) -> tuple[dict[str, FileRecord], dict[str, TensorEntry]]:
    """Write the files of all ranks; return what a manifest needs to know of them."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, FileRecord] = {}
    pieces: dict[str, list[Piece]] = {name: [] for name in tensors}
    total_numel = sum(tensor.numel() for tensor in tensors.values())
    for rank, (run_start, run_stop) in enumerate(cut(total_numel, world_size)):
        slices: dict[str, Tensor] = {}
        starts: dict[str, int] = {}
        position = 0
        for name, tensor in tensors.items():
            start = max(run_start - position, 0)
            stop = min(run_stop - position, tensor.numel())
            if start < stop:
                slices[name] = tensor.detach().reshape(-1)[start:stop]
                starts[name] = start
            position += tensor.numel()
        file = rank_file_name(rank, world_size, checkpoint_id)
        written = write_rank_file(folder / file, slices, file_metadata(rank, world_size, checkpoint_id))
        for stored in written.tensors:
            piece = Piece(
                file=file,
                key=stored.key,
                file_start=0,
                start=starts[stored.key],
                numel=stored.numel,
                checksum=stored.checksum,
            )
            pieces[stored.key].append(piece)
        files[file] = FileRecord(num_bytes=written.num_bytes, header_checksum=written.header_checksum)
    entries = {
        name: TensorEntry(
            name=name, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype), pieces=tuple(pieces[name])
        )
        for name, tensor in tensors.items()
    }
    return files, entries


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what a manifest says, as a writer with other ideas would have written it."""
    path = folder / MANIFEST_NAME
    document = json.loads(path.read_text())
    change(document)
    del document["checksum"]
    path.write_bytes(seal(json.dumps(document)))


def save(
    folder: Path,
    state: Mapping[str, Tensor],
    world_size: int,
    description: Description | None = None,
) -> Manifest:
    """Save parameters and buffers as `world_size` ranks would, with an AdamW over the trainable ones."""
    description = description or Description()
    checkpoint_id = new_checkpoint_id()
    tensors = {model_tensor_name(fqn): tensor for fqn, tensor in state.items()}
    extra, extra_tensors = encode_extra(description.extra)
    files, entries = write_rank_files(folder, tensors | extra_tensors, world_size, checkpoint_id)
    params: dict[str, ParamRecord] = {}
    buffers: dict[str, BufferRecord] = {}
    for fqn, tensor in state.items():
        dtype = description.dtypes.get(fqn, dtype_name(tensor.dtype))
        aliases = description.aliases.get(fqn, ())
        if fqn in description.buffers:
            buffers[fqn] = BufferRecord(shape=tuple(tensor.shape), dtype=dtype, aliases=aliases)
        else:
            trainable = fqn not in description.frozen
            params[fqn] = ParamRecord(
                shape=tuple(tensor.shape), dtype=dtype, aliases=aliases, trainable=trainable
            )
    trainable_fqns = [fqn for fqn, param in params.items() if param.trainable]
    manifest = Manifest(
        checkpoint_id=checkpoint_id,
        world_size=world_size,
        stage=3,
        files=files,
        params=params,
        buffers=buffers,
        tensors=entries,
        optimizers=(
            OptimizerRecord(class_name="AdamW", param_groups=({"lr": 1e-4, "params": trainable_fqns},)),
        ),
        extra=extra,
        hf=description.hf,
    )
    manifest.write(folder)
    return manifest
