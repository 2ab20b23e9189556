"""Where the elements of each parameter lie in DeepSpeed's flat tensors: integers only.

Stages 1 and 2 lay the parameters of a param group end to end, pad the whole to a multiple of twice the number
of ranks, and cut it into equal parts, so that a part may begin inside a parameter. Stage 3 cuts every
parameter into equal parts, the last one padded, and lays a rank's parts end to end. Called by
`deepspeed_runs`. Source: the format as DeepSpeed 0.19.8 writes it (runtime/zero/stage_1_and_2.py,
runtime/zero/partition_parameters.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Shape = tuple[int, ...]


class Fragment(NamedTuple):
    """The run of a parameter's elements that one rank holds; it may be empty."""

    fqn: str
    start: int  # element of the flattened parameter at which it begins
    numel: int
    offset: int  # element of the rank's flat tensor at which it begins


def parts_of_whole(
    shapes: Mapping[str, Shape], gaps: Sequence[int], part_numel: int, rank: int
) -> list[Fragment]:
    """Return what a rank holds of a group that is cut as a whole: stages 1 and 2.

    Args:
        shapes: Of the parameters, in the order in which they lie.
        gaps: Padding after each of them, elements; [] for none.
        part_numel: Elements of each rank's part, padding included.
        rank: The rank.
    """
    low, high = rank * part_numel, (rank + 1) * part_numel
    fragments = []
    position = 0
    for index, (fqn, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        first, last = max(position, low), min(position + numel, high)
        if first < last:
            fragments.append(Fragment(fqn, first - position, last - first, first - low))
        position += numel + (gaps[index] if gaps else 0)
    return fragments


def parts_of_each(shapes: Mapping[str, Shape], world_size: int, rank: int) -> list[Fragment]:
    """Return what a rank holds of parameters that are cut one by one: stage 3."""
    fragments = []
    offset = 0
    for fqn, shape in shapes.items():
        numel = math.prod(shape)
        part_numel = -(-numel // world_size)
        start = min(rank * part_numel, numel)
        fragments.append(Fragment(fqn, start, min(part_numel, numel - start), offset))
        offset += part_numel
    return [fragment for fragment in fragments if fragment.numel]


def numel_of_whole(shapes: Mapping[str, Shape], gaps: Sequence[int]) -> int:
    """Elements of a group that is cut as a whole, without the padding at its end."""
    return sum(map(math.prod, shapes.values())) + sum(gaps)


def numel_of_parts(shapes: Mapping[str, Shape], world_size: int) -> int:
    """Elements that every rank holds of parameters that are cut one by one, padding included."""
    return sum(-(-math.prod(shape) // world_size) for shape in shapes.values())
