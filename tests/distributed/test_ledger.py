"""What the ledger says was sent is what the formulas say, and what the kernel saw.

Oracle: sums over buckets of (gathers + reductions) x padded size x (N-1)/N, each written out where it is
used; padded sizes come from the shapes through `BucketLayout`, never from the engine. The second witness is
the kernel's counter of the loopback device, read in a network namespace where nothing else sends. Tolerance:
none for the formulas. One percent for the kernel, which also counts headers and acknowledgements.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy as zs
from tests.harness import distributed, run_ranks, subtest, world_size
from zero_strategy.estimate import BucketTraffic, bucket_traffic_bytes, traffic_numel
from zero_strategy.layout import BucketLayout

WIDTH, INNER, DEPTH = 15, 7, 4
UNIT = [
    ("up.weight", (INNER, WIDTH)),
    ("up.bias", (INNER,)),
    ("down.weight", (WIDTH, INNER)),
    ("down.bias", (WIDTH,)),
]
ROOT = [
    ("stem.weight", (WIDTH, WIDTH)),
    ("stem.bias", (WIDTH,)),
    ("norm.weight", (WIDTH,)),
    ("norm.bias", (WIDTH,)),
]


class Unit(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH, inner: int = INNER) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """A plain chain: stem and norm belong to the root, the units between them are used as `path` says."""

    def __init__(self, recompute: str | None = None, path: list[int] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(Unit() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.recompute, self.path = recompute, path or list(range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index in self.path:
            if self.recompute is None:
                x = self.units[index](x)
            else:
                x = checkpoint(self.units[index], x, use_reentrant=self.recompute == "reentrant")
        return self.norm(x)


def padded(shapes: list[tuple[str, tuple[int, ...]]], itemsize: int = 4) -> int:
    return BucketLayout.build(shapes, world_size(), itemsize).padded_numel


def unit_numel(itemsize: int = 4) -> int:
    return padded(UNIT, itemsize)


def root_numel(itemsize: int = 4) -> int:
    return padded(ROOT, itemsize)


def whole_numel(itemsize: int = 4) -> int:
    """Below stage 3 all parameters share one bucket, in order of registration."""
    units = [(f"units.{i}.{name}", shape) for i in range(DEPTH) for name, shape in UNIT]
    return padded([*ROOT[:2], *units, *ROOT[2:]], itemsize)


def sent_by(*traffic: BucketTraffic) -> int:
    return bucket_traffic_bytes(traffic, world_size())


def one_step(
    engine: zs.ZeroEngine,
    optimizer: torch.optim.Optimizer,
    num_micro: int = 1,
    no_sync: bool = False,
    width: int = WIDTH,
) -> dict[str, int]:
    """Take a step of `num_micro` micro-batches and return the bytes sent for it, by kind."""
    engine.ledger.reset()
    for micro in range(num_micro):
        last = micro == num_micro - 1
        with engine.no_sync() if no_sync and not last else contextlib.nullcontext():
            x = torch.randn(2, width, dtype=next(engine.model.parameters()).dtype)
            engine.backward(engine.model(x).float().square().mean() / num_micro)
    optimizer.step()
    optimizer.zero_grad()
    return {kind: count["bytes_sent"] for kind, count in engine.ledger.comm.items()}


def build(stage: int, model: nn.Module, **settings: Any) -> tuple[zs.ZeroEngine, torch.optim.Optimizer]:
    if stage == 3:
        settings.setdefault("stage3_param_persistence_threshold", 0)
    engine = zs.ZeroEngine(model, zs.ZeroConfig(stage=stage, **settings))
    trainable = [param for param in model.parameters() if param.requires_grad]
    return engine, engine.shard_optimizer(torch.optim.AdamW(trainable, lr=1e-3))


def check(sent: dict[str, int], *, gathered: int, reduced: int) -> None:
    """Compare; nothing but the two big collectives and some control messages may have been used."""
    assert sent["all_gather"] == gathered, (
        f"all-gather: {sent['all_gather']} bytes, the formula says {gathered}"
    )
    assert sent["reduce_scatter"] == reduced, (
        f"reduce-scatter: {sent['reduce_scatter']}, the formula says {reduced}"
    )
    assert sent["all_reduce"] == 0


@distributed(world_size=[1, 2, 3, 4])
def test_stages_0_to_2_send_twice_the_padded_parameters() -> None:
    for stage in (0, 1, 2):
        with subtest(f"stage {stage}"):
            sent = one_step(*build(stage, Chain()))
            half = sent_by(BucketTraffic(whole_numel(), 4, 1, 0))
            check(sent, gathered=half, reduced=half)
            # 2 Psi (N-1)/N elements of 4 bytes, Psi being the padded size
            assert 2 * half == 4 * traffic_numel(whole_numel(), world_size(), stage)


@distributed(world_size=[1, 2, 3, 4])
def test_stage_3_sends_three_times_each_unit_and_twice_the_root() -> None:
    engine, optimizer = build(3, Chain())
    units = DEPTH * unit_numel()
    for step in range(3):  # the second follows the order of the first and gathers ahead
        with subtest(f"step {step}"):
            sent = one_step(engine, optimizer)
            gathered = sent_by(BucketTraffic(units, 4, 2, 0), BucketTraffic(root_numel(), 4, 1, 0))
            check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(units + root_numel(), 4, 0, 1)))
            # 3 Psi (N-1)/N for the units; the root stays whole from its forward to the end of its backward
            root = sent_by(BucketTraffic(root_numel(), 4, 1, 1))
            total = sent["all_gather"] + sent["reduce_scatter"]
            assert total - root == 4 * traffic_numel(units, world_size(), 3)


@distributed(world_size=[2, 3])
def test_small_buckets_send_the_sum_of_their_padded_sizes() -> None:
    limit = 120  # elements: the next parameter that does not fit begins another bucket
    shapes = [shape for _, shape in (*ROOT[:2], *(UNIT * DEPTH), *ROOT[2:])]
    packs: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    for index, shape in enumerate(shapes):
        filled = sum(torch.Size(other).numel() for _, other in packs[-1])
        if packs[-1] and filled + torch.Size(shape).numel() > limit:
            packs.append([])
        packs[-1].append((str(index), shape))
    half = sent_by(*(BucketTraffic(padded(pack), 4, 1, 0) for pack in packs))
    for stage in (0, 1, 2):
        with subtest(f"stage {stage}"):
            sent = one_step(*build(stage, Chain(), reduce_bucket_size=limit))
            check(sent, gathered=half, reduced=half)


@distributed(world_size=[2, 3])
def test_bf16_sends_half_of_it_with_fp32_masters() -> None:
    bf16 = {"enabled": True}
    for stage in (0, 1, 2):
        with subtest(f"stage {stage}"):
            half = sent_by(BucketTraffic(whole_numel(2), 2, 1, 0))
            check(one_step(*build(stage, Chain(), bf16=bf16)), gathered=half, reduced=half)
    with subtest("stage 3"):
        units, root = DEPTH * unit_numel(2), root_numel(2)
        gathered = sent_by(BucketTraffic(units, 2, 2, 0), BucketTraffic(root, 2, 1, 0))
        reduced = sent_by(BucketTraffic(units + root, 2, 0, 1))
        check(one_step(*build(3, Chain(), bf16=bf16)), gathered=gathered, reduced=reduced)


@distributed(world_size=[2, 3])
def test_accumulation_reduces_once_below_stage_2_and_each_micro_batch_above() -> None:
    num_micro = 3
    psi = whole_numel()
    units, root = DEPTH * unit_numel(), root_numel()
    gathered_3 = sent_by(BucketTraffic(units, 4, 2 * num_micro, 0), BucketTraffic(root, 4, num_micro, 0))
    once = {0: (1, 1), 1: (1, 1), 2: (1, num_micro)}
    for stage, (num_gathers, num_reductions) in once.items():
        with subtest(f"stage {stage} under no_sync"):
            sent = one_step(*build(stage, Chain()), num_micro, no_sync=True)
            gathered = sent_by(BucketTraffic(psi, 4, num_gathers, 0))
            check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(psi, 4, 0, num_reductions)))
    with subtest("stage 3 under no_sync"):
        sent = one_step(*build(3, Chain()), num_micro, no_sync=True)
        check(sent, gathered=gathered_3, reduced=sent_by(BucketTraffic(units + root, 4, 0, num_micro)))
    with subtest("stage 2, whole gradients between micro-batches"):
        sent = one_step(*build(2, Chain(), accumulate_whole_gradients=True), num_micro, no_sync=True)
        check(
            sent, gathered=sent_by(BucketTraffic(psi, 4, 1, 0)), reduced=sent_by(BucketTraffic(psi, 4, 0, 1))
        )
    with subtest("stage 3, whole gradients between micro-batches"):
        sent = one_step(*build(3, Chain(), accumulate_whole_gradients=True), num_micro, no_sync=True)
        check(sent, gathered=gathered_3, reduced=sent_by(BucketTraffic(units + root, 4, 0, 1)))
    for stage in (1, 2):
        with subtest(f"stage {stage}, a reduction in every backward"):
            sent = one_step(*build(stage, Chain()), num_micro)
            gathered = sent_by(BucketTraffic(psi, 4, 1, 0))
            check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(psi, 4, 0, num_micro)))
    with subtest("stage 3, a reduction in every backward"):
        sent = one_step(*build(3, Chain()), num_micro)
        check(sent, gathered=gathered_3, reduced=sent_by(BucketTraffic(units + root, 4, 0, num_micro)))


@distributed(world_size=2)
def test_recomputation_needs_no_gather_of_its_own() -> None:
    units, root = DEPTH * unit_numel(), root_numel()
    for recompute in ("non-reentrant", "reentrant"):
        engine, optimizer = build(3, Chain(recompute))
        for step in range(2):
            with subtest(f"{recompute} step {step}"):
                sent = one_step(engine, optimizer)
                gathered = sent_by(BucketTraffic(units, 4, 2, 0), BucketTraffic(root, 4, 1, 0))
                check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(units + root, 4, 0, 1)))


@distributed(world_size=2)
def test_a_unit_used_twice_is_gathered_for_each_use_and_reduced_once() -> None:
    engine, optimizer = build(3, Chain(path=[0, 1, 0, 2, 3]))
    unit, root = unit_numel(), root_numel()
    for step in range(2):
        with subtest(f"step {step}"):
            sent = one_step(engine, optimizer)
            gathered = sent_by(
                BucketTraffic(unit, 4, 2 + 2, 0),
                BucketTraffic(3 * unit, 4, 2, 0),
                BucketTraffic(root, 4, 1, 0),
            )
            check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(4 * unit + root, 4, 0, 1)))


@distributed(world_size=2)
def test_a_frozen_unit_is_gathered_but_not_reduced_and_an_unused_one_the_other_way_round() -> None:
    model = Chain(path=[0, 1, 2])  # unit 3 is unused
    model.units[1].requires_grad_(False)
    unit, root = unit_numel(), root_numel()
    sent = one_step(*build(3, model))
    gathered = sent_by(BucketTraffic(3 * unit, 4, 2, 0), BucketTraffic(root, 4, 1, 0))
    # Zeros travel for the unused one: whether another rank has used it is known afterwards.
    check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(3 * unit + root, 4, 0, 1)))


@distributed(world_size=2)
def test_small_parameters_that_stay_whole_are_gathered_after_the_step_instead() -> None:
    threshold = INNER * WIDTH  # the four biases of a unit and the root's are below it
    big = [entry for entry in UNIT if len(entry[1]) == 2]
    stem = [entry for entry in ROOT if torch.Size(entry[1]).numel() >= threshold]
    small_unit = [entry for entry in UNIT if entry not in big]
    small = [entry for entry in ROOT[:2] if entry not in stem]
    small += [(f"units.{i}.{name}", shape) for i in range(DEPTH) for name, shape in small_unit]
    small += [entry for entry in ROOT[2:] if entry not in stem]
    sent = one_step(*build(3, Chain(), stage3_param_persistence_threshold=threshold))
    units, root, whole = DEPTH * padded(big), padded(stem), padded(small)
    gathered = sent_by(BucketTraffic(units, 4, 2, 0), BucketTraffic(root + whole, 4, 1, 0))
    check(sent, gathered=gathered, reduced=sent_by(BucketTraffic(units + root + whole, 4, 0, 1)))


@distributed(world_size=2)
def test_the_limit_for_the_model_decides_how_much_stays_whole_and_sharded_is_what_is_over_it() -> None:
    biases = [(f"units.{i}.up.bias", (INNER,)) for i in range(DEPTH)]  # the smallest there are
    engine, optimizer = build(
        3,
        Chain(),
        stage3_param_persistence_threshold=10**6,
        stage3_model_persistence_threshold=DEPTH * INNER,
    )
    units = DEPTH * padded([entry for entry in UNIT if entry[0] != "up.bias"])
    root, whole = padded(ROOT), padded(biases)
    assert engine.ledger.memory["params"] == (units + root) * 4 // 2 + whole * 4
    gathered = sent_by(BucketTraffic(units, 4, 2, 0), BucketTraffic(root + whole, 4, 1, 0))
    reduced = sent_by(BucketTraffic(units + root + whole, 4, 0, 1))
    check(one_step(engine, optimizer), gathered=gathered, reduced=reduced)


@distributed(world_size=[1, 3])
def test_a_forward_without_gradients_gathers_everything_once() -> None:
    engine, _ = build(3, Chain())
    engine.ledger.reset()
    with torch.no_grad():
        engine.model(torch.randn(2, WIDTH))
    sent = {kind: count["bytes_sent"] for kind, count in engine.ledger.comm.items()}
    check(sent, gathered=sent_by(BucketTraffic(DEPTH * unit_numel() + root_numel(), 4, 1, 0)), reduced=0)


@distributed(world_size=3)
def test_clipping_sends_one_number_per_rank_and_is_counted_apart() -> None:
    for stage in (0, 3):
        engine, optimizer = build(stage, Chain())
        engine.backward(engine.model(torch.randn(2, WIDTH)).square().mean())
        engine.ledger.reset()
        optimizer.clip_grad_norm_(1.0)  # type: ignore[attr-defined]
        assert engine.ledger.comm["all_reduce"] == {"calls": 1, "bytes_sent": (3 - 1) * 8}
        assert engine.ledger.comm["all_gather"]["calls"] == engine.ledger.comm["reduce_scatter"]["calls"] == 0


@distributed(world_size=2)
def test_the_report_shows_counts_beside_formulas_and_the_padding_between() -> None:
    psi = sum(param.numel() for param in Chain().parameters())
    for stage in (0, 1, 2, 3):
        with subtest(f"stage {stage}"):
            engine, optimizer = build(stage, Chain())
            assert "No optimizer step yet" in engine.ledger.report()
            one_step(engine, optimizer)
            before = engine.ledger.comm["all_gather"]["bytes_sent"]
            one_step(engine, optimizer)
            text = engine.ledger.report()
            rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
            assert f"ZeRO stage {stage} on N = 2 ranks, Psi = {psi:,} parameters" in text
            share = "/N" if stage == 3 else ""
            value = 4 * (-(-psi // 2) if stage == 3 else psi)
            assert f"4 Psi{share} =" in rows["parameters"] and f"{value:,}" in rows["parameters"]
            assert "padding" in rows["parameters"]
            assert f"8 Psi{'/N' if stage else ''} =" in rows["optimizer state"]
            factor = 2 if stage == 3 else 1
            assert f"{factor} Psi (N-1)/N x 4 B" in rows["all-gather"] and f"{before:,}" in rows["all-gather"]
            assert "1 Psi (N-1)/N x 4 B" in rows["reduce-scatter"]
            assert text.isascii() and max(map(len, text.splitlines())) <= 160


class Whole(nn.Module):
    """Equal units without padding at two ranks, and no root."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = torch.tanh(unit(x))
        return x


