"""What ZeRO holds and sends: the formulas, in exact integers and fractions.

Owns the arithmetic of bytes held per rank, elements and bytes sent per step, and the plain-text table that
shows a count beside its formula. Called by the ledger's report and the tests that hold the engine to its
promises. Must not know torch, models or process groups: numbers in, numbers out.

Symbols: Psi is the number of parameters, N the number of ranks. Stage 0 is plain data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

HALF_PARAM_BYTES = 2  # fp16 or bf16
FP32_MASTER_BYTES = 4  # fp32
ADAM_STATE_BYTES = 8  # Adam: two fp32 moments
ELEMENTS_PER_PARAM = (2, 2, 2, 3)  # sent per rank and step by stage, before the factor (N-1)/N


class ModelStateBytes(NamedTuple):
    """Bytes of model state one rank holds, by kind."""

    params: int
    grads: int
    master: int
    optimizer: int

    @property
    def total(self) -> int:
        """The sum over all kinds."""
        return sum(self)


class BucketTraffic(NamedTuple):
    """What a bucket sends in a step, before the ring's factor (N-1)/N."""

    padded_numel: int  # elements of the whole flat tensor, padding included
    itemsize: int  # bytes per element on the wire
    num_gathers: int
    num_reductions: int


class SeedRow(NamedTuple):
    """One row of the memory table of the ZeRO paper."""

    configuration: str
    formula: str
    total_bytes: int


class TableRow(NamedTuple):
    """One quantity: what was counted, and what the formula says."""

    what: str
    counted_bytes: int
    formula: str  # such as "2 Psi/N"; empty if there is none
    formula_bytes: int | None = None
    note: str = "padding"  # what a difference is called


# -- memory --


