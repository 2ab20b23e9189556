"""The collectives give the same bits as plain arithmetic in rank order, and control messages arrive whole.

Oracle: every rank's values are made from its number, so each rank can add them up itself, in rank order, in
fp32. Tolerance: none. A reduction must not depend on where in the buffer an element lies: sums are compared
bit for bit.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.harness import distributed, expect_error, rank, subtest, world_size
from zero_strategy.comm import ordered
from zero_strategy.comm.collectives import Collectives
from zero_strategy.comm.ledger import Ledger
from zero_strategy.comm.topology import Topology
from zero_strategy.errors import CheckpointError, ConfigError, OffloadError, ShardingError
from zero_strategy.layout import BucketLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# One element, less than a shard's alignment for most worlds, odd ones, more than one chunk of a sum.
NUMELS = [1, 50, 1001, 3 * ordered.SUM_CHUNK_NUMEL + 77]


def connect() -> tuple[Collectives, Ledger]:
    ledger = Ledger()
    return Collectives(Topology(torch.device("cpu")), ledger), ledger


def values_of(some_rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """A rank's buffer; magnitudes differ by rank, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(some_rank)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10 ** (some_rank % 3)).to(dtype)


def naive_mean(numel: int, dtype: torch.dtype, num_ranks: int, order: list[int] | None = None) -> Tensor:
    """The mean of all ranks' buffers: added in rank order in fp32 (fp64 for fp64), rounded once."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(numel, dtype=wide)
    for some_rank in order or range(num_ranks):
        total = total + values_of(some_rank, numel, dtype).to(wide)
    return (total / num_ranks).to(dtype)


def padded(numel: int, dtype: torch.dtype) -> int:
    return BucketLayout.build([("weight", (numel,))], world_size(), dtype.itemsize).padded_numel


@distributed(world_size=[1, 2, 3, 4])
def test_reduce_scatter_is_the_sum_in_rank_order_rounded_once() -> None:
    collectives, ledger = connect()
    for dtype in DTYPES:
        for numel in (padded(numel, dtype) for numel in NUMELS):
            shard_numel = numel // world_size()
            own = slice(rank() * shard_numel, (rank() + 1) * shard_numel)
            expected = naive_mean(numel, dtype, world_size())[own]
            with subtest(f"{dtype} {numel}"):
                full, output = values_of(rank(), numel, dtype), torch.empty(shard_numel, dtype=dtype)
                ledger.reset()
                collectives.reduce_scatter_mean(full, output, "test").wait()
                assert torch.equal(output, expected)
                assert torch.equal(full, values_of(rank(), numel, dtype)), "the input was changed"
                sent = (world_size() - 1) * shard_numel * dtype.itemsize
                assert ledger.comm["reduce_scatter"] == {"calls": 1, "bytes_sent": sent}
            with subtest(f"{dtype} {numel} in place"):
                full = values_of(rank(), numel, dtype)
                collectives.reduce_scatter_mean(full, full[own], "test").wait()
                assert torch.equal(full[own], expected)


@distributed(world_size=3)
def test_this_comparison_would_notice_another_order_of_additions() -> None:
    reversed_mean = naive_mean(1024, torch.float32, 3, order=[2, 1, 0])
    assert not torch.equal(naive_mean(1024, torch.float32, 3), reversed_mean)


@distributed(world_size=2)
def test_bf16_gradients_can_be_averaged_into_fp32_without_rounding() -> None:
    collectives, _ = connect()
    output = torch.empty(64, dtype=torch.float32)
    collectives.reduce_scatter_mean(values_of(rank(), 128, torch.bfloat16), output, "test").wait()
    exact = sum(values_of(some_rank, 128, torch.bfloat16).double() for some_rank in range(2)) / 2
    assert torch.equal(output.double(), exact[rank() * 64 : (rank() + 1) * 64])


@distributed(world_size=3)
def test_reductions_under_way_at_once_do_not_share_memory() -> None:
    collectives, _ = connect()
    numels = [48 * 5, 48 * 700, 48 * 3]
    outputs = [torch.empty(numel // 3) for numel in numels]
    handles = [
        collectives.reduce_scatter_mean(values_of(rank(), numel, torch.float32), output, "test")
        for numel, output in zip(numels, outputs, strict=True)
    ]
    assert collectives.memory().grads == sum(numels) * 4
    for handle in handles:
        handle.wait()
        handle.wait()  # waiting again costs nothing and changes nothing
    for numel, output in zip(numels, outputs, strict=True):
        expected = naive_mean(numel, torch.float32, 3)
        assert torch.equal(output, expected.chunk(3)[rank()])
    assert collectives.memory().grads == 48 * 5 * 4, "one buffer is kept"
    collectives.end_reductions()
    assert collectives.memory().grads == 0


@distributed(world_size=2)
def test_receive_memory_is_kept_between_reductions_and_grows_when_it_must() -> None:
    collectives, _ = connect()
    for numel, kept in ((96, 96), (32, 96), (960, 960), (96, 960)):
        output = torch.empty(numel // 2)
        collectives.reduce_scatter_mean(values_of(rank(), numel, torch.float32), output, "test").wait()
        assert torch.equal(output, naive_mean(numel, torch.float32, 2).chunk(2)[rank()])
        assert collectives.memory().grads == kept * 4


@distributed(world_size=[1, 2, 3, 4])
def test_all_gather_fills_the_ranges_of_the_others_in_place() -> None:
    collectives, ledger = connect()
    for dtype in DTYPES:
        for numel in (padded(numel, dtype) for numel in NUMELS):
            with subtest(f"{dtype} {numel}"):
                shard_numel = numel // world_size()
                shards = [values_of(some_rank, shard_numel, dtype) for some_rank in range(world_size())]
                flat = torch.full((numel,), float("nan"), dtype=dtype)
                flat[rank() * shard_numel : (rank() + 1) * shard_numel] = shards[rank()]
                address = flat.data_ptr()
                ledger.reset()
                collectives.all_gather(flat, "test").wait()
                assert torch.equal(flat, torch.cat(shards)) and flat.data_ptr() == address
                sent = (world_size() - 1) * shard_numel * dtype.itemsize
                assert ledger.comm["all_gather"] == {"calls": 1, "bytes_sent": sent}
            with subtest(f"{dtype} {numel} to rank 0"):
                whole = collectives.gather_to_first(shards[rank()], "test")
                assert whole is None if rank() else torch.equal(whole, torch.cat(shards))
                sent = shard_numel * dtype.itemsize if rank() else 0
                assert ledger.comm["control"] == {"calls": 1, "bytes_sent": sent}


@distributed(world_size=2)
def test_gathers_and_reductions_may_be_issued_in_different_orders() -> None:
    collectives, _ = connect()
    numel = 4096
    flat, output = torch.full((numel,), float(rank())), torch.empty(numel // 2)

    def gather() -> object:
        return collectives.all_gather(flat, "test")

    def reduce() -> object:
        return collectives.reduce_scatter_mean(values_of(rank(), numel, torch.float32), output, "test")

    handles = [start() for start in ((gather, reduce) if rank() == 0 else (reduce, gather))]
    for handle in handles:
        handle.wait()  # type: ignore[attr-defined]
    assert torch.equal(flat, torch.arange(2.0).repeat_interleave(numel // 2))
    assert torch.equal(output, naive_mean(numel, torch.float32, 2).chunk(2)[rank()])


@distributed(world_size=[1, 2, 3])
def test_json_of_any_length_arrives_from_all_ranks_in_rank_order() -> None:
    collectives, ledger = connect()
    for name, make in (
        ("uneven", lambda r: "x" * (1000 * r)),
        ("about as long as is sent at once", lambda r: "x" * (117 + r)),
        ("none", lambda r: None),
        ("one has nothing", lambda r: [] if r == 0 else {"rank": r, "name": "\u00e9"}),
    ):
        with subtest(name):
            ledger.reset()
            assert collectives.gather_json(make(rank())) == [make(r) for r in range(world_size())]
            longest_bytes = max(len(json.dumps(make(r))) for r in range(world_size()))
            sent = (world_size() - 1) * (8 + max(120, longest_bytes))
            assert world_size() == 1 or ledger.comm["control"] == {"calls": 1, "bytes_sent": sent}
    assert collectives.broadcast_json([rank(), "same"]) == [0, "same"]


@distributed(world_size=[1, 2, 3])
def test_bytes_of_rank_zero_arrive_whatever_the_others_pass() -> None:
    collectives, ledger = connect()
    for payload in (b"", b"\x00", bytes(range(256)) * 41):
        mine = payload if rank() == 0 else b"something else" * rank()
        assert collectives.broadcast_bytes(mine) == payload
    assert {kind for kind, count in ledger.comm.items() if count["bytes_sent"]} <= {"control"}


@distributed(world_size=[1, 2, 3])
def test_numbers_are_stacked_and_summed_in_rank_order_on_every_rank() -> None:
    collectives, _ = connect()
    mine = torch.tensor([0.1 * (rank() + 1), 1e16 if rank() == 0 else 1.0], dtype=torch.float64)
    rows = collectives.stack(mine)
    assert rows.shape == (world_size(), 2) and torch.equal(rows[rank()], mine)
    assert torch.equal(collectives.sum_in_rank_order(mine), rows.sum(dim=0))
    everybody = collectives.gather_json([float(x).hex() for x in collectives.sum_in_rank_order(mine)])
    assert all(result == everybody[0] for result in everybody), "ranks got other bits"
    assert collectives.stack(torch.empty(0)).shape == (world_size(), 0)


@distributed(world_size=[1, 2, 3])
def test_maximum_is_element_wise() -> None:
    collectives, _ = connect()
    flags = torch.zeros(world_size() + 1, dtype=torch.uint8)
    flags[rank()] = rank() + 1
    collectives.maximum(flags)
    assert flags.tolist() == [*range(1, world_size() + 1), 0]


@distributed(world_size=[1, 3])
def test_broadcast_takes_the_tensor_of_rank_zero() -> None:
    collectives, _ = connect()
    tensor = torch.full((7,), float(rank() + 5))
    collectives.broadcast(tensor)
    assert tensor.tolist() == [5.0] * 7


@distributed(world_size=[1, 2, 3])
def test_an_error_of_one_rank_is_raised_on_all_with_its_text_and_rank() -> None:
    collectives, _ = connect()
    last = world_size() - 1
    for kind in (ConfigError, ShardingError, CheckpointError, OffloadError):
        collectives.agree(None)
        mine = kind(what="The disk is full.", why="It has 3 bytes.", fix="Delete something.")
        prefix = f"[rank {last}] " if world_size() > 1 else ""
        texts = [f"{prefix}The disk is full.", "It has 3 bytes.", "Delete something."]
        with expect_error(kind, texts):
            collectives.agree(mine if rank() == last else None)


@distributed(world_size=2)
def test_the_lowest_rank_speaks_when_several_have_an_error() -> None:
    collectives, _ = connect()
    with expect_error(ConfigError, "[rank 0] from 0"):
        collectives.agree(ConfigError(what=f"from {rank()}", why="-", fix="-"))


@distributed(world_size=2, timeout=40)
def test_a_difference_between_ranks_names_the_first_line_that_differs() -> None:
    collectives, _ = connect()
    collectives.require_same(["a", "b"], "The model")
    with expect_error(ConfigError, ["[rank 1] The model differs", "'b'", "'c'"]):
        collectives.require_same(["a", "b" if rank() == 0 else "c"], "The model")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_process_group_the_mean_is_the_buffer_itself(dtype: torch.dtype) -> None:
    assert not dist.is_initialized()
    collectives, ledger = connect()
    full, output = values_of(0, 96, dtype), torch.empty(96, dtype=dtype)
    collectives.reduce_scatter_mean(full, output, "test").wait()
    collectives.all_gather(full, "test").wait()
    assert torch.equal(output, full)
    assert all(count["bytes_sent"] == 0 for count in ledger.comm.values())
