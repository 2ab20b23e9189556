"""A checkpoint folder read by tensor name and element range.

`plan_reads` is the one function that maps what a reader wants to what the writers stored. It serves another
world size, another stage, another bucket size and consolidation alike, because all of them ask for an
element range of a named tensor. Called by `opened`, `consolidate` and the command line. It does not know who
wants the elements, or why.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from zero_strategy.checkpoint.durable import CHUNK_BYTES, Checksum
from zero_strategy.checkpoint.elements import bytes_of
from zero_strategy.checkpoint.manifest import Manifest, check_piece
from zero_strategy.checkpoint.records import Piece, TensorEntry
from zero_strategy.checkpoint.safetensors_io import SafetensorsFile
from zero_strategy.checkpoint.tags import choose, with_others
from zero_strategy.errors import CheckpointError

# Of a reader; far below the usual limit of 1024 a process, as there may be a file per rank.
MAX_OPEN_FILES = 64
SUM_BYTES = 2**20  # read at once where a checksum is wanted: summed while the processor's cache holds them


class Read(NamedTuple):
    """One contiguous read: elements [start, start + numel) of the tensor, out of one piece."""

    piece: Piece
    start: int
    numel: int

    @property
    def file_start(self) -> int:
        """Element of the piece's key at which the read begins."""
        return self.piece.file_start + self.start - self.piece.start

    @property
    def is_whole(self) -> bool:
        """Whether the read takes its whole piece, so that the piece's checksum applies."""
        return self.numel == self.piece.numel


def plan_reads(entry: TensorEntry, start: int, stop: int) -> list[Read]:
    """Find the reads that give elements [start, stop) of a flattened tensor, in order and without overlap.

    Where pieces overlap (several ranks stored the same elements) the one that begins first is read as far
    as it goes; no element is read twice.

    Raises:
        CheckpointError: The range is not inside the tensor, or no piece holds a part of it.
    """
    if not 0 <= start <= stop <= entry.numel:
        raise CheckpointError(
            what=f"Elements {start} to {stop} of {entry.name!r} were asked for.",
            why=f"The checkpoint holds it with shape {list(entry.shape)}, which is {entry.numel} elements.",
            fix="Build the model as it was when it was saved.",
        )
    reads: list[Read] = []
    position = start
    for piece in sorted(entry.pieces, key=lambda piece: piece.start):  # stable: the first listed wins a tie
        if piece.stop <= position or position == stop:
            continue
        if piece.start > position:
            break
        numel = min(piece.stop, stop) - position
        reads.append(Read(piece, position, numel))
        position += numel
    if position < stop:
        following = min((piece.start for piece in entry.pieces if piece.start > position), default=stop)
        raise CheckpointError(
            what=f"Elements {position} to {min(following, stop)} of {entry.name!r} are in no file of it.",
            why="The pieces the manifest lists leave this range out, so it was edited or damaged.",
            fix="Use another copy of the checkpoint folder, or an earlier checkpoint.",
        )
    return reads


