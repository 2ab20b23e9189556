"""Times durable saves of training state, and loads at another world size, against torch.save and DCP.

Every contender has the same tensors: fp32 weights and Adam's two moments of a Llama-shaped model. A save
ends when all ranks have what they wrote on the disk; `torch.save` is given the flush it does not do.
Contenders take turns (A B C A B C), so that a busy machine or disk slows them alike; what is reported is the
median over rounds of the ratio to ours. Before a load the files are dropped from the page cache.

    python recipes/benchmarks/checkpoint.py --folder /a/disk --mb 1600

"without checksums" is ours with checksums that do nothing: what they cost. Nothing loads from it. The stall
is the time until an asynchronous save returns, in copies of as many bytes within the host's memory.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import Shape, build_batch, build_model
from ranks import Ranks, launch, print_setting
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import zero_strategy as zs
from zero_strategy.checkpoint import safetensors_io

CONTESTS = ("save", "stall", "load")
OURS, COPY = "ours", "copy of the shards"  # what the others of a contest are measured in
BYTES_A_PARAMETER = 12  # fp32 weight and two moments

Turn = Callable[[Path], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--mb", type=int, default=1600, help="of state, 10**6 bytes (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="that save (default: %(default)s)")
    parser.add_argument("--load-ranks", type=int, default=3, help="that load (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measured (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=CONTESTS, choices=CONTESTS)
    options = parser.parse_args()
    shape = shape_of(options.mb * 10**6)
    folder = Path(options.folder, f"checkpoint-benchmark-{os.getpid()}").absolute()
    folder.mkdir(parents=True)
    print_setting(options.ranks, f"{options.mb} MB, {options.rounds} rounds, loaded by {options.load_ranks}")
    try:
        if "save" in options.only:
            report("save", launch(options.ranks, measure_saves, shape, folder, options.rounds)[0], options.mb)
        if "stall" in options.only:
            report(
                "stall", launch(options.ranks, measure_stalls, shape, folder, options.rounds)[0], options.mb
            )
        if "load" in options.only:
            launch(options.ranks, save_both, shape, folder)
            loads = launch(options.load_ranks, measure_loads, shape, folder, options.rounds)[0]
            report("load", loads, options.mb)
    finally:
        shutil.rmtree(folder)


def shape_of(num_bytes: int) -> Shape:
    """Return a model with so much state: the vocabulary is what is left beside 12 layers."""
    shape = Shape(hidden=768, mlp_hidden=2048, layers=12, heads=12, sequence=8, batch=1)
    per_layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.mlp_hidden
    left_numel = num_bytes // BYTES_A_PARAMETER - shape.layers * per_layer
    if left_numel < 0:
        shape = shape._replace(layers=1)
        left_numel = num_bytes // BYTES_A_PARAMETER - per_layer
    return shape._replace(vocabulary=max(64, left_numel // (2 * shape.hidden)))


def report(what: str, times: dict[str, list[float]], num_mb: int) -> None:
    """Print the medians of one contest."""
    base = next(iter(times))
    print(f"{what:34}{'seconds':>9}{'MB/s':>8}  times {base}, middle half")
    for name, seconds in times.items():
        ratios = [one / other for one, other in zip(seconds, times[base], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(seconds)
        print(f"{name:34}{median:9.2f}{num_mb / median:8.0f}{middle:10.2f}x{low:9.2f}-{high:.2f}")
    print(flush=True)


# -- saving --


def measure_saves(ranks: Ranks, shape: Shape, folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Time every contender's saves on one rank; the first round warms up."""
    engine, sharded = ours(shape, ranks), peers(shape)
    shards = {name: local(value) for name, value in flat(sharded())}
    whole = {
        name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in flat(sharded())
    }
    contenders: dict[str, Turn] = {
        OURS: engine.save_checkpoint,
        "ours without checksums": partial(without_checksums, engine.save_checkpoint),
        "torch.save, whole, by rank 0": lambda path: torch_save(whole, path) if ranks.rank == 0 else None,
        "torch.save, a file per rank": lambda path: torch_save(shards, path.with_suffix(f".{ranks.rank}")),
        "DCP": lambda path: dcp_save(sharded(), path),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds + 1):
        for name, save in contenders.items():
            times[name].append(timed(ranks, partial(save, folder / "turn")))
            clear(ranks, folder)
    return {name: seconds[1:] for name, seconds in times.items()}


