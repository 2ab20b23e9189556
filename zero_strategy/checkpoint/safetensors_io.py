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
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple, TypeGuard

import torch
from torch import Tensor

from zero_strategy.checkpoint.elements import (
    CHUNK_BYTES,
    HEADER_NAMES,
    MAX_COUNT,
    Checksum,
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


# -- writing --


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
        self.specs = tuple(sorted(specs, key=lambda spec: -spec.dtype.itemsize))  # stable
        self.stored: list[StoredTensor] = []
        self.num_bytes = 0  # written so far, header included
        self._header = header_bytes(self.specs, metadata)
        self._filled_bytes = 0  # of the tensor being written
        self._checksum = Checksum()
        self._file: BinaryIO | None = None

    def __enter__(self) -> SafetensorsWriter:
        try:
            # "x": names are drawn at random, so a file that is there belongs to somebody else.
            self._file = open(self.path, "xb", buffering=0)
        except OSError as error:
            raise _write_error(self.path, error) from error
        try:
            self._write_bytes(memoryview(self._header))
            self._skip_finished()
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, tensor: Tensor) -> None:
        """Append the elements of `tensor` (any shape and device, the dtype of the spec in turn)."""
        for chunk in cpu_chunks(tensor):
            assert len(self.stored) < len(self.specs), f"{self.path}: more data than the header announces"
            spec = self.specs[len(self.stored)]
            assert chunk.dtype == spec.dtype, (spec, chunk.dtype)
            view = bytes_of(chunk)
            self._filled_bytes += len(view)
            assert self._filled_bytes <= spec.num_bytes, (spec, self._filled_bytes)
            self._checksum.add(view)
            self._write_bytes(view)
            self._skip_finished()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None, "left without being entered"
        if error is not None:
            self._discard()
            return
        try:
            assert len(self.stored) == len(self.specs), (
                f"{self.path}: {len(self.stored)} of {len(self.specs)}"
            )
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as failure:
            self._discard()
            raise _write_error(self.path, failure) from failure
        except BaseException:
            self._discard()
            raise

    def written(self) -> WrittenFile:
        """Return what was written, in the order of `specs`."""
        return WrittenFile(self.num_bytes, checksum(self._header), list(self.stored))

    def _skip_finished(self) -> None:
        """Record the tensor that is complete now, and the empty ones after it."""
        while len(self.stored) < len(self.specs):
            spec = self.specs[len(self.stored)]
            if self._filled_bytes < spec.num_bytes:
                return
            offset_bytes = self.num_bytes - spec.num_bytes
            numel = math.prod(spec.shape)
            self.stored.append(StoredTensor(spec.key, numel, spec.dtype, str(self._checksum), offset_bytes))
            self._filled_bytes = 0
            self._checksum = Checksum()

    def _write_bytes(self, view: memoryview) -> None:
        assert self._file is not None, "written to without being entered"
        written_bytes = 0
        try:
            while written_bytes < len(view):  # one write may take less than all, and at most 2 GiB on Linux
                written_bytes += self._file.write(view[written_bytes : written_bytes + CHUNK_BYTES])
        except OSError as error:
            raise _write_error(self.path, error) from error
        self.num_bytes += written_bytes

    def _discard(self) -> None:
        if self._file is not None:
            self._file.close()
        self.path.unlink(missing_ok=True)


def write_rank_file(
    path: Path,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    metadata: Mapping[str, str],
) -> WrittenFile:
    """Write flat tensors to a new file, one at a time, and flush it to the disk.

    Args:
        path: A file that does not exist yet. It is removed again if anything fails.
        tensors: Key and tensor; tensors may lie on any device and are copied to the host in pieces of 64 MiB.
        metadata: For the header; see `records.file_metadata`.

    Returns:
        What was written, with one record a tensor, in the order given.

    Shapes:
        tensors [numel] each; others are stored flattened
    Raises:
        CheckpointError: The disk is full, the folder is not writable, a dtype cannot be stored, a key
            appears twice.
    """
    named = dict(_unique(path, tensors.items() if isinstance(tensors, Mapping) else tensors))
    specs = [TensorSpec(key, (tensor.numel(),), tensor.dtype) for key, tensor in named.items()]
    with SafetensorsWriter(path, specs, metadata) as writer:
        for spec in writer.specs:
            writer.write(named[spec.key])
    by_key = {stored.key: stored for stored in writer.stored}
    return writer.written()._replace(tensors=[by_key[key] for key in named])


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


def header_bytes(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return what a file begins with whose tensors lie one after the other in the order of `specs`.

    Raises:
        CheckpointError: A dtype cannot be stored, or the header would be too long.
    """
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


def _write_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        what=f"{path} could not be written: {error.strerror or error}.",
        why="The system refused it. The unfinished file was removed; an earlier checkpoint is untouched.",
        fix="Check free space, quota and permissions of the folder, then save again.",
    )


# -- reading --


class SafetensorsFile:
    """One open file: its header, checked, and ranges of its elements.

    Every number of the header is checked against the file's size before it is used, so a damaged or hostile
    file ends in a `CheckpointError` with its name, never in a wild read or a huge allocation.
    """

    def __init__(self, path: Path) -> None:
        """Open the file and read its header.

        Raises:
            CheckpointError: The file is missing, unreadable, or not a whole safetensors file.
        """
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 (stays open)
            self.num_bytes = os.fstat(self._file.fileno()).st_size
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
