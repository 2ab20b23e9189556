"""Compares `zero-strategy consolidate` with `cp` of as many bytes, on the same disk.

Two ranks save a model of SmolLM2's size in bf16 with fp32 masters. It is consolidated in both formats; `cp`
copies the folder that came out, in a process of its own whose start counts. Each round does one of everything
in turn. "fsync": both sides flush to the disk before the clock stops; "cache": neither does (our fsync is
left out). What is read lies in the cache of the disk. Memory is the growth of this process's peak.

    python recipes/benchmarks/consolidate.py --rounds 7
    python recipes/benchmarks/consolidate.py --layers 4 --sync cache --folder /a/disk
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from llama import Shape, build_model
from ranks import Ranks, launch, print_setting

import zero_strategy as zs
from zero_strategy.checkpoint.consolidate import consolidate
from zero_strategy.checkpoint.export import ExportOptions

SMOLLM2 = Shape(hidden=576, mlp_hidden=1536, layers=30, heads=9, vocabulary=49152)
WAYS = {
    "safetensors, fp32": ExportOptions(dtype=torch.float32),
    "torch, fp32": ExportOptions(format="torch", dtype=torch.float32),
    "safetensors, to bf16": ExportOptions(),
    "torch, to bf16": ExportOptions(format="torch"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=SMOLLM2.layers, help="(default: %(default)s)")
    parser.add_argument("--sync", nargs="+", default=["fsync", "cache"], choices=["fsync", "cache"])
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    print_setting(2, f"saved; {options.rounds} rounds")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        launch(2, save, SMOLLM2._replace(layers=options.layers), name)
        for sync in options.sync:
            with without_fsync(sync == "cache"):
                measure(Path(name), options.rounds, flushes=sync == "fsync")


def save(ranks: Ranks, shape: Shape, folder: str) -> None:
    """Write the checkpoint that is consolidated."""
    engine = zs.ZeroEngine(
        build_model(shape, torch.float32), {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    )
    engine.save_checkpoint(f"{folder}/checkpoint", weights_only=True)
    engine.close()


def measure(folder: Path, rounds: int, *, flushes: bool) -> None:
    """Time everything in turn and print a row for each."""
    ours: dict[str, list[float]] = {name: [] for name in WAYS}
    cps: dict[str, list[float]] = {name: [] for name in WAYS}
    grown_kib, num_bytes = dict.fromkeys(WAYS, 0), dict.fromkeys(WAYS, 0)
    out, copied = folder / "out", folder / "copy"
    for _ in range(rounds + 1):
        for name, options in WAYS.items():
            before_kib = peak_kib()
            ours[name].append(timed(partial(consolidate, folder / "checkpoint", out, options)))
            grown_kib[name] = max(grown_kib[name], peak_kib() - before_kib)
            num_bytes[name] = sum(path.stat().st_size for path in out.iterdir())
            cps[name].append(timed(partial(copy, out, copied, flushes=flushes)))
            shutil.rmtree(copied)
            shutil.rmtree(out)
    title = "fsync on both sides" if flushes else "no fsync"
    print(f"{title:22}{'MB':>8}{'ours, s':>9}{'cp, s':>9}{'ratio':>8}{'middle half':>14}{'peak, MiB':>11}")
    for name in WAYS:
        ratios = [a / b for a, b in zip(ours[name][1:], cps[name][1:], strict=True)]  # the first warms up
        low, middle, high = statistics.quantiles(ratios, n=4)
        seconds = [statistics.median(times[name][1:]) for times in (ours, cps)]
        print(f"{name:22}{num_bytes[name] / 1e6:8.0f}{seconds[0]:9.3f}{seconds[1]:9.3f}{middle:8.2f}", end="")
        print(f"{f'{low:.2f}-{high:.2f}':>14}{grown_kib[name] / 1024:11.1f}", flush=True)
    print()


def copy(source: Path, target: Path, *, flushes: bool) -> None:
    """Copy a folder by `cp`, and flush what came of it."""
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    for path in target.iterdir() if flushes else ():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes."""
    os.sync()  # or the disk would still be busy with what was written before
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def peak_kib() -> int:
    """Return the most memory that this process has had so far, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def without_fsync(wanted: bool) -> Iterator[None]:
    """Leave out every flush to the disk, if that is wanted."""
    if not wanted:
        yield
        return
    with patch("os.fsync", lambda descriptor: None):
        yield


if __name__ == "__main__":
    main()