def measure_stalls(ranks: Ranks, shape: Shape, folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Time a copy and the calls that begin an asynchronous save; the first round warms up."""
    engine = ours(shape, ranks)
    numel = sum(param.numel() for param in engine.model.parameters()) * BYTES_A_PARAMETER // 4
    source = torch.ones(numel // ranks.world_size)  # not zeros, which the kernel keeps in one page
    target = torch.ones_like(source)
    contenders: dict[str, Turn] = {
        COPY: lambda path: target.copy_(source),
        "asynchronous save": lambda path: engine.save_checkpoint(path, asynchronous=True),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds + 1):
        for name, begin in contenders.items():
            times[name].append(timed(ranks, partial(begin, folder / "turn")))
            engine.wait_for_checkpoint()
            clear(ranks, folder)
    return {name: seconds[1:] for name, seconds in times.items()}


def torch_save(state: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def dcp_save(state: dict[str, Any], path: Path) -> None:
    writer = dcp.FileSystemWriter(path, sync_files=True, single_file_per_rank=True)
    dcp.save(state, storage_writer=writer)


def without_checksums(save: Turn, path: Path) -> None:
    with mock.patch.object(safetensors_io.Checksum, "add", lambda self, data: None):
        save(path)


def clear(ranks: Ranks, folder: Path) -> None:
    ranks.line_up()
    if ranks.rank == 0:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    ranks.line_up()


def timed(ranks: Ranks, turn: Callable[[], Any]) -> float:
    """Return the slowest rank's time."""
    ranks.line_up()
    start = time.perf_counter()
    turn()
    return ranks.slowest(time.perf_counter() - start)


# -- loading --


def save_both(ranks: Ranks, shape: Shape, folder: Path) -> None:
    ours(shape, ranks).save_checkpoint(folder / "ours")
    dcp_save(peers(shape)(), folder / "dcp")


def measure_loads(ranks: Ranks, shape: Shape, folder: Path, num_rounds: int) -> dict[str, list[float]]:
    """Time every contender's loads on one rank; the first round warms up."""
    engine = ours(shape, ranks)
    model, optimizer = fsdp2(shape)
    contenders: dict[str, Callable[[], Any]] = {
        OURS: lambda: engine.load_checkpoint(folder / "ours"),
        "DCP": lambda: dcp_load(model, optimizer, folder / "dcp"),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(num_rounds + 1):
        for name, load in contenders.items():
            forget_files(ranks, folder)
            times[name].append(timed(ranks, load))
    return {name: seconds[1:] for name, seconds in times.items()}


def dcp_load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"weights": weights, "states": states}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def forget_files(ranks: Ranks, folder: Path) -> None:
    """Drop the files from the page cache."""
    ranks.line_up()
    if ranks.rank == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    ranks.line_up()


# -- the state --


def ours(shape: Shape, ranks: Ranks) -> zs.ZeroEngine:
    model = build_model(shape, torch.float32)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    model(build_batch(shape, ranks.rank)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return engine


def fsdp2(shape: Shape) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = build_model(shape, torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def peers(shape: Shape) -> Callable[[], dict[str, Any]]:
    """Return what gives the state dict of a model under FSDP2, which DCP saves without a copy."""
    model, optimizer = fsdp2(shape)

    def state() -> dict[str, Any]:
        weights, states = get_state_dict(model, optimizer)
        return {"weights": weights, "states": states}

    return state


def flat(state: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dicts with their paths."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}{key}", value


def local(value: torch.Tensor) -> torch.Tensor:
    # A copy: torch.save writes the whole storage that a shard is a view of.
    return (value.to_local() if isinstance(value, DTensor) else value).clone()


if __name__ == "__main__":
    main()