@distributed(world_size=2)
def test_the_formulas_of_the_report_are_what_several_micro_batches_send() -> None:
    """Nothing is padded here, so nothing may be between the count and the formula."""
    num_micro = 3
    for stage, no_sync, keeps_whole, num_gathers, num_reductions in (
        (0, True, False, 1, 1),
        (0, False, False, 3, 3),  # of gradients
        (1, True, False, 1, 1),
        (1, False, False, 1, 3),
        (2, True, False, 1, 3),
        (2, True, True, 1, 1),
        (3, True, False, 6, 3),
        (3, False, False, 6, 3),
        (3, True, True, 6, 1),
    ):
        with subtest(f"stage {stage}, no_sync {no_sync}, whole gradients {keeps_whole}"):
            engine, optimizer = build(stage, Whole(), accumulate_whole_gradients=keeps_whole)
            one_step(engine, optimizer, num_micro, no_sync, width=32)
            text = engine.ledger.report()
            assert f"({num_micro} micro-batches)" in text
            rows = {line.split("  ")[0].strip(): line for line in text.splitlines()}
            for name, factor in (("all-gather", num_gathers), ("reduce-scatter", num_reductions)):
                assert f"  {factor} Psi (N-1)/N x 4 B = " in rows[name], rows[name]
                assert rows[name].split()[-1] == "0", rows[name]
            engine.close()


