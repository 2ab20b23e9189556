"""One safetensors file, written and read as a stream of flat element runs.

Owns the byte layout: header, offsets, dtypes, fsync, checks of a header that nobody can trust. Called by
`format` (rank files) and `consolidate` (Hugging Face files). It does not know what the tensors mean.

The official package builds a file from whole tensors in memory and reads whole tensors. A checkpoint needs
neither: writing goes tensor by tensor (or chunk by chunk), reading takes any range of elements straight
into the caller's memory. The files are ordinary ones; the tests read them with the official package.
Source: safetensors format, https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor

from zero_strategy.checkpoint.durable import CHUNK_BYTES, Checksum, NewFile
from zero_strategy.checkpoint.elements import (
    HEADER_NAMES,
    MAX_COUNT,
    bytes_of,
    checksum,
    cpu_chunks,
    dtype_name,
)
from zero_strategy.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the official reader; a longer header is refused there too
HEADER_ALIGN_BYTES = 64  # so that the data, and with it every tensor of wide elements, starts on a cache line

_DTYPE_OF_HEADER = {header: dtype for dtype, header in HEADER_NAMES.items()}


class TensorSpec(NamedTuple):
    """What a header says about one tensor before its data is there."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensor(NamedTuple):
    """One tensor as written, or as found in a header."""

    key: str
    numel: int
    dtype: torch.dtype
    checksum: str  # over the data; "" where it was read from a header, which holds none
    offset_bytes: int  # of the first element, from the start of the file


class WrittenFile(NamedTuple):
    """A file as written: what somebody who reads it must find."""

    num_bytes: int
    header_checksum: str
    tensors: list[StoredTensor]


class FileLayout(NamedTuple):
    """What a file is going to be: its header, and the order in which the data of its tensors follows."""

    header: bytes
    specs: tuple[TensorSpec, ...]  # in the order of the data
    keys: tuple[str, ...]  # in the order in which they were given

    @property
    def ends(self) -> list[int]:
        """Where the header ends, and then each tensor, in bytes."""
        return list(accumulate([len(self.header), *(spec.num_bytes for spec in self.specs)]))

    def written(self, checksums: Sequence[str]) -> WrittenFile:
        """Return the file as written.

        Args:
            checksums: Of the header, then of each tensor in the order of `specs`.

        Returns:
            One record a tensor, in the order in which they were given.
        """
        stored = {
            spec.key: StoredTensor(spec.key, math.prod(spec.shape), spec.dtype, found, start)
            for spec, found, start in zip(self.specs, checksums[1:], self.ends[:-1], strict=True)
        }
        return WrittenFile(self.ends[-1], checksums[0], [stored[key] for key in self.keys])


# -- writing --


def layout_of(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
    """Lay out a file of these tensors.

    Raises:
        CheckpointError: A dtype cannot be stored, or the header would be too long.
    """
    ordered = tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))  # stable
    return FileLayout(_header(ordered, metadata), ordered, tuple(spec.key for spec in specs))


