"""Times the same training by a plain loop over the engine and by a front end, per stage and for DDP.

Runs come in pairs, a plain loop and a run of the front end (Lightning's Trainer, or a loop with Accelerate's
calls) of as many steps over the same data, in the same processes; a run's figure is the mean time of a step
after the first two. DDP's pair shows what the framework's own part costs, whatever shards.

    python recipes/benchmarks/front_end.py --pairs 9
    python recipes/benchmarks/front_end.py --pairs 9 --front-end accelerate
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule, Trainer
from llama import Shape, build_batch, build_model
from ranks import Ranks, launch, print_setting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import zero_strategy as zs
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin

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
    parser.add_argument("--front-end", choices=["trainer", "accelerate"], default="trainer")
    options = parser.parse_args()
    print_setting(options.ranks, f"fp32, {options.pairs} pairs")
    launch(options.ranks, run_rank, options)


def run_rank(ranks: Ranks, options: argparse.Namespace) -> None:
    """Measure every pair on one rank; rank 0 prints."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "zero_strategy"):
        logging.getLogger(name).setLevel(logging.ERROR)
    is_accelerate = options.front_end == "accelerate"
    os.environ["LOCAL_RANK"] = str(ranks.rank)  # tells both frameworks that their ranks exist already
    if is_accelerate:
        os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.world_size)}
        os.environ["OMP_NUM_THREADS"] = "1"
    ddp = by_accelerator(ranks, None) if is_accelerate else by_trainer(ranks, lambda: "ddp")
    contests: dict[str, tuple[Run, Run]] = {"ddp": (plain_ddp(ranks), ddp)}
    for stage in (1, 2, 3):
        config = zs.ZeroConfig(stage=stage, stage3_param_persistence_threshold=0)
        strategy = partial(zs.ZeroStrategy, config=config)
        ours = by_accelerator(ranks, config) if is_accelerate else by_trainer(ranks, strategy)
        contests[f"zero{stage}"] = (plain_engine(ranks, config), ours)
    if ranks.rank == 0:
        print(f"{'':8}{'plain, ms':>12}{options.front_end + ', ms':>16}{'ratio':>9}{'middle half':>16}")
    for name, (plain, trainer) in contests.items():
        pairs = [(plain(options.steps), trainer(options.steps)) for _ in range(options.pairs + 1)][1:]
        if ranks.rank == 0:
            ratios = [fit / loop for loop, fit in pairs]
            low, middle, high = statistics.quantiles(ratios, n=4)
            times = [1e3 * statistics.median(pair[side] for pair in pairs) for side in (0, 1)]
            half = f"{low:.3f}-{high:.3f}"
            print(f"{name:8}{times[0]:12.1f}{times[1]:16.1f}{middle:8.3f}x{half:>16}", flush=True)


def data(ranks: Ranks, num_steps: int) -> DataLoader[Any]:
    batch = build_batch(SHAPE._replace(batch=num_steps * SHAPE.batch), ranks.rank)
    return DataLoader(TensorDataset(batch), batch_size=SHAPE.batch)


def seconds_a_step(ranks: Ranks, ends: list[float]) -> float:
    """Return the mean over a run's later steps, the slowest rank's."""
    return ranks.slowest((ends[-1] - ends[SKIPPED_STEPS - 1]) / (len(ends) - SKIPPED_STEPS))


# -- the plain loop --


def plain_engine(ranks: Ranks, config: zs.ZeroConfig) -> Run:
    model = build_model(SHAPE, torch.float32)
    engine = zs.ZeroEngine(model, config)
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    return lambda num_steps: seconds_a_step(ranks, list(loop(ranks, model, optimizer, num_steps)))


def plain_ddp(ranks: Ranks) -> Run:
    model = DistributedDataParallel(build_model(SHAPE, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return lambda num_steps: seconds_a_step(ranks, list(loop(ranks, model, optimizer, num_steps)))


def loop(ranks: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Iterator[float]:
    ranks.line_up()
    for (tokens,) in data(ranks, num_steps):
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


class Clock(Callback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


def by_trainer(ranks: Ranks, new_strategy: Callable[[], Any]) -> Run:
    module = Module()

    def run(num_steps: int) -> float:
        clock = Clock()
        trainer = Trainer(
            strategy=new_strategy(),
            accelerator="cpu",
            devices=ranks.world_size,
            max_steps=num_steps,
            callbacks=[clock],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(module, data(ranks, num_steps))
        return seconds_a_step(ranks, clock.ends)

    return run


# -- by Accelerate --


def by_accelerator(ranks: Ranks, config: zs.ZeroConfig | None) -> Run:
    """Train with Accelerate's own `Accelerator`, which wraps in DDP, or with ours."""
    plugin = None if config is None else ZeroPlugin(config=config)
    accelerator = Accelerator(cpu=True) if plugin is None else ZeroAccelerator(zero_plugin=plugin)
    model = build_model(SHAPE, torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))

    def run(num_steps: int) -> float:
        ends = []
        ranks.line_up()
        for (tokens,) in data(ranks, num_steps):
            with accelerator.accumulate(model):
                accelerator.backward(model(tokens))
                optimizer.step()
                optimizer.zero_grad()
            ends.append(time.perf_counter())
        return seconds_a_step(ranks, ends)

    return run


if __name__ == "__main__":
    main()