# -- the kernel as a witness --

MIB = 1 << 20
NAMESPACES = (["unshare", "--net"], ["unshare", "--map-root-user", "--net"])


def in_namespace(*command: str) -> subprocess.CompletedProcess[str] | None:
    """Run a command in a network namespace of its own; None where that is not allowed."""
    for prefix in NAMESPACES if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return subprocess.run(
                [*prefix, *command], capture_output=True, text=True, check=False, timeout=200, cwd=ROOT_FOLDER
            )
    return None


ROOT_FOLDER = Path(__file__).resolve().parents[2]


def bring_up_loopback() -> None:
    """Do `ip link set lo up`, for machines that have no `ip`."""
    get_flags, set_flags, is_up = 0x8913, 0x8914, 0x1  # linux/sockios.h, linux/if.h
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(device, get_flags, request))[1]
        fcntl.ioctl(device, set_flags, struct.pack("16sH14s", b"lo", flags | is_up, b""))


def loopback_bytes() -> int:
    """Bytes sent over `lo` in this network namespace so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])  # the ninth column: bytes sent
    raise AssertionError("/proc/net/dev knows no lo")


def compare_with_the_kernel(stage: int) -> list[tuple[int, int]]:
    """Return, step by step, what the kernel has sent and what the ledgers of all ranks say."""
    width = 1200
    model = nn.Sequential(*(Unit(width, width) for _ in range(3)))  # 8.6M parameters, 33 MiB
    engine, optimizer = build(stage, model)
    steps = []
    for step in range(6):
        dist.barrier()
        engine.ledger.reset()
        before = loopback_bytes()
        dist.barrier()
        engine.backward(model(torch.randn(1, width)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        engine.wait_for_weights()
        dist.barrier()
        sent = loopback_bytes() - before
        dist.barrier()
        counted = torch.tensor([sum(count["bytes_sent"] for count in engine.ledger.comm.values())])
        dist.all_reduce(counted)
        if step:  # the first also sets connections up
            steps.append((sent, int(counted.item())))
    return steps


def main_in_namespace(stage: str) -> None:
    """What runs inside of the namespace."""
    bring_up_loopback()
    ranks: Callable[..., list[Any]] = run_ranks
    for sent, counted in ranks(compare_with_the_kernel, 2, {"stage": int(stage)}, timeout=150)[0]:
        print("step", sent, counted)


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2))])
def test_the_kernel_has_sent_what_the_ledger_says(stage: int) -> None:
    program = f"from tests.distributed.test_ledger import main_in_namespace; main_in_namespace('{stage}')"
    run = in_namespace(sys.executable, "-c", program)
    if run is None:
        pytest.skip("no network namespace of one's own: `unshare --net` is not allowed here")
    assert run.returncode == 0, run.stderr[-4000:]
    steps = [
        tuple(map(int, line.split()[1:])) for line in run.stdout.splitlines() if line.startswith("step ")
    ]
    assert len(steps) == 5, run.stdout
    assert all(counted >= 64 * MIB for _, counted in steps), steps
    # Headers and acknowledgements come on top, and more of them on a busy machine, which sends in smaller
    # pieces: the least disturbed step tells.
    ratio = min(sent / counted for sent, counted in steps)
    assert 0.999 <= ratio <= 1.01, f"sent / counted = {ratio:.4f}: {steps}"
