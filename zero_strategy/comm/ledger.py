"""Counts every byte sent and adds up every byte held.

The collectives record what they send here, by kind and call. What is held is not recorded but asked for:
whoever owns tensors gives the ledger a function that reports them, so the two can never drift apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

COMM_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "control")


@dataclass
class MemoryUse:
    """Bytes held by one owner on this rank.

    Attributes:
        params: Parameters that stay: the shard, or the whole flat buffer where it is not sharded.
        grads: Gradients, whole or reduced.
        master: fp32 master weights of 16-bit parameters.
        optimizer: Optimizer state (moments and the like).
        averages: Averages of the weights, such as an EMA, in the masters' dtype.
        scalars: What the optimizer keeps per slice and not per element, such as step counters.
        host_copy: What asynchronous saves copy into, from the first of them on.
        unsharded: Whole flat buffers that exist for the moment, at stage 3.
        padding: How many bytes of the kinds before are padding (they are included there).
    """

    params: int = 0
    grads: int = 0
    master: int = 0
    optimizer: int = 0
    averages: int = 0
    scalars: int = 0
    host_copy: int = 0
    unsharded: int = 0
    padding: int = 0

    def add(self, other: MemoryUse) -> None:
        """Add another owner's bytes."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class StepRecord(NamedTuple):
    """What a step cost, from the end of the step before to its own end.

    Attributes:
        num_backwards: Its micro-batches.
        num_reducing: How many of them reduced gradients.
        sent: Bytes by kind of collective.
        memory: Bytes held by kind when the gradients were complete, at step `memory_of_step`.
        memory_of_step: 1, 2, 4, 8 ...: the last of them so far.
    """

    num_backwards: int
    num_reducing: int
    sent: dict[str, int]
    memory: dict[str, int]
    memory_of_step: int


class _Totals(NamedTuple):
    """Where the counts stood when the last step ended."""

    sent: dict[str, int]
    num_reductions: int


class Ledger:
    """Bytes held and bytes sent by one engine on this rank.

    Attributes:
        comm: `{kind: {"calls": int, "bytes_sent": int}}` since the last `reset()`. `control` holds everything
            the formulas of the papers leave out: flags, names, buffers and the first broadcast of the
            weights.
        num_steps: Optimizer steps since the last `reset()`.
        last_step: What the latest of them cost, or None.
    """

    def __init__(self) -> None:
        self.comm: dict[str, dict[str, int]] = {}
        self.num_steps = 0
        self.last_step: StepRecord | None = None
        self._backwards: list[int] = []  # reductions so far, at the end of each backward of this step
        self._held_at_step: dict[str, int] = {}
        self._held_of_step = 0
        self._before = _Totals({}, 0)
        self._owners: list[Callable[[], MemoryUse]] = []
        self._write_report: Callable[[], str] | None = None
        self.reset()

    # -- counting --

    def record(self, kind: str, bytes_sent: int) -> None:
        """Count one collective.

        Args:
            kind: One of `COMM_KINDS`.
            bytes_sent: Bytes this rank puts on the wire.
        """
        entry = self.comm[kind]
        entry["calls"] += 1
        entry["bytes_sent"] += bytes_sent

    def note_backward(self) -> None:
        """Count a backward that has ended."""
        self._backwards.append(self.comm["reduce_scatter"]["calls"])

    def begin_step(self) -> None:
        """Note what is held when an optimizer step begins."""
        self.num_steps += 1
        # It is the same from step to step, and adding it up takes a while: now and then will do.
        if self.num_steps & (self.num_steps - 1) == 0:
            self._held_at_step, self._held_of_step = self.memory, self.num_steps

    def end_step(self) -> None:
        """Note what was sent since the step before ended."""
        sent = {kind: count["bytes_sent"] for kind, count in self.comm.items()}
        calls = [self._before.num_reductions, *self._backwards]
        self.last_step = StepRecord(
            num_backwards=len(self._backwards),
            num_reducing=sum(after > before for before, after in pairwise(calls)),
            sent={kind: total - self._before.sent[kind] for kind, total in sent.items()},
            memory=self._held_at_step,
            memory_of_step=self._held_of_step,
        )
        self._before = _Totals(sent, self.comm["reduce_scatter"]["calls"])
        self._backwards = []

    def reset(self) -> None:
        """Set all counts to zero."""
        self.comm = {kind: {"calls": 0, "bytes_sent": 0} for kind in COMM_KINDS}
        self.num_steps, self.last_step = 0, None
        self._before = _Totals(dict.fromkeys(COMM_KINDS, 0), 0)
        self._backwards = []

    # -- queries --

    def watch(self, owner: Callable[[], MemoryUse]) -> None:
        """Register a function that reports what its owner holds."""
        self._owners.append(owner)

    def report_with(self, report: Callable[[], str]) -> None:
        """Register the function that writes the report; it knows the formulas to print beside the counts."""
        self._write_report = report

    @property
    def memory(self) -> dict[str, int]:
        """Bytes held by kind, this rank, now."""
        total = MemoryUse()
        for owner in self._owners:
            total.add(owner())
        return {field.name: getattr(total, field.name) for field in fields(total)}

    def report(self) -> str:
        """Return a table of bytes held and bytes sent, the formula beside each."""
        if self._write_report is None:
            return "\n".join(f"{kind}: {count}" for kind, count in {**self.memory, **self.comm}.items())
        return self._write_report()
