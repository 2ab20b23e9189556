"""How much of its communication a step waits for, on a wire and a clock that are only counted.

Oracle: what no schedule could hide (`least`), and on top of it two layers' share of what is sent: the first
gather of a step and the last reduction have nothing beside them, nor has the first gather of a backward. The
clock stands still while the machine works, so the figures are the same at every run.
"""

from __future__ import annotations

from recipes.benchmarks.wire import Shape, least, measure
from tests.harness import distributed, subtest

LAYERS = 16


@distributed(world_size=2)
def test_what_can_travel_beside_the_compute_does() -> None:
    for stage in (1, 2, 3):
        for buckets in (1, 3):
            for backward in (1.0, 2.0):
                shape = Shape(LAYERS, buckets, ratio=0.8, backward=backward)
                with subtest(f"stage {stage}, {shape}"):
                    exposed, log = measure(stage, shape)
                    assert exposed <= least(stage, shape) + 1 / LAYERS + 1e-6, (exposed, log)