class SafetensorsWriter:
    """Write one file front to back: the header at once, then the elements in the order of `specs`.

    Usage::

        with SafetensorsWriter(path, specs, metadata) as writer:
            for spec in writer.specs:  # sorted by element size, so that every tensor is aligned
                writer.write(chunk)    # any number of chunks a tensor
        writer.written()               # what was written, with checksums

    Leaving the block flushes the file to the disk. An error inside it, or inside the writer, removes the
    file: either the whole file is there or none.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.layout = layout_of(specs, metadata)
        self.specs = self.layout.specs
        self._file = NewFile(path)
        self._checksums: list[str] = []  # of the header and of the tensors that are complete
        self._filled_bytes = 0  # of the tensor being written
        self._checksum = Checksum()

    def __enter__(self) -> SafetensorsWriter:
        self._file.__enter__()
        try:
            self._file.write(self.layout.header, self._checksum)
        except BaseException as error:
            self._file.__exit__(type(error), error, None)
            raise
        self._end_part()
        self._skip_finished()
        return self

    def write(self, tensor: Tensor) -> None:
        """Append the elements of `tensor` (any shape and device, the dtype of the spec in turn)."""
        for chunk in cpu_chunks(tensor):
            assert not self._is_complete, f"{self.path}: more data than the header announces"
            spec = self.specs[len(self._checksums) - 1]
            assert chunk.dtype == spec.dtype, (spec, chunk.dtype)
            view = bytes_of(chunk)
            self._filled_bytes += len(view)
            assert self._filled_bytes <= spec.num_bytes, (spec, self._filled_bytes)
            self._file.write(view, self._checksum)
            self._skip_finished()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and not self._is_complete:
            error = AssertionError(f"{self.path}: less data than the header announces")
            self._file.__exit__(type(error), error, None)
            raise error
        self._file.__exit__(kind, error, trace)

    def written(self) -> WrittenFile:
        """Return what was written."""
        return self.layout.written(self._checksums)

    @property
    def _is_complete(self) -> bool:
        return len(self._checksums) == 1 + len(self.specs)

    def _skip_finished(self) -> None:
        """Note the tensor that is complete now, and the empty ones after it."""
        while not self._is_complete and self._filled_bytes == self.specs[len(self._checksums) - 1].num_bytes:
            self._end_part()

    def _end_part(self) -> None:
        self._checksums.append(str(self._checksum))
        self._filled_bytes = 0
        self._checksum = Checksum()


class RankFile:
    """The file that one rank is to write.

    Attributes:
        layout: What it is going to be.
    """

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        metadata: Mapping[str, str],
    ) -> None:
        """Lay the file out.

        Args:
            path: A file that does not exist yet.
            tensors: Key and tensor, on any device.
            metadata: For the header; see `records.file_metadata`.

        Shapes:
            tensors [numel] each; others are stored flattened
        Raises:
            CheckpointError: A dtype cannot be stored, a key appears twice.
        """
        self._named = dict(_unique(path, tensors.items() if isinstance(tensors, Mapping) else tensors))
        specs = [TensorSpec(key, (tensor.numel(),), tensor.dtype) for key, tensor in self._named.items()]
        self._writer = SafetensorsWriter(path, specs, metadata)
        self.layout = self._writer.layout

    def write(self) -> WrittenFile:
        """Write it, one tensor at a time, in pieces of 64 MiB, and flush it to the disk.

        Raises:
            CheckpointError: The disk is full, the folder is not writable. The file is removed again.
        """
        with self._writer:
            for spec in self.layout.specs:
                self._writer.write(self._named[spec.key])
        return self._writer.written()

    def placed(self) -> list[tuple[int, Tensor]]:
        """Return what the file consists of, each with its first byte there: the header, then the tensors."""
        header = torch.frombuffer(bytearray(self.layout.header), dtype=torch.uint8)
        tensors = [self._named[spec.key] for spec in self.layout.specs]
        return list(zip([0, *self.layout.ends], [header, *tensors], strict=False))


def _unique(path: Path, items: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    seen: set[str] = set()
    for key, tensor in items:
        if key in seen or key == "__metadata__":
            raise CheckpointError(
                what=f"{path.name} was to hold two tensors under the key {key!r}.",
                why="A safetensors file has one tensor a key, and '__metadata__' is its own.",
                fix="Give every tensor a key of its own.",
            )
        seen.add(key)
        yield key, tensor


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset_bytes = 0
    for spec in specs:
        dtype_name(spec.dtype)  # raises for what cannot be stored
        end_bytes = offset_bytes + spec.num_bytes
        entries[spec.key] = {
            "dtype": HEADER_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset_bytes, end_bytes],
        }
        offset_bytes = end_bytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % HEADER_ALIGN_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            what=f"The header of a safetensors file would take {len(text)} bytes for {len(specs)} tensors.",
            why=f"The format allows {MAX_HEADER_BYTES} bytes.",
            fix="Save fewer tensors a file: use more ranks, or a smaller `max_shard_size_bytes`.",
        )
    return len(text).to_bytes(8, "little") + text


# -- reading --


class SafetensorsFile:
    """One open file: its header, checked, and ranges of its elements.

    Every number of the header is checked against the file's size before it is used, so a damaged or hostile
    file ends in a `CheckpointError` with its name, never in a wild read or a huge allocation.
    """

    def __init__(self, path: Path, whole_bytes: int | None = None) -> None:
        """Open the file and read its header.

        Args:
            path: The file.
            whole_bytes: What it should have, to read the header of one that was cut short; None: what it has.

        Raises:
            CheckpointError: The file is missing, unreadable, or not a whole safetensors file.
        """
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (stays open)
            self.num_bytes = whole_bytes or os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise _damaged(path, f"it could not be opened ({error.strerror or error})") from error
        try:
            self.metadata, self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def read_into(self, key: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of `key` from element `start` on; nothing else is read from the disk.

        Raises:
            CheckpointError: The file ends early or the disk reports an error.
        """
        tensor = self.tensors[key]
        itemsize = tensor.dtype.itemsize
        assert start >= 0 and start * itemsize + len(out) <= tensor.numel * itemsize, (key, start, len(out))
        try:
            self._file.seek(tensor.offset_bytes + start * itemsize)
            filled_bytes = 0
            while filled_bytes < len(out):
                num_read = self._file.readinto(out[filled_bytes : filled_bytes + CHUNK_BYTES])
                if not num_read:
                    raise _damaged(self.path, f"it ends {len(out) - filled_bytes} bytes early inside {key!r}")
                filled_bytes += num_read
        except OSError as error:
            raise _damaged(self.path, f"reading {key!r} failed ({error.strerror or error})") from error

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._file.close()

    def _read_header(self) -> tuple[dict[str, str], dict[str, StoredTensor]]:
        length_bytes = int.from_bytes(self._file.read(8), "little") if self.num_bytes >= 8 else -1
        if not 2 <= length_bytes <= min(MAX_HEADER_BYTES, self.num_bytes - 8):
            raise _damaged(
                self.path, f"it announces a header of {length_bytes} bytes in {self.num_bytes} bytes"
            )
        try:
            header = self._file.read(length_bytes)
            self.header_checksum = checksum(length_bytes.to_bytes(8, "little") + header)
            entries = json.loads(header.decode())
        except (ValueError, RecursionError) as error:
            raise _damaged(self.path, f"its header is not JSON ({error})") from error
        if not isinstance(entries, dict):
            raise _damaged(self.path, "its header is not a JSON object")
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _damaged(self.path, "the '__metadata__' of its header is not a table of strings")
        data_start_bytes = 8 + length_bytes
        tensors = {key: self._stored_tensor(key, entry, data_start_bytes) for key, entry in entries.items()}
        return metadata, tensors

    def _stored_tensor(self, key: str, entry: object, data_start_bytes: int) -> StoredTensor:
        shape, dtype, begin_bytes, end_bytes = self._entry_fields(key, entry)
        numel = math.prod(shape)
        if not begin_bytes <= end_bytes <= self.num_bytes - data_start_bytes:
            raise _damaged(
                self.path,
                f"{key!r} should lie at bytes {begin_bytes} to {end_bytes} of the data, "
                f"of which there are {self.num_bytes - data_start_bytes}",
            )
        if numel * dtype.itemsize != end_bytes - begin_bytes:
            raise _damaged(
                self.path, f"{key!r} has {numel} elements of {dtype} in {end_bytes - begin_bytes} bytes"
            )
        return StoredTensor(key, numel, dtype, "", data_start_bytes + begin_bytes)

    def _entry_fields(self, key: str, entry: object) -> tuple[list[int], torch.dtype, int, int]:
        fields = entry if isinstance(entry, dict) else {}
        dtype = _DTYPE_OF_HEADER.get(str(fields.get("dtype")))
        shape = fields.get("shape")
        offsets = fields.get("data_offsets")
        if dtype is None or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
            raise _damaged(
                self.path, f"the header's entry for {key!r} is malformed: {json.dumps(entry)[:200]}"
            )
        return shape, dtype, offsets[0], offsets[1]


def _are_counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_COUNT for value in values
    )


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        what=f"{path} is not a whole safetensors file of this checkpoint.",
        why=f"Checked on reading: {why}.",
        fix="Use another copy of the folder, or an earlier checkpoint. Nothing on disk was changed.",
    )
