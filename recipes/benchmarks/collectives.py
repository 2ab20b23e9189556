"""Times the collectives on flat buffers against torch's own over gloo, and counts what each puts on the wire.

Ours and torch's run in turn, in pairs, on the same buffers, so that a busy machine slows both; what is
reported is the median of the ratios of the pairs. Both produce the mean of a rank's own range of a buffer, or
the whole buffer from its ranges. Repeated as here, ours receives into memory it has used before, as it does
from bucket to bucket of a backward.

    python recipes/benchmarks/collectives.py --ranks 2 --mib 64 --pairs 15

Bytes sent are the kernel's count over all ranks; ranks.py says where that means something.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import Ranks, launch, loopback_bytes, print_setting

from zero_strategy import compat
from zero_strategy.layout import BucketLayout

MIB = 1 << 20


class Contest(NamedTuple):
    """The same work done by both; each call returns when the result is there."""

    name: str
    ours: Callable[[], None]
    torchs: Callable[[], None]


class Score(NamedTuple):
    """What one run cost: the slowest rank's time, and the bytes of all ranks on the loopback device."""

    seconds: float
    sent_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=64, help="size of the whole buffer (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=15, help="measured pairs (default: %(default)s)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default: both)")
    options = parser.parse_args()
    print_setting(options.ranks, f"{options.mib} MiB, {options.pairs} pairs")
    launch(options.ranks, run_rank, options)


def run_rank(ranks: Ranks, options: argparse.Namespace) -> None:
    """Measure every contest on one rank; rank 0 prints."""
    if ranks.rank == 0:
        print(
            f"{'':34}{'ours, ms':>10}{'torch, ms':>11}{'ratio':>8}{'middle half':>16}{'sent: ours':>12}",
            end="",
        )
        print(f"{'torch':>8}")
    for dtype_name in options.dtypes:
        dtype = getattr(torch, dtype_name)
        layout = BucketLayout.build(
            [("buffer", (options.mib * MIB // dtype.itemsize,))], options.ranks, dtype.itemsize
        )
        full = torch.randn(layout.padded_numel, dtype=torch.float32).to(dtype)
        for contest in contests(ranks, full, layout.shard_numel):
            pairs = [
                (measure(ranks, contest.ours), measure(ranks, contest.torchs))
                for _ in range(options.pairs + 2)
            ]
            if ranks.rank == 0:
                describe(f"{contest.name}, {dtype_name}", pairs[2:], full.numel() * full.element_size())


def contests(ranks: Ranks, full: torch.Tensor, shard_numel: int) -> list[Contest]:
    """What is compared; both are given the same memory for the result."""
    group = dist.group.WORLD
    assert group is not None
    collectives = ranks.collectives
    own = full[collectives.rank * shard_numel : (collectives.rank + 1) * shard_numel]
    output = torch.zeros_like(own)

    def our_mean() -> None:
        collectives.reduce_scatter_mean(full, output, "benchmark").wait()

    def torchs_mean() -> None:
        compat.native_reduce_scatter_sum(output, full, group).wait()
        output.div_(collectives.world_size)

    def our_gather() -> None:
        collectives.all_gather(full, "benchmark").wait()

    def torchs_gather() -> None:
        compat.native_all_gather(full, own, group).wait()

    return [
        Contest("reduce-scatter (mean)", our_mean, torchs_mean),
        Contest("all-gather", our_gather, torchs_gather),
    ]


def measure(ranks: Ranks, work: Callable[[], None]) -> Score:
    """Run one piece of work on all ranks, from a common start."""
    ranks.line_up()
    before = loopback_bytes()
    start = time.perf_counter()
    work()
    seconds = ranks.slowest(time.perf_counter() - start)
    return Score(seconds, loopback_bytes() - before)


def describe(name: str, pairs: list[tuple[Score, Score]], buffer_bytes: int) -> None:
    """Print one row: median times, median and middle half of the ratios, bytes per rank over buffer bytes."""
    ratios = sorted(torchs.seconds / ours.seconds for ours, torchs in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    times = [1e3 * statistics.median(pair[side].seconds for pair in pairs) for side in (0, 1)]
    scale = buffer_bytes * dist.get_world_size()
    sent = [statistics.median(pair[side].sent_bytes for pair in pairs) / scale for side in (0, 1)]
    print(
        f"{name:34}{times[0]:10.1f}{times[1]:11.1f}{middle:7.2f}x{f'{low:.2f}-{high:.2f}':>16}"
        f"{sent[0]:11.3f}x{sent[1]:7.3f}x",
        flush=True,
    )


if __name__ == "__main__":
    main()
