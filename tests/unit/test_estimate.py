"""The formulas give the published numbers, and add up over buckets to the closed form.

Oracle: the table of the ZeRO paper (7.5e9 parameters on 64 ranks), its closed forms, and hand-computed sums.
Tolerance: none; the arithmetic is exact, and the published gigabytes are compared as printed, to one decimal.
"""

from __future__ import annotations

from fractions import Fraction

import pytest

from zero_strategy.estimate import (
    BucketTraffic,
    ModelStateBytes,
    TableRow,
    bucket_traffic_bytes,
    format_bytes,
    format_table,
    live_bytes,
    model_state_bytes,
    seed_table,
    traffic_numel,
)

PSI, N = 6_400, 4


def test_published_table_of_seven_and_a_half_billion_on_64_ranks() -> None:
    rows = seed_table(7_500_000_000, 64)
    assert [f"{row.total_bytes / 1e9:.1f}" for row in rows] == ["120.0", "31.4", "16.6", "1.9"]
    assert [row.total_bytes for row in rows] == [
        120_000_000_000,
        31_406_250_000,
        16_640_625_000,
        1_875_000_000,
    ]


def test_sixteen_bit_adam_follows_the_closed_forms() -> None:
    totals = [model_state_bytes(PSI, N, stage).total for stage in range(4)]
    assert totals == [16 * PSI, 4 * PSI + 12 * PSI // N, 2 * PSI + 14 * PSI // N, 16 * PSI // N]


def test_fp32_parameters_are_their_own_masters() -> None:
    stages = [model_state_bytes(PSI, N, stage, param_bytes=4) for stage in range(4)]
    assert [state.total for state in stages] == [
        16 * PSI,
        8 * PSI + 8 * PSI // N,
        4 * PSI + 12 * PSI // N,
        16 * PSI // N,
    ]
    assert {state.master for state in stages} == {0}
    assert stages[1] == ModelStateBytes(params=4 * PSI, grads=4 * PSI, master=0, optimizer=8 * PSI // N)


@pytest.mark.parametrize(
    ("master_bytes", "state_bytes", "multiplier"), [(4, 8, 12), (4, 2, 6), (0, 4, 4), (4, 0, 4)]
)
def test_optimizers_change_the_multiplier_only(master_bytes: int, state_bytes: int, multiplier: int) -> None:
    for stage, whole, shared in ((0, 4 + multiplier, 0), (1, 4, multiplier), (2, 2, 2 + multiplier)):
        state = model_state_bytes(PSI, N, stage, optimizer_state_bytes=state_bytes, master_bytes=master_bytes)
        assert state.total == whole * PSI + shared * PSI // N


def test_share_of_the_fullest_rank_is_rounded_up() -> None:
    assert model_state_bytes(10, 3, 3) == ModelStateBytes(params=8, grads=8, master=16, optimizer=32)
    assert model_state_bytes(10, 1, 3) == model_state_bytes(10, 1, 0)


def test_traffic_is_two_psi_and_three_psi_times_the_ring_factor() -> None:
    assert [traffic_numel(12, 3, stage) for stage in range(4)] == [16, 16, 16, 24]
    assert traffic_numel(7, 3, 3) == Fraction(14)
    assert traffic_numel(5, 4, 0) == Fraction(30, 4)
    assert [traffic_numel(PSI, 1, stage) for stage in range(4)] == [0, 0, 0, 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("stage", "num_gathers"), [(2, 1), (3, 2)])
def test_buckets_of_a_plain_chain_add_up_to_the_closed_form(
    world_size: int, stage: int, num_gathers: int
) -> None:
    numels = [48 * world_size, 192 * world_size, 16 * world_size]
    buckets = [BucketTraffic(numel, 2, num_gathers, 1) for numel in numels]
    assert bucket_traffic_bytes(buckets, world_size) == 2 * traffic_numel(sum(numels), world_size, stage)


def test_bucket_used_twice_and_frozen_bucket_count_what_they_send() -> None:
    used_twice = BucketTraffic(padded_numel=64, itemsize=4, num_gathers=4, num_reductions=1)
    frozen = BucketTraffic(padded_numel=32, itemsize=2, num_gathers=2, num_reductions=0)
    assert bucket_traffic_bytes([used_twice, frozen], 4) == 5 * 48 * 4 + 2 * 24 * 2
    assert bucket_traffic_bytes([], 4) == 0


def test_bucket_without_equal_shards_is_an_internal_error() -> None:
    with pytest.raises(AssertionError, match="10 elements has no equal shards on 3 ranks"):
        bucket_traffic_bytes([BucketTraffic(10, 4, 1, 1)], 3)


def test_live_bytes_are_the_root_and_the_two_largest_buckets() -> None:
    assert live_bytes([5, 40, 7, 30], root_bytes=100) == 170
    assert live_bytes([5], root_bytes=100) == 105 and live_bytes([], root_bytes=0) == 0


def test_bytes_are_shown_in_a_human_unit_and_exactly() -> None:
    assert format_bytes(31_406_250_000) == "31.4 GB (31,406,250,000)"
    assert [format_bytes(size) for size in (0, 999, 1000)] == ["0 B", "999 B", "1.0 kB (1,000)"]
    assert (
        format_bytes(2_500_000) == "2.5 MB (2,500,000)"
        and format_bytes(10**13) == "10.0 TB (10,000,000,000,000)"
    )


def test_table_lines_up_and_shows_the_difference() -> None:
    text = format_table(
        [
            TableRow("params", 1_000_064, "4 Psi/N", 1_000_000),
            TableRow("sent", 500, "2 Psi (N-1)/N", 500),
            TableRow("control", 12, ""),
            TableRow("grads", 90, "2 Psi/N", 100, note="freed"),
        ]
    )
    header, rule, params, sent, control, grads = text.splitlines()
    assert header.split() == ["what", "counted", "formula", "difference"] and set(rule) == {"-", " "}
    assert "4 Psi/N = 1.0 MB (1,000,000)" in params and params.endswith("+64 B padding")
    assert sent.endswith("  0") and control.endswith("-") and grads.endswith("-10 B freed")
    column = header.index("formula")
    assert params[column:].startswith("4 Psi/N") and sent[column:].startswith("2 Psi (N-1)/N")
