"""The partition arithmetic: every element has one place, every rank an equal, aligned range, gaps are named.

Oracle: a plain list with one entry per element of the flat buffer, filled in parameter by parameter.
Tolerance: none; these are integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from zero_strategy.layout import ALIGN_BYTES, ALIGN_NUMEL, START_BYTES, BucketLayout, ParamSpec, round_up

Shapes = list[tuple[str, tuple[int, ...]]]

CASES: dict[str, Shapes] = {
    "odd": [("a", (7, 15)), ("b", (15,)), ("c", (3, 5, 11))],
    "scalar": [("scale", ()), ("weight", (33, 2))],
    "empty": [("a", (5,)), ("nothing", (0, 7)), ("b", (64,)), ("also_nothing", (3, 0))],
    "only empty": [("nothing", (0,))],
    "one element": [("a", (1,))],
    "even": [("a", (256, 4)), ("b", (512,))],
    "none": [],
}
WORLDS = [1, 2, 3, 4, 8, 64]
ITEMSIZES = [1, 2, 4, 8]


def layouts_of(case: str) -> Iterator[tuple[BucketLayout, int, int]]:
    """The case laid out for every world size and item size, with both."""
    for world in WORLDS:
        for itemsize in ITEMSIZES:
            yield BucketLayout.build(CASES[case], world, itemsize), world, itemsize


def numel_of(shape: tuple[int, ...]) -> int:
    result = 1
    for size in shape:
        result *= size
    return result


def owners(layout: BucketLayout) -> list[tuple[int, int] | None]:
    """For every element of the flat buffer: which parameter and which of its elements; None for padding."""
    flat: list[tuple[int, int] | None] = [None] * layout.padded_numel
    for index, param in enumerate(layout.params):
        for element in range(param.numel):
            assert flat[param.start + element] is None, "two parameters share an element"
            flat[param.start + element] = (index, element)
    return flat


@pytest.mark.parametrize("case", CASES)
def test_slices_of_all_shards_cover_every_element_exactly_once(case: str) -> None:
    for layout, world, _ in layouts_of(case):
        flat = owners(layout)
        seen: Counter[tuple[int, int]] = Counter()
        for shard in range(world):
            for piece in layout.slices(shard):
                assert piece.numel > 0
                for offset in range(piece.numel):
                    place = (piece.param_index, piece.param_start + offset)
                    assert flat[shard * layout.shard_numel + piece.shard_start + offset] == place
                    seen[place] += 1
        expected = {(i, e) for i, (_, shape) in enumerate(CASES[case]) for e in range(numel_of(shape))}
        assert set(seen) == expected and set(seen.values()) <= {1}


@pytest.mark.parametrize("case", CASES)
def test_starts_and_shard_ends_are_aligned_in_elements_and_bytes(case: str) -> None:
    for layout, world, itemsize in layouts_of(case):
        assert layout.padded_numel % world == 0
        for place in (*(shard * layout.shard_numel for shard in range(world + 1)), layout.shard_numel):
            assert place % ALIGN_NUMEL == 0 and place * itemsize % ALIGN_BYTES == 0
        for param in layout.params:
            assert param.start % ALIGN_NUMEL == 0 and param.start * itemsize % START_BYTES == 0, param


@pytest.mark.parametrize("case", CASES)
def test_gaps_are_the_padding_and_nothing_else(case: str) -> None:
    for layout, _, _ in layouts_of(case):
        flat = owners(layout)
        in_gaps = [element for start, numel in layout.gaps() for element in range(start, start + numel)]
        assert in_gaps == [element for element, owner in enumerate(flat) if owner is None]
        assert all(numel > 0 for _, numel in layout.gaps())
        assert layout.padding_numel == len(in_gaps) == layout.padded_numel - layout.numel
        assert layout.numel == sum(numel_of(shape) for _, shape in CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_padding_stays_below_one_alignment_for_each_start_and_each_shard(case: str) -> None:
    for layout, world, itemsize in layouts_of(case):
        step = max(ALIGN_NUMEL, START_BYTES // itemsize)
        num_full = sum(param.numel > 0 for param in layout.params)
        assert layout.padding_numel <= num_full * (step - 1) + world * layout.align_numel - 1


@pytest.mark.parametrize("world", WORLDS)
def test_slices_of_neighbouring_shards_are_those_of_one_larger_shard(world: int) -> None:
    layout = BucketLayout.build(CASES["odd"], world, 4)
    whole = layout.slices(0, world)
    assert [(piece.param_index, piece.numel) for piece in whole] == [
        (index, param.numel) for index, param in enumerate(layout.params)
    ]
    assert [piece.shard_start for piece in whole] == [param.start for param in layout.params]
    if world >= 4:
        second = layout.slices(2, 2)
        apart = [*layout.slices(2), *layout.slices(3)]
        assert sum(piece.numel for piece in second) == sum(piece.numel for piece in apart)


def test_a_bucket_smaller_than_the_world_leaves_ranks_with_nothing_but_padding() -> None:
    layout = BucketLayout.build([("a", (7, 15))], 64, 4)
    assert layout.shard_numel == ALIGN_NUMEL
    assert [sum(piece.numel for piece in layout.slices(rank)) for rank in range(64)] == [16] * 6 + [9] + [
        0
    ] * 57


def test_empty_parameters_take_no_room_and_have_no_slice() -> None:
    layout = BucketLayout.build(CASES["empty"], 3, 4)
    without = BucketLayout.build([entry for entry in CASES["empty"] if numel_of(entry[1])], 3, 4)
    assert layout.padded_numel == without.padded_numel
    assert {piece.param_index for rank in range(3) for piece in layout.slices(rank)} == {0, 2}
    assert layout.params[1] == ParamSpec("nothing", (0, 7), 0, layout.params[2].start)
    nothing = BucketLayout.build(CASES["only empty"], 3, 4)
    assert (nothing.padded_numel, nothing.shard_numel, nothing.gaps(), nothing.slices(1)) == (0, 0, [], ())


def test_a_parameter_keeps_its_place_whatever_the_world_size() -> None:
    layouts = [BucketLayout.build(CASES["odd"], world, 2) for world in WORLDS]
    assert len({tuple(param.start for param in layout.params) for layout in layouts}) == 1


def test_layouts_of_equal_input_are_equal_and_cannot_be_changed() -> None:
    layout = BucketLayout.build(CASES["odd"], 3, 4)
    assert layout == BucketLayout.build(CASES["odd"], 3, 4)
    with pytest.raises(AttributeError):
        layout.padded_numel = 0  # type: ignore[misc]


def test_rounding_up_gives_the_next_multiple_or_the_number_itself() -> None:
    assert [round_up(value, 16) for value in (0, 1, 15, 16, 17)] == [0, 16, 16, 16, 32]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_ranks_own_covers_the_buffer_once_or_is_everything(world_size: int) -> None:
    layout = BucketLayout.build([("a", (7, 15)), ("b", (300,)), ("c", ()), ("d", (0, 4))], world_size, 4)
    parts = [layout.own_part(rank, is_cut=True) for rank in range(world_size)]
    assert [element for part in parts for element in part.elements] == list(range(layout.padded_numel))
    for part in parts:
        for piece in part.slices:
            first = part.elements[piece.shard_start]
            assert first == layout.params[piece.param_index].start + piece.param_start
            assert piece.shard_start + piece.numel <= len(part.elements)
    whole = layout.own_part(world_size - 1, is_cut=False)
    assert whole.elements == range(layout.padded_numel)
    assert [piece.numel for piece in whole.slices] == [7 * 15, 300, 1]
