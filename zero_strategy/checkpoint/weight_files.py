"""The weight files of an exported folder: one, or several with an index, as safetensors or for `torch.load`.

Called by `export`. It knows the two formats and how Hugging Face names files of each; which tensors are
written is decided by then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from zero_strategy.checkpoint.elements import bytes_of
from zero_strategy.checkpoint.export_selection import Selection
from zero_strategy.checkpoint.folders import write_json
from zero_strategy.checkpoint.output_file import OutputFile
from zero_strategy.checkpoint.safetensors_io import TensorSpec, layout_of
from zero_strategy.checkpoint.streamed import StreamedTensor
from zero_strategy.checkpoint.torch_archive import write_archive

# Any weight file of either format: beside new ones an old one would be loaded too, or instead.
WEIGHT_FILE = re.compile(r"(model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")

_Progress = Callable[[int], object]  # is told how many bytes have been written


class _Format(NamedTuple):
    stem: str  # of the files
    suffix: str
    write: Callable[[Path, _Shard, Mapping[str, str], _Progress], None]

    @property
    def index_name(self) -> str:
        return f"{self.stem}{self.suffix}.index.json"


class _Shard(NamedTuple):
    """What one file holds."""

    tensors: list[StreamedTensor]
    module_states: Mapping[str, Any]


def write_weights(
    selection: Selection, folder: Path, format_name: str, max_bytes: int, metadata: Mapping[str, str]
) -> None:
    """Write the weights into a folder of the caller's own, with a progress bar over their bytes.

    Args:
        selection: What to write.
        folder: The folder, without any weight file.
        format_name: "safetensors" or "torch".
        max_bytes: Of one file; a larger tensor gets a file of its own.
        metadata: For the headers of safetensors files.

    Raises:
        OSError: The disk is full, the folder not writable.
        CheckpointError: The source is damaged, or a value does not fit into the dtype.
    """
    kind = FORMATS[format_name]
    shards = _split(selection, max_bytes)
    weight_map: dict[str, str] = {}
    total_bytes = selection.num_bytes
    with tqdm(total=total_bytes, unit="B", unit_scale=True, desc="weights", disable=None) as progress:
        for number, shard in enumerate(shards, start=1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file_name = f"{kind.stem}{part}{kind.suffix}"
            names = [name for tensor in shard.tensors for name in tensor.names]
            weight_map.update(dict.fromkeys([*names, *shard.module_states], file_name))
            kind.write(folder / file_name, shard, metadata, progress.update)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        write_json(folder / kind.index_name, index)


def _split(selection: Selection, max_bytes: int) -> list[_Shard]:
    """Fill one file after the other, in the model's order; what is no tensor goes into the first."""
    shards = [_Shard([], selection.module_states)]
    filled_bytes = 0
    for tensor in selection.tensors:
        if shards[-1].tensors and filled_bytes + tensor.num_bytes > max_bytes:
            shards.append(_Shard([], {}))
            filled_bytes = 0
        shards[-1].tensors.append(tensor)
        filled_bytes += tensor.num_bytes
    return shards


def _write_safetensors(path: Path, shard: _Shard, metadata: Mapping[str, str], progress: _Progress) -> None:
    by_key = {tensor.names[0]: tensor for tensor in shard.tensors}
    specs = [TensorSpec(key, tensor.shape, tensor.dtype) for key, tensor in by_key.items()]
    layout = layout_of(specs, metadata)
    with OutputFile(path) as file:
        file.write(layout.header)
        for spec in layout.specs:
            _write_elements(by_key[spec.key], file, progress)


def _write_torch(path: Path, shard: _Shard, metadata: Mapping[str, str], progress: _Progress) -> None:
    content = {name: tensor for tensor in shard.tensors for name in tensor.names} | dict(shard.module_states)
    with OutputFile(path) as file:
        write_archive(file, content, lambda tensor, record: _write_elements(tensor, record, progress))


def _write_elements(tensor: StreamedTensor, file: OutputFile | IO[bytes], progress: _Progress) -> None:
    num_bytes = 0
    for chunk in tensor.chunks():
        view = bytes_of(chunk)
        file.write(view)
        num_bytes += len(view)
        progress(len(view))
    assert num_bytes == tensor.num_bytes, (tensor.names, num_bytes, tensor.num_bytes)


FORMATS: Mapping[str, _Format] = {
    "safetensors": _Format("model", ".safetensors", _write_safetensors),
    "torch": _Format("pytorch_model", ".bin", _write_torch),
}
INDEX_NAMES = tuple(kind.index_name for kind in FORMATS.values())
