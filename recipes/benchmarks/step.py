"""Times one training step under DDP, its peers and zero_strategy, and counts bytes and memory.

All contenders train the same model on the same data in the same processes, a few steps each in turn (A B C A
B C), so that a busy machine slows them alike; what is reported is the median over rounds of the ratio to
DDP's steps of the same round. A turn ends when the weights are there: a step of stages 1 and 2 returns while
they are gathered. Bytes are the kernel's count over all ranks (ranks.py says where that means
something). Peak memory is that of fresh processes that run one contender alone, the whole process, above what
it had before the model.

    python recipes/benchmarks/step.py --dtype float32
    python recipes/benchmarks/step.py --dtype bfloat16 --only ddp zero2 zero3
    python recipes/benchmarks/step.py --small            # hardly any arithmetic: overhead

bfloat16 means bf16 parameters with fp32 masters for all. torch has no such optimizer, so DDP's is written
out below: fp32 copies, stepped by the same fused AdamW.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from llama import SMALL, Shape, build_batch, build_model
from ranks import Ranks, launch, loopback_bytes, print_setting
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zero_strategy as zs

BASE = "ddp"
WARM_UP_ROUNDS = 2
STEPS_A_TURN = 3
MEMORY_STEPS = 4
KIB, MIB = 1 << 10, 1 << 20

Turn = Callable[[int], None]  # trains so many optimizer steps; when it returns, the weights are there


class Task(NamedTuple):
    """What every contender gets."""

    shape: Shape
    dtype: torch.dtype
    rank: int

    def model(self) -> nn.Module:
        return build_model(self.shape, self.dtype)

    def batch(self) -> Tensor:
        return build_batch(self.shape, self.rank)


class Score(NamedTuple):
    """A step of a turn: the slowest rank's time, bytes of all ranks on the wire."""

    seconds: float
    sent_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="measured rounds (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--small", action="store_true", help="a model of 0.13M parameters")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--no-memory", action="store_true", help="leave the memory of each alone out")
    options = parser.parse_args()
    options.only = [name for name in options.only if not name.startswith("deepspeed") or has_deepspeed()]
    if BASE not in options.only:
        options.only.insert(0, BASE)
    print_setting(options.ranks, f"{options.dtype}, {options.rounds} rounds")
    scores = launch(options.ranks, measure_all, options)[0]
    peaks = {}
    for name in [] if options.no_memory else options.only:
        peaks[name] = max(launch(options.ranks, measure_memory, options, name))
    report(scores, peaks, options.ranks)


# -- contenders --


def alone(task: Task) -> Turn:
    """No communication at all: each rank trains its own copy."""
    return plain_step(task.model(), task)


def ddp(task: Task) -> Turn:
    return plain_step(DistributedDataParallel(task.model()), task)


def ddp_zero_redundancy(task: Task) -> Turn:
    """torch's own stage 1 on top of DDP; it steps 16-bit weights without masters."""
    model = DistributedDataParallel(task.model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return partial(train, model, task.batch(), optimizer)


def fsdp2(task: Task, *, reshard: bool) -> Turn:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    keywords: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=task.dtype),
        "reshard_after_forward": reshard,
    }
    model = build_model(task.shape, torch.float32)
    for layer in model.layers:
        fully_shard(layer, **keywords)
    fully_shard(model, **keywords)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return partial(train, model, task.batch(), optimizer)


def zero(task: Task, *, stage: int) -> Turn:
    model = task.model()
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage))
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
    return partial(train, model, task.batch(), optimizer, finish=engine.wait_for_weights)


def deepspeed(task: Task, *, stage: int) -> Turn:
    import deepspeed as peer

    config = {
        "train_micro_batch_size_per_gpu": task.shape.batch,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": task.dtype == torch.bfloat16},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
    }
    os.environ["LOCAL_RANK"] = str(task.rank)  # it wants to hear that from a launcher
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine, *_ = peer.initialize(model=model, optimizer=optimizer, config=config)
    batch = task.batch()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            engine.backward(engine(batch))
            engine.step()

    return run


