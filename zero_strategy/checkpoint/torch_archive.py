"""A file that `torch.load` reads, written as a stream: no tensor is ever whole in memory.

`torch.save` wants whole tensors, all of them at once. The file it makes is a zip archive, uncompressed: a
pickle of the structure, in which tensors are numbers, and one record of plain bytes for each number. Here the
pickle is made of stand-ins, and the records follow one by one. Called by `weight_files`; it does not know
what the tensors are.
Source: torch.serialization, torch 2.13 (`_save`, `_load`); tests read the files with `torch.load`.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
from collections.abc import Callable
from typing import IO, Any, NamedTuple, cast
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch

from zero_strategy import compat
from zero_strategy.checkpoint.output_file import OutputFile
from zero_strategy.checkpoint.streamed import StreamedTensor

ALIGN_BYTES = 64  # what torch.save aligns to, so that a mapped tensor starts on a cache line
_FOLDER = "archive"  # torch wants all records in one folder, of any name
_VERSION = b"3\n"  # of the archive, as torch.save writes it since 1.6
_PROTOCOL = 2  # of the pickle, as torch.save's default; `weights_only` reads no other reliably
_LOCAL_HEADER_BYTES = 30  # of a record, before its name
_ZIP64_BYTES = 20  # the field in its header that says the sizes are in 64 bits
_LARGE_BYTES = 2**30  # from here on records have that field; zipfile demands it from almost 2 GiB
_PADDING_ID = b"FB"  # of the field in its header that pads, as torch.save names it


def write_archive(
    file: OutputFile, content: object, write_elements: Callable[[StreamedTensor, IO[bytes]], None]
) -> None:
    """Write what `torch.load(weights_only=True)` gives back as `content`, with tensors for the stand-ins.

    Args:
        file: An empty one.
        content: Dicts with string keys, lists and plain values; a `StreamedTensor` stands for a contiguous
            tensor on the CPU, and the same one in two places for one tensor.
        write_elements: Called once for each of them, to write its elements to a file.
    """
    pickled, tensors = _pickle(content)
    # `tell` and `write` are all that zipfile needs of a file that it does not seek in.
    with ZipFile(cast("IO[bytes]", file), "w", ZIP_STORED) as archive:
        _write_record(archive, file, "data.pkl", pickled)
        # No ".format_version": with one torch may compute where records lie instead of looking.
        _write_record(archive, file, "byteorder", sys.byteorder.encode())
        for number, tensor in enumerate(tensors):
            info = _info(f"data/{number}", tensor.num_bytes, file.tell())
            with archive.open(info, "w", force_zip64=tensor.num_bytes >= _LARGE_BYTES) as record:
                write_elements(tensor, record)
        _write_record(archive, file, "version", _VERSION)


class _Storage(NamedTuple):
    """Stands for the memory of a tensor in the pickle."""

    number: int
    tensor: StreamedTensor


class _Pickler(pickle.Pickler):
    """Pickles stand-ins as `torch.save` pickles tensors, and gives them numbers."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[StreamedTensor] = []

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, StreamedTensor):
            return NotImplemented
        storage = _Storage(len(self.tensors), obj)
        self.tensors.append(obj)
        return compat.pickled_tensor(storage, obj.shape, obj.dtype)

    def persistent_id(self, obj: object) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = compat.pickled_storage(obj.tensor.dtype)
        numel = obj.tensor.num_bytes if kind is torch.UntypedStorage else math.prod(obj.tensor.shape)
        return ("storage", kind, str(obj.number), "cpu", numel)


def _pickle(content: object) -> tuple[bytes, list[StreamedTensor]]:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(content)
    return buffer.getvalue(), pickler.tensors


def _write_record(archive: ZipFile, file: OutputFile, name: str, data: bytes) -> None:
    archive.writestr(_info(name, len(data), file.tell()), data)


def _info(name: str, num_bytes: int, offset_bytes: int) -> ZipInfo:
    """Describe a record whose header will be at an offset, so that its data is aligned."""
    info = ZipInfo(f"{_FOLDER}/{name}")
    info.file_size = num_bytes
    before_bytes = offset_bytes + _LOCAL_HEADER_BYTES + len(info.filename) + len(_PADDING_ID) + 2
    if num_bytes >= _LARGE_BYTES:
        before_bytes += _ZIP64_BYTES
    padding_bytes = -before_bytes % ALIGN_BYTES
    info.extra = _PADDING_ID + struct.pack("<H", padding_bytes) + bytes(padding_bytes)
    return info
