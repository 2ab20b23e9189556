"""How much of its communication a step waits for, per stage: the engine's schedule alone, on a counted clock.

Layers compute and a wire carries for as long as they are told to (wire.py), so the figures are the same at
every run. A step with a wire that takes no time and one with a wire that is busy for a given part of the time
computed give

    exposed = (step with - step without) / time the wire was busy

    python recipes/benchmarks/overlap.py --ratio 0.8 --layers 32
    python recipes/benchmarks/overlap.py --buckets 8       # layers so large that each is several buckets

At stages 1 and 2 the gathers (half of what is sent) can overlap the forward only. Where the forward is
shorter than that, because the backward takes twice as long, the difference is exposed under any schedule;
"least" is that figure, with buckets of no size.
"""

from __future__ import annotations

import argparse
import logging
import os

import torch
from ranks import Ranks, launch, print_setting
from wire import Clock, Wire, build_layers

import zero_strategy as zs

PART_NUMEL = 4096
COMPUTE_S = 1.0  # a step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--buckets", type=int, default=1, help="of each layer (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.8, help="wire to compute (default: %(default)s)")
    parser.add_argument("--backward", type=float, default=2.0, help="to forward (default: %(default)s)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--log", action="store_true", help="print what waited for what")
    options = parser.parse_args()
    layers = f"{options.layers} layers of {options.buckets} buckets"
    print_setting(
        options.ranks, f"{layers}, wire {options.ratio} of compute, backward {options.backward} of forward"
    )
    logging.getLogger("zero_strategy").setLevel(logging.ERROR)
    launch(options.ranks, measure_all, options)


def measure_all(ranks: Ranks, options: argparse.Namespace) -> None:
    logging.getLogger("zero_strategy").setLevel(logging.ERROR)
    if ranks.rank == 0:
        print(f"{'stage':8}{'exposed':>10}{'least':>10}")
    for stage in options.stages:
        exposed, log = measure(stage, options)
        if ranks.rank == 0:
            print(f"{stage:<8}{exposed:10.1%}{least(stage, options):10.1%}")
            print(*(log if options.log else []), sep=os.linesep, flush=True)


def measure(stage: int, options: argparse.Namespace) -> tuple[float, list[str]]:
    """Return the part of the communication that is exposed, and what the wire has noted in that step."""
    clock = Clock()
    forward_s = COMPUTE_S / (1 + options.backward) / options.layers
    parts = [PART_NUMEL] * options.buckets
    model = build_layers(clock, options.layers, parts, forward_s, options.backward * forward_s)
    keys = {"reduce_bucket_size": PART_NUMEL, "stage3_param_persistence_threshold": 0}
    engine = zs.ZeroEngine(model, {"zero_optimization": {"stage": stage, **keys}})
    wire = Wire(engine, clock)
    optimizer = engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> float:
        before = clock.now
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock.now - before

    for _ in range(3):  # the first passes find out the order
        wire.sent_bytes = 0
        without = step()
    wire.seconds_per_byte = options.ratio * COMPUTE_S / wire.sent_bytes
    step()
    wire.busy_s = 0.0
    wire.log.clear()
    with_wire = step()  # what a step leaves under way, the next one waits for
    log = list(wire.log)
    engine.close()
    return (with_wire - without) / wire.busy_s, log


def least(stage: int, options: argparse.Namespace) -> float:
    """Return what is exposed however fine the buckets are: what must travel in a pass and does not fit."""
    forward_s = COMPUTE_S / (1 + options.backward)
    wire_s = options.ratio * COMPUTE_S
    in_forward, in_backward = {0: (0, 1), 1: (1 / 2, 1 / 2), 2: (1 / 2, 1 / 2), 3: (1 / 3, 2 / 3)}[stage]
    left_s = max(0.0, in_forward * wire_s - forward_s)
    left_s += max(0.0, in_backward * wire_s - options.backward * forward_s)
    return left_s / wire_s


if __name__ == "__main__":
    main()