CONTENDERS: dict[str, Callable[[Task], Turn]] = {
    "alone": alone,
    "ddp": ddp,
    "ddp+zero-redundancy": ddp_zero_redundancy,
    "fsdp2-keep": partial(fsdp2, reshard=False),
    "fsdp2": partial(fsdp2, reshard=True),
    "deepspeed2": partial(deepspeed, stage=2),
    "deepspeed3": partial(deepspeed, stage=3),
    **{f"zero{number}": partial(zero, stage=number) for number in range(4)},
}


def has_deepspeed() -> bool:
    return importlib.util.find_spec("deepspeed") is not None


class MasterAdamW(torch.optim.AdamW):
    """Fused AdamW over fp32 copies of 16-bit weights."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.masters = [weight.detach().float() for weight in weights]
        super().__init__(self.masters, lr=1e-4, fused=True)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, weight in zip(self.masters, self.weights, strict=True):
            assert weight.grad is not None, "every weight of the model is used"
            master.grad = weight.grad.float()
        super().step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for tensor in (*self.masters, *self.weights):
            tensor.grad = None


def plain_step(model: nn.Module, task: Task) -> Turn:
    weights = list(model.parameters())
    optimizer: torch.optim.Optimizer
    if task.dtype == torch.float32:
        optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    else:
        optimizer = MasterAdamW(weights)
    return partial(train, model, task.batch(), optimizer)


def train(
    model: nn.Module,
    batch: Tensor,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    *,
    finish: Callable[[], None] = lambda: None,
) -> None:
    for _ in range(num_steps):
        loss: Tensor = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    finish()


# -- measuring --


def measure_all(ranks: Ranks, options: argparse.Namespace) -> dict[str, list[Score]]:
    """Train with all contenders in turn, in one process per rank."""
    task = task_of(ranks, options)
    turns = {name: CONTENDERS[name](task) for name in options.only}
    scores: dict[str, list[Score]] = {name: [] for name in turns}
    for number in range(WARM_UP_ROUNDS + options.rounds):
        for name, run in turns.items():
            score = measure(ranks, run)
            if number >= WARM_UP_ROUNDS:
                scores[name].append(score)
        if ranks.rank == 0:
            print(f"\rround {number + 1} of {WARM_UP_ROUNDS + options.rounds}", end="", file=sys.stderr)
    if ranks.rank == 0:
        print(file=sys.stderr)
    return scores


def measure(ranks: Ranks, run: Turn) -> Score:
    ranks.line_up()
    before = loopback_bytes()
    start = time.perf_counter()
    run(STEPS_A_TURN)
    own_seconds = time.perf_counter() - start
    sent_bytes = loopback_bytes() - before
    return Score(ranks.slowest(own_seconds) / STEPS_A_TURN, sent_bytes / STEPS_A_TURN)


def measure_memory(ranks: Ranks, options: argparse.Namespace, name: str) -> int:
    """Return how far the peak of this process rises above what it held before the model, in bytes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = CONTENDERS[name](task_of(ranks, options))
    run(MEMORY_STEPS)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * KIB


def task_of(ranks: Ranks, options: argparse.Namespace) -> Task:
    return Task(SMALL if options.small else Shape(), getattr(torch, options.dtype), ranks.rank)


def report(scores: dict[str, list[Score]], peaks: dict[str, int], num_ranks: int) -> None:
    header = f"{'':22}{'step, ms':>10}{'to DDP':>9}{'middle half':>15}{'MB sent':>10}{'to DDP':>8}"
    print(header + (f"{'peak, MiB':>12}{'to DDP':>8}" if peaks else ""))
    for name, own in scores.items():
        base = scores[BASE]
        ratios = [score.seconds / other.seconds for score, other in zip(own, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sent, base_sent = (statistics.median(s.sent_bytes for s in them) / num_ranks for them in (own, base))
        milliseconds = 1e3 * statistics.median(score.seconds for score in own)
        row = f"{name:22}{milliseconds:10.1f}{middle:8.3f}x{f'{low:.3f}-{high:.3f}':>15}"
        row += f"{sent / 1e6:10.2f}{sent / base_sent if base_sent else 0:7.3f}x"
        if peaks:
            row += f"{peaks[name] / MIB:12.0f}{peaks[name] / peaks[BASE]:7.3f}x"
        print(row)


if __name__ == "__main__":
    main()
