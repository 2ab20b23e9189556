"""The processes of a benchmark: one for each rank, started together, lined up, and as slow as the slowest.

Shared by the scripts beside it. Ranks talk through the library's own collectives. Bytes on the wire are the
kernel's count for the loopback device, so they mean something only where nothing else uses it:
`unshare --net --map-root-user sh -c "ip link set lo up && python recipes/benchmarks/..."`.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import Ledger
from zero_strategy.comm.topology import Topology

COUNTERS = Path("/proc/net/dev")


class Ranks:
    """This rank, and what it needs of the others.

    Attributes:
        collectives: The library's, over groups of their own.
        rank: This one's index.
        world_size: How many there are.
    """

    def __init__(self) -> None:
        self.collectives = Collectives(Topology(torch.device("cpu")), Ledger())
        self.rank = self.collectives.rank
        self.world_size = self.collectives.world_size

    def line_up(self) -> None:
        """Wait until every rank has come here."""
        self.slowest(0.0)

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' times."""
        return float(self.collectives.stack(torch.tensor([seconds], dtype=torch.float64)).max())

    def close(self) -> None:
        """Give the groups back."""
        self.collectives.close()


def launch(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(ranks, *args)` on every rank, in fresh processes, and return what each returned.

    Args:
        num_ranks: How many processes.
        function: Of a module's top level.
        *args: What can be pickled.
    """
    # Forked from a server that has torch loaded: spawning would load it once per rank.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(num_ranks)]
        meeting = (num_ranks, f"file://{folder}/meet")
        processes = [
            context.Process(target=_work, args=(rank, meeting, sender, function, args))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        try:
            return [receiver.recv() for receiver, _ in pipes]
        except EOFError:
            sys.exit("a rank has failed; its traceback is above")
        finally:
            for process in processes:
                process.join()


def _work(
    rank: int,
    meeting: tuple[int, str],
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    num_ranks, rendezvous = meeting
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    ranks = Ranks()
    sender.send(function(ranks, *args))
    ranks.line_up()
    ranks.close()
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this rank when the script is killed, or it would train on, unseen, beside the next benchmark."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank has a parent"
    parent.join()
    os._exit(1)


def print_setting(num_ranks: int, rest: str) -> None:
    """Print what a reader must know to read the figures.

    Args:
        num_ranks: How many processes.
        rest: What else is the same for all figures.
    """
    print(f"$ python {' '.join(sys.argv)}")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(f"{versions}, {os.cpu_count()} cores, {platform.machine()}")
    print(f"{num_ranks} ranks over gloo, one thread each, {rest}\n", flush=True)


def loopback_bytes() -> int:
    """Return how many bytes have been sent over `lo` so far, or 0 where the kernel does not say."""
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    for line in lines:
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])  # the ninth column: bytes sent
    return 0