def model_state_bytes(
    num_params: int,
    world_size: int,
    stage: int,
    *,
    param_bytes: int = HALF_PARAM_BYTES,
    optimizer_state_bytes: int = ADAM_STATE_BYTES,
    master_bytes: int | None = None,
) -> ModelStateBytes:
    """Return the bytes of model state the fullest rank holds, without the padding of aligned layouts.

    With 16-bit parameters and Adam: 16 Psi; 4 Psi + 12 Psi/N; 2 Psi + 14 Psi/N; 16 Psi/N. fp32 parameters are
    their own masters, so that stage 1 is 8 Psi + 8 Psi/N, and so on. The multiplier K of the paper is
    `master_bytes + optimizer_state_bytes`: 12 is 4 + 8 (Adam), 6 is 4 + 2 (8-bit Adam), 4 is one fp32 copy.

    Args:
        num_params: Psi, number of parameters (elements).
        world_size: N, number of ranks that share the state. What N does not divide is rounded up.
        stage: 0 to 3.
        param_bytes: Bytes per parameter and per gradient; 2 for fp16 and bf16, 4 for fp32.
        optimizer_state_bytes: Bytes per parameter besides the master: 8 for Adam, 4 for SGD with momentum,
            0 for SGD, 2 for 8-bit Adam.
        master_bytes: Bytes per master weight; None: 4 for parameters of 16 bits, else 0.

    Returns:
        Bytes by kind.

    Source: ZeRO, arXiv:1910.02054, sections 3.1 and 5; arXiv:1710.03740 (fp32 masters).
    """
    if master_bytes is None:
        master_bytes = FP32_MASTER_BYTES if param_bytes < FP32_MASTER_BYTES else 0
    share = -(-num_params // world_size)
    return ModelStateBytes(
        params=param_bytes * (share if stage >= 3 else num_params),
        grads=param_bytes * (share if stage >= 2 else num_params),
        master=master_bytes * (share if stage >= 1 else num_params),
        optimizer=optimizer_state_bytes * (share if stage >= 1 else num_params),
    )


def seed_table(num_params: int, world_size: int) -> tuple[SeedRow, ...]:
    """Return the paper's table for mixed-precision Adam: 7.5e9 on 64 ranks gives 120, 31.4, 16.6 and 1.9 GB.

    Args:
        num_params: Psi.
        world_size: N.

    Returns:
        A row per stage, 0 to 3.

    Source: ZeRO, arXiv:1910.02054, figure 1.
    """
    n = world_size
    formulas = ("16 Psi", f"4 Psi + 12 Psi/{n}", f"2 Psi + 14 Psi/{n}", f"16 Psi/{n}")
    names = ("plain data parallel", "ZeRO-1 (P_os)", "ZeRO-2 (P_os+g)", "ZeRO-3 (P_os+g+p)")
    totals = [model_state_bytes(num_params, world_size, stage).total for stage in range(4)]
    return tuple(SeedRow(*row) for row in zip(names, formulas, totals, strict=True))


def live_bytes(unit_bytes: Sequence[int], root_bytes: int) -> int:
    """Return the unsharded bytes stage 3 may hold at once: the root and the two largest other units.

    The root stays whole; two, because one unit is in use while the next is unsharded or the last reduced.

    Args:
        unit_bytes: Bytes of the whole buckets of each unit apart from the root, padding included.
        root_bytes: Bytes of the root's whole buckets together.

    Returns:
        An upper bound in bytes.

    Source: ZeRO, arXiv:1910.02054, section 5.3; the bound of two is this library's.
    """
    return root_bytes + sum(sorted(unit_bytes)[-2:])


# -- traffic --


def traffic_numel(num_params: int, world_size: int, stage: int) -> Fraction:
    """Return the elements a rank sends per step: 2 Psi (stages 0-2) or 3 Psi (stage 3), times (N-1)/N.

    Exact for a plain chain of modules without padding, each used once, with nothing kept whole at stage 3,
    and one backward per step.

    Args:
        num_params: Psi.
        world_size: N.
        stage: 0 to 3.

    Returns:
        An exact fraction.

    Source: ZeRO, arXiv:1910.02054, section 7; the factor is a ring's, which the paper rounds to 1.
    """
    return ELEMENTS_PER_PARAM[stage] * num_params * Fraction(world_size - 1, world_size)


def bucket_traffic_bytes(buckets: Iterable[BucketTraffic], world_size: int) -> int:
    """Return the bytes one rank sends for these buckets: the sum of (gathers + reductions) x size x (N-1)/N.

    Args:
        buckets: What each bucket did; a bucket twice in a step counts twice.
        world_size: N; it divides every `padded_numel`.

    Returns:
        Bytes, exactly.
    """
    total = 0
    for padded_numel, itemsize, num_gathers, num_reductions in buckets:
        shard_numel, rest = divmod(padded_numel, world_size)
        assert rest == 0, f"a bucket of {padded_numel} elements has no equal shards on {world_size} ranks"
        total += (num_gathers + num_reductions) * (padded_numel - shard_numel) * itemsize
    return total


# -- tables --


def format_bytes(num_bytes: int) -> str:
    """Return bytes in a decimal unit with the exact number beside: `31.4 GB (31,406,250,000)`."""
    for scale, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit} ({num_bytes:,})"
    return f"{num_bytes} B"


def format_table(rows: Sequence[TableRow]) -> str:
    """Lay rows out as plain text: what, counted, formula, difference.

    Args:
        rows: At least one.

    Returns:
        Lines of equal columns, the first two being the header and a rule.
    """
    cells = [("what", "counted", "formula", "difference"), *(_cells(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _cells(row: TableRow) -> tuple[str, str, str, str]:
    counted = format_bytes(row.counted_bytes)
    if row.formula_bytes is None:
        return row.what, counted, row.formula or "-", "-"
    difference = row.counted_bytes - row.formula_bytes
    named = f"{difference:+,} B {row.note}" if difference else "0"
    return row.what, counted, f"{row.formula} = {format_bytes(row.formula_bytes)}", named
