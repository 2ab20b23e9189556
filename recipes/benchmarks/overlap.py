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

from ranks import Ranks, launch, print_setting
from wire import Shape, least, measure


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
    launch(options.ranks, measure_all, options)


def measure_all(ranks: Ranks, options: argparse.Namespace) -> None:
    logging.getLogger("zero_strategy").setLevel(logging.ERROR)
    if ranks.rank == 0:
        print(f"{'stage':8}{'exposed':>10}{'least':>10}")
    for stage in options.stages:
        shape = Shape(options.layers, options.buckets, options.ratio, options.backward)
        exposed, log = measure(stage, shape)
        if ranks.rank == 0:
            print(f"{stage:<8}{exposed:10.1%}{least(stage, shape):10.1%}")
            if options.log:
                print(*log, sep=os.linesep, flush=True)


if __name__ == "__main__":
    main()