class CheckpointReader:
    """Read element ranges of the tensors of a checkpoint.

    Only the bytes asked for are read. A checksum is compared whenever a piece is read as a whole; a partial
    read cannot be checked. Dtypes are as stored: conversions are the caller's.

    Usage::

        with CheckpointReader(folder) as reader:
            weights = reader.read("model/lm_head.weight", 0, 1000)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        tag: str | None = None,
        check_files: bool = True,
    ) -> None:
        """Open a checkpoint.

        Args:
            folder: The checkpoint, or the outer folder of several.
            tag: Of one in the outer folder; None: see `tags.choose`.
            check_files: Check all files before the first read; otherwise each is checked when first needed.

        Raises:
            CheckpointError: See `Manifest.read` and `tags.choose`. Complete ones beside it are named.
        """
        self.folder = Path(folder, choose(folder, tag) or "")
        try:
            self.manifest = Manifest.read(self.folder, check_files=check_files)
        except CheckpointError as error:
            raise with_others(error, self.folder) from error
        self._open_files: dict[str, SafetensorsFile] = {}  # least recently used first
        # uint8, at most SUM_BYTES, for what is read to be summed only
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- runtime --

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read elements [start, stop) of a tensor; `stop` defaults to its end.

        Shapes:
            returns [stop - start] in the stored dtype, on the CPU
        Raises:
            CheckpointError: No such tensor, a range outside it, a damaged file.
        """
        entry = self.entry(name)
        stop = entry.numel if stop is None else stop
        reads = plan_reads(entry, start, stop)  # before the allocation: a wrong range must not allocate
        out = torch.empty(stop - start, dtype=entry.torch_dtype, device="cpu")
        self._run(entry, reads, out)
        return out

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Read elements [start, start + out.numel()) of a tensor straight into `out`.

        If this raises, the content of `out` is undefined.

        Shapes:
            out [numel] the stored dtype, contiguous, on the CPU
        Raises:
            CheckpointError: No such tensor, a range outside it, a damaged file.
        """
        entry = self.entry(name)
        assert out.dtype == entry.torch_dtype, f"{name}: stored as {entry.torch_dtype}, read as {out.dtype}"
        self._run(entry, plan_reads(entry, start, start + out.numel()), out)

    def read_tensor(self, name: str) -> Tensor:
        """Read a whole tensor in its shape."""
        return self.read(name).reshape(self.entry(name).shape)

    def chunks(self, name: str, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
        """Yield a whole tensor in order, at most `chunk_bytes` at a time; checksums are compared too.

        Each chunk reuses the memory of the one before: use it before asking for the next.

        Shapes:
            yields [at most chunk_bytes / itemsize] in the stored dtype, on the CPU
        Raises:
            CheckpointError: No such tensor, a damaged file.
        """
        entry = self.entry(name)
        chunk_numel = max(1, chunk_bytes // entry.torch_dtype.itemsize)
        out = torch.empty(min(chunk_numel, entry.numel), dtype=entry.torch_dtype, device="cpu")
        for read in plan_reads(entry, 0, entry.numel):
            yield from self._chunks_of(entry, read, out)

    def verify_piece(self, entry: TensorEntry, piece: Piece) -> None:
        """Read one piece, in chunks, and compare its checksum.

        Raises:
            CheckpointError: It differs, or the file cannot be read.
        """
        num_bytes = min(SUM_BYTES, piece.numel * entry.torch_dtype.itemsize)
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        out = self._scratch[:num_bytes].view(entry.torch_dtype)
        for _ in self._chunks_of(entry, Read(piece, piece.start, piece.numel), out):
            pass

    def close(self) -> None:
        """Close all files; the reader may be used again and reopens what it needs."""
        for file in self._open_files.values():
            file.close()
        self._open_files.clear()

    # -- queries --

    def entry(self, name: str) -> TensorEntry:
        """Look up a stored tensor.

        Raises:
            CheckpointError: The checkpoint has no tensor of that name.
        """
        entry = self.manifest.tensors.get(name)
        if entry is None:
            raise CheckpointError(
                what=f"The checkpoint {self.folder} has no tensor {name!r}.",
                why=f"It holds {len(self.manifest.tensors)} tensors, and this name is not among them.",
                fix="Build the model and the optimizers as they were when it was saved; "
                f"`zero-strategy inspect {self.folder}` lists what it holds.",
            )
        return entry

    # -- helpers --

    def _run(self, entry: TensorEntry, reads: list[Read], out: Tensor) -> None:
        view, itemsize = bytes_of(out), out.element_size()
        for read in reads:
            part, view = view[: read.numel * itemsize], view[read.numel * itemsize :]
            if not read.is_whole:
                self._fill(entry, read, 0, part)
                continue
            found = Checksum()
            for start in range(0, len(part), SUM_BYTES):
                chunk = part[start : start + SUM_BYTES]
                self._fill(entry, read, start // itemsize, chunk)
                found.add(chunk)
            self._compare(entry, read.piece, str(found))

    def _chunks_of(self, entry: TensorEntry, read: Read, out: Tensor) -> Iterator[Tensor]:
        """Yield one read in chunks, each in the memory of `out`, and compare the checksum at the end."""
        found = Checksum()
        for offset in range(0, read.numel, max(1, out.numel())):
            chunk = out[: read.numel - offset]
            view = bytes_of(chunk)
            self._fill(entry, read, offset, view)
            found.add(view)
            yield chunk
        if read.is_whole:
            self._compare(entry, read.piece, str(found))

    def _fill(self, entry: TensorEntry, read: Read, offset: int, view: memoryview) -> None:
        """Read into `view`, beginning `offset` elements after the start of the read."""
        name = read.piece.file
        file = self._open_files.pop(name, None) or self.manifest.open_file(self.folder, name)
        self._open_files[name] = file  # now the most recently used
        if len(self._open_files) > MAX_OPEN_FILES:
            self._open_files.pop(next(iter(self._open_files))).close()
        check_piece(file, entry, read.piece)
        file.read_into(read.piece.key, read.file_start + offset, view)

    def _compare(self, entry: TensorEntry, piece: Piece, found: str) -> None:
        if found != piece.checksum:
            raise CheckpointError(
                what=f"{piece.file} in {self.folder} is damaged: elements {piece.start} to {piece.stop} of "
                f"{entry.name!r} are not what was saved.",
                why=f"Their checksum is {found}, and {piece.checksum} was recorded when they were written.",
                fix="Use another copy of the checkpoint folder, or an earlier checkpoint. "
                f"`zero-strategy verify {self.folder}` lists every damaged part.",
            )
