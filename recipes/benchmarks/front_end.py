"""Times the same training by a plain loop over the engine and by Lightning's Trainer, per stage and for DDP.

Runs come in pairs, a plain loop and a `Trainer.fit` of as many steps over the same data, in the same
processes; a run's figure is the mean time of a step after the first two. DDP's pair (its plain loop against
`Trainer(strategy="ddp")`) shows what Lightning's own loop costs, whatever the strategy.

    python recipes/benchmarks/front_end.py --pairs 9
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from llama import Shape, build_batch, build_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy as zs

SHAPE = Shape(hidden=256, mlp_hidden=688, layers=4, heads=4, vocabulary=4096)  # 5.3M parameters
SKIPPED_STEPS = 2  # of each run: the Trainer's optimizer makes its state anew in the first

Run = Callable[[int], float]  # trains so many steps; returns seconds a step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="steps of a run (default: %(default)s)")
    options = parser.parse_args()
    print(f"$ python {' '.join(sys.argv)}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"{options.ranks} ranks over gloo, one thread each, fp32, {options.pairs} pairs\n")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=run_rank, args=(rank, f"file://{folder}/meet", options))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    sys.exit(any(process.exitcode for process in ranks))


def run_rank(rank: int, rendezvous: str, options: argparse.Namespace) -> None:
    """Measure every pair on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "zero_strategy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=options.ranks)
    contests: dict[str, tuple[Run, Run]] = {"ddp": (plain_ddp(), by_trainer(lambda: "ddp"))}
    for stage in (1, 2, 3):
        config = zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0)
        strategy = partial(zs.ZeroStrategy, config=config)
        contests[f"zero{stage}"] = (plain_engine(config), by_trainer(strategy))
    if rank == 0:
        print(f"{'':8}{'plain, ms':>12}{'Trainer, ms':>14}{'ratio':>9}{'middle half':>16}")
    for name, (plain, trainer) in contests.items():
        pairs = [(plain(options.steps), trainer(options.steps)) for _ in range(options.pairs + 1)][1:]
        if rank == 0:
            ratios = [fit / loop for loop, fit in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            times = [1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1)]
            half = f"{low:.3f}-{high:.3f}"
            print(f"{name:8}{times[0]:12.1f}{times[1]:14.1f}{middle:8.3f}x{half:>16}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def data(num_steps: int) -> DataLoader[Any]:
    batch = build_batch(SHAPE._replace(batch=num_steps * SHAPE.batch), dist.get_rank())
    return DataLoader(TensorDataset(batch), batch_size=SHAPE.batch)


def seconds_a_step(ends: list[float]) -> float:
    """Return the mean over a run's later steps, the slowest rank's."""
    mean = (ends[-1] - ends[SKIPPED_STEPS - 1]) / (len(ends) - SKIPPED_STEPS)
    slowest = torch.tensor([mean], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


# -- the plain loop --


def plain_engine(config: zs.ZeroConfig) -> Run:
    model = build_model(SHAPE, torch.float32)
    engine = zs.ZeroEngine(model, config)
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    return lambda num_steps: seconds_a_step(list(loop(model, optimizer, num_steps)))


def plain_ddp() -> Run:
    model = DistributedDataParallel(build_model(SHAPE, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return lambda num_steps: seconds_a_step(list(loop(model, optimizer, num_steps)))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Iterator[float]:
    dist.barrier()
    for (tokens,) in data(num_steps):
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter()


# -- by the Trainer --


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model(SHAPE, torch.float32)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(batch[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Ranks(LightningEnvironment):
    """The ranks that exist already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    def local_rank(self) -> int:
        return dist.get_rank()


class Clock(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def by_trainer(new_strategy: Callable[[], Any]) -> Run:
    module = Module()

    def run(num_steps: int) -> float:
        clock = Clock()
        trainer = Trainer(
            strategy=new_strategy(),
            accelerator="cpu",
            devices=dist.get_world_size(),
            max_steps=num_steps,
            callbacks=[clock],
            plugins=[Ranks()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, data(num_steps))
        return seconds_a_step(clock.ends)

    return run


if __name__ == "__main__":
    main()
