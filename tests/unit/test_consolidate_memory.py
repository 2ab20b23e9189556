"""Consolidation needs less than 64 MiB of memory besides the program, however large model and tensors are.

Oracle: the kernel. A process that has consolidated something small before, so that all is loaded and every
thread has been started once, is allowed 64 MiB of address space more than it has, and must get by.
"""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.synthetic_checkpoint import Description, save
from zero_strategy.checkpoint.consolidate import consolidate
from zero_strategy.checkpoint.export import ExportOptions

ALLOWED_BYTES = 64 * 2**20
WAYS = [
    ExportOptions(format="safetensors"),  # fp32 to the model's bf16
    ExportOptions(format="torch"),
    ExportOptions(format="safetensors", dtype=torch.float32),
    ExportOptions(format="torch", dtype=torch.float32),
    ExportOptions(format="safetensors", dtype=torch.float16),  # looks for infinities too
]


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def save_of_sizes(folder: Path, sizes: list[int]) -> None:
    """Save fp32 masters of bf16 parameters, zeros of so many MiB."""
    state = {f"layer{index}.weight": torch.zeros(size, 2**18) for index, size in enumerate(sizes)}
    save(folder, state, 3, Description(dtypes=dict.fromkeys(state, "bfloat16")))


def consolidate_within_limit(folder: Path) -> None:
    for number, options in enumerate(WAYS):
        consolidate(folder / "small", folder / f"small-{number}", options)
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (address_space_bytes() + ALLOWED_BYTES, limits[1]))
        try:
            consolidate(folder / "large", folder / f"large-{number}", options)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, limits)


def require_within_limit(folder: Path, sizes: list[int]) -> None:
    save_of_sizes(folder / "small", [5, 17])  # larger than all buffers together
    save_of_sizes(folder / "large", sizes)
    run_ranks(consolidate_within_limit, 1, {"folder": folder}, process_group=False)
    for number, options in enumerate(WAYS):
        num_bytes = sum(path.stat().st_size for path in (folder / f"large-{number}").iterdir())
        itemsize = 2 if options.dtype is None else options.dtype.itemsize
        assert num_bytes >= sum(sizes) * 2**18 * itemsize


def test_a_tensor_larger_than_what_is_allowed_is_never_whole(tmp_path: Path) -> None:
    require_within_limit(tmp_path, [1, 80, 3])


@pytest.mark.slow
def test_600_mb_are_consolidated_in_64_mib(tmp_path: Path) -> None:
    require_within_limit(tmp_path, [128, 300, *[16] * 9, 1])
