"""The host copy: what an asynchronous save copies a rank's state into, so that training may go on.

Host memory that the rank and its writer process see alike. It is made at the first save and kept: handing out
and clearing fresh pages costs more than the copy. It has no name in any file system and is gone with the last
process that holds it. Owned by `background`; knows bytes, not what they mean.

[Note: Why it is shared]
A forked process would see everything as it is now without a copy, but it would also hold the locks that other
threads hold at that moment, and a CUDA context that nobody may use. Through a pipe all bytes would be copied
once more, by the rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from zero_strategy import compat
from zero_strategy.errors import CheckpointError

# A large page of x86-64 and arm64: what the size is a multiple of, so that the memory may consist of such.
PAGE_BYTES = 2 * 2**20
PIECE_BYTES = 16 * 2**20  # what a thread copies at a time


class HostCopy:
    """Host memory shared with the writer process, as large as the largest save so far."""

    def __init__(self) -> None:
        self._held = _Held()
        weakref.finalize(self, self._held.give_back)  # of an engine that is dropped without close()

    @property
    def num_bytes(self) -> int:
        """Its size; 0 until it is first needed."""
        return 0 if self._held.bytes is None else self._held.bytes.numel()

    @property
    def descriptor(self) -> int:
        """The file descriptor by which another process maps it; the same while it grows."""
        assert self._held.descriptor >= 0, "no memory yet"
        return self._held.descriptor

    def reserve(self, num_bytes: int) -> None:
        """Make sure that it has so many bytes. What it held may be lost.

        Raises:
            CheckpointError: The system does not give them.
        """
        if num_bytes <= self.num_bytes:
            return
        if sys.platform != "linux":
            raise CheckpointError(
                what=f"An asynchronous save was asked for on {sys.platform}.",
                why="The memory that it shares with its writer process is a thing of Linux (memfd_create).",
                fix="Save without asynchronous=True here.",
            )
        num_bytes += -num_bytes % PAGE_BYTES
        try:
            self._held.map(num_bytes)
        except OSError as error:
            raise CheckpointError(
                what=f"No {num_bytes:,} bytes of host memory for an asynchronous save: {error.strerror}.",
                why="It copies what this rank saves into memory of its own before training goes on.",
                fix="Save without asynchronous=True, which needs no copy, or use more ranks.",
            ) from error

    def fill(self, placed: Iterable[tuple[int, Tensor]]) -> None:
        """Copy tensors in, and return when they are there: what is done to them afterwards changes nothing.

        Args:
            placed: Where each begins, in bytes, and the tensor.

        Shapes:
            each any shape and dtype, on any device
        Raises:
            CheckpointError: A tensor is on a GPU, and the memory cannot be page-locked for it.
        """
        memory = self._held.bytes
        assert memory is not None, "no memory yet"
        copies: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for start, tensor in placed:
            values = _as_bytes(tensor)
            copies.setdefault(values.device, []).append((memory[start : start + values.numel()], values))
        for device, pairs in copies.items():
            if device.type == "cpu":
                _copy_on_host(pairs)
                continue
            if device.type == "cuda":
                self._pin()
            with compat.copying_to_host(device):
                for target, values in pairs:
                    # Elsewhere a copy that is not waited for may still run when its memory is written out.
                    target.copy_(values, non_blocking=device.type == "cuda")

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._held.give_back()

    def _pin(self) -> None:
        """Page-lock the memory: else a copy from a GPU goes through a small buffer, and slowly."""
        try:
            self._held.pin()
        except RuntimeError as error:
            raise CheckpointError(
                what=f"{self.num_bytes:,} bytes of host memory could not be page-locked: {error}",
                why="An asynchronous save copies from the GPU into such memory before training goes on.",
                fix="Raise the limit of locked memory (ulimit -l), or save without asynchronous=True.",
            ) from error


class _Held:
    """What of the system's must be given back."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.bytes: Tensor | None = None  # [num_bytes] uint8
        self._is_pinned = False

    def map(self, num_bytes: int) -> None:
        """Have a memory of this size."""
        self._unmap()
        if self.descriptor < 0:
            self.descriptor = os.memfd_create("zero_strategy-host-copy")
        os.ftruncate(self.descriptor, num_bytes)
        mapped = mmap.mmap(self.descriptor, num_bytes)
        with contextlib.suppress(OSError):  # a kernel without large pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)  # keeps `mapped` alive

    def pin(self) -> None:
        if not self._is_pinned and self.bytes is not None:
            compat.page_lock(self.bytes)
            self._is_pinned = True

    def give_back(self) -> None:
        self._unmap()
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def _unmap(self) -> None:
        if self._is_pinned and self.bytes is not None:
            compat.page_unlock(self.bytes)
        self._is_pinned, self.bytes = False, None


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements in order, [num_bytes] uint8, where the tensor is; a view if it can be."""
    flat = tensor.detach().reshape(-1).contiguous()
    return flat.resolve_conj().resolve_neg().view(torch.uint8)


def _copy_on_host(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy from the second of each pair to the first, in as many threads as torch computes with.

    By the C library, which writes large pieces past the caches: torch's own copy reads what it overwrites.

    Shapes:
        each pair [num_bytes] uint8, contiguous, on the host
    """
    pieces = [
        (target.data_ptr() + start, source.data_ptr() + start, min(PIECE_BYTES, source.numel() - start))
        for target, source in pairs
        for start in range(0, source.numel(), PIECE_BYTES)
    ]
    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(_move_all, [pieces[number::num_threads] for number in range(num_threads)]))


def _move_all(pieces: Sequence[tuple[int, int, int]]) -> None:
    for target, source, num_bytes in pieces:
        ctypes.memmove(target, source, num_bytes)  # lets other threads run
