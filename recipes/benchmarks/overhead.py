"""Measures what the library costs beside arithmetic and messages: Python in a step, its import, its start.

Python: a model of 500 linear layers of 16x16 at one rank, where nothing travels, in processor time against
the same steps in plain torch. Import: fresh interpreters that import torch, with and without the library.
Start: from the launch of two ranks to the end of their first step, against DDP. All are interleaved.

    python recipes/benchmarks/overhead.py
    python recipes/benchmarks/overhead.py --only python --rounds 41
"""

from __future__ import annotations

import argparse
import logging
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from llama import Shape, build_batch, build_model
from ranks import Ranks, launch, print_setting
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs

NUM_LAYERS, WIDTH, BATCH = 500, 16, 4
WARM_UP_ROUNDS = 5
START = Shape(hidden=256, mlp_hidden=688, layers=4, heads=4, vocabulary=4096)  # 5.3M parameters

Step = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21, help="measured rounds (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    options = parser.parse_args()
    print_setting(1, f"{options.rounds} rounds")
    for name in options.only:
        SECTIONS[name](options.rounds)


# -- Python in a step --


def measure_python(rounds: int) -> None:
    seconds = launch(1, step_in_turn, rounds)[0]
    base = statistics.median(seconds["plain"])
    print(f"{'a step of 500 layers':28}{'CPU, ms':>10}{'to plain':>10}")
    for name, own in seconds.items():
        middle = statistics.median(own)
        print(f"{name:28}{1e3 * middle:10.1f}{middle / base:9.2f}x", flush=True)


def step_in_turn(ranks: Ranks, rounds: int) -> dict[str, list[float]]:
    """Step all contenders in turn; return the processor seconds of each step."""
    logging.getLogger("zero_strategy").setLevel(logging.ERROR)
    steps = {"plain": plain(), **{f"zero{stage}": zero(stage=stage) for stage in range(4)}}
    steps["zero3, nothing persistent"] = zero(stage=3, stage3_param_persistence_threshold=0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARM_UP_ROUNDS + rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number >= WARM_UP_ROUNDS:
                seconds[name].append(time.process_time() - start)
    return seconds


def tiny_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def plain() -> Step:
    model = tiny_layers()
    return partial(one_step, model, torch.optim.AdamW(model.parameters(), fused=True))


def zero(**keys: int) -> Step:
    model = tiny_layers()
    engine = zs.ZeroEngine(model, zs.ZeroConfig(**keys))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    return partial(one_step, model, optimizer)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss: Tensor = model(torch.ones(BATCH, WIDTH)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# -- import --


def measure_import(rounds: int) -> None:
    commands = {
        "torch": "import torch, torch.distributed",
        "zero_strategy": "import torch, torch.distributed; import zero_strategy",
        "zero_strategy.ZeroEngine": "import torch, torch.distributed; from zero_strategy import ZeroEngine",
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", command], check=True)
            seconds[name].append(time.perf_counter() - start)
    print()
    for name, own in list(seconds.items())[1:]:
        added = statistics.median(a - b for a, b in zip(own, seconds["torch"], strict=True))
        print(f"import of {name} adds {added:.2f} s to that of torch (median of {rounds} pairs)", flush=True)


# -- start --


def measure_start(rounds: int) -> None:
    rounds = min(rounds, 9)
    launch(2, first_step, "ddp")  # the first launch starts the server that forks the others
    added = []
    for _ in range(rounds):
        seconds = {}
        for name in ("ddp", "zero3"):
            start = time.perf_counter()
            ends = launch(2, first_step, name)
            seconds[name] = max(ends) - start
        added.append(seconds["zero3"] - seconds["ddp"])
    middle = statistics.median(added)
    print(
        f"from launch to the first step zero3 takes {middle:.2f} s more than DDP (median of {rounds} pairs)"
    )


def first_step(ranks: Ranks, name: str) -> float:
    """Train one step; return when it had ended, by a clock that all processes share."""
    logging.getLogger("zero_strategy").setLevel(logging.ERROR)
    model: nn.Module = build_model(START, torch.float32)
    if name == "ddp":
        model = DistributedDataParallel(model)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=3))
        optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    loss: Tensor = model(build_batch(START, ranks.rank))
    loss.backward()
    optimizer.step()
    return time.perf_counter()


SECTIONS: dict[str, Callable[[int], None]] = {
    "python": measure_python,
    "import": measure_import,
    "start": measure_start,
}


if __name__ == "__main__":
    main()
