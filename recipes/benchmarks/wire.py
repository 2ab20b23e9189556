"""A wire of a chosen speed under an engine, and layers of a chosen length, on a clock that is only counted.

What overlaps what is then the engine's schedule alone: the same on every machine, at every run. Gathers and
reductions travel as ever, and values are right; but a layer moves the clock on by what it is said to compute,
and a wait moves it to when the wire has carried what is waited for: one collective after the other, in the
order in which they were started, each for a latency and its bytes over the bandwidth. Ranks do the same, so
each has its own clock. Used by overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import zero_strategy as zs
from zero_strategy.comm.collectives import Handle

PART_NUMEL = 4096
COMPUTE_S = 1.0  # a step


class Clock:
    """A rank's time, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, time: float) -> None:
        self.now = max(self.now, time)


class Wire:
    """Carries the flat buffers of one engine, one at a time.

    Attributes:
        seconds_per_byte: Of what a rank sends; may be changed between steps.
        latency_s: Of every collective.
        sent_bytes, busy_s: How much it has carried, and for how long.
        log: What was started ("gather root.float32#0"), and what was waited for in vain so far ("wait 0.5:
            gather ...", with the seconds).
    """

    def __init__(self, engine: zs.ZeroEngine, clock: Clock, seconds_per_byte: float = 0.0) -> None:
        """Put the wire under an engine."""
        self.seconds_per_byte = seconds_per_byte
        self.latency_s = 0.0
        self.sent_bytes, self.busy_s = 0, 0.0
        self.log: list[str] = []
        self._clock = clock
        self._free_at = 0.0
        collectives: Any = engine.collectives
        self._num_ranks = collectives.world_size
        collectives.all_gather = self._slowed("gather", collectives.all_gather)
        collectives.reduce_scatter_mean = self._slowed("reduce", collectives.reduce_scatter_mean)

    def _slowed(self, kind: str, start: Callable[..., Handle]) -> Callable[..., Handle]:
        def start_slowed(flat: Tensor, *args: Any, **kwargs: Any) -> Handle:
            name = f"{kind} {next(arg for arg in args if isinstance(arg, str))}"
            shard_numel = len(kwargs["part"]) if kwargs.get("part") else flat.numel() // self._num_ranks
            arrival = self._carry(name, (self._num_ranks - 1) * shard_numel * flat.element_size())
            handle = start(flat, *args, **kwargs)

            def wait() -> None:
                if arrival > self._clock.now:
                    self.log.append(f"wait {arrival - self._clock.now:g}: {name}")
                    self._clock.wait_until(arrival)
                handle.wait()

            return Handle([], wait)

        return start_slowed

    def _carry(self, name: str, sent_bytes: int) -> float:
        """Take something up; returns when it will have arrived."""
        travel_s = self.latency_s + sent_bytes * self.seconds_per_byte
        self.log.append(name)
        self.sent_bytes += sent_bytes
        self.busy_s += travel_s
        self._free_at = max(self._free_at, self._clock.now) + travel_s
        return self._free_at


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Part, *weights: Tensor) -> Tensor:
        ctx.layer, ctx.numels = layer, [weight.numel() for weight in weights]
        layer.clock.now += layer.forward_s
        return x + sum(weight[:1] for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.layer.clock.now += ctx.layer.backward_s
        return grads[0], None, *(grads[0].sum().expand(numel) for numel in ctx.numels)


class Part(nn.Module):
    """One weight, and so long a forward and a backward."""

    def __init__(self, clock: Clock, numel: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Compute.apply(x, self, self.weight)  # type: ignore[no-untyped-call]
        return out


def build_layers(
    clock: Clock, num_layers: int, parts: Sequence[int], forward_s: float, backward_s: float
) -> nn.Sequential:
    """Return equal layers in a row.

    Args:
        clock: What they move on.
        num_layers: How many.
        parts: Elements of the weights of each, which compute one after the other.
        forward_s: Of a layer.
        backward_s: Of a layer.
    """
    share = 1 / len(parts)
    return nn.Sequential(
        *(
            nn.Sequential(*(Part(clock, numel, forward_s * share, backward_s * share) for numel in parts))
            for _ in range(num_layers)
        )
    )


class Shape(NamedTuple):
    """What is measured."""

    layers: int
    buckets: int  # of each layer
    ratio: float  # time that the wire is busy to time computed
    backward: float  # to forward


def measure(stage: int, shape: Shape) -> tuple[float, list[str]]:
    """Return the part of a step's communication that is exposed, and what the wire has noted in it."""
    clock = Clock()
    forward_s = COMPUTE_S / (1 + shape.backward) / shape.layers
    parts = [PART_NUMEL] * shape.buckets
    model = build_layers(clock, shape.layers, parts, forward_s, shape.backward * forward_s)
    keys = {"reduce_bucket_size": PART_NUMEL}
    if stage == 3:
        keys["stage3_param_persistence_threshold"] = 0
    engine = zs.ZeroEngine(model, {"zero_optimization": {"stage": stage, **keys}})
    wire = Wire(engine, clock)
    optimizer = engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> float:
        before = clock.now
        model(torch.zeros(1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return clock.now - before

    for _ in range(3):  # the first passes find out the order
        wire.sent_bytes = 0
        without = step()
    wire.seconds_per_byte = shape.ratio * COMPUTE_S / wire.sent_bytes
    step()
    wire.busy_s = 0.0
    wire.log.clear()
    with_wire = step()  # what a step leaves under way, the next one waits for
    log = list(wire.log)
    engine.close()
    return (with_wire - without) / wire.busy_s, log


def least(stage: int, shape: Shape) -> float:
    """Return what is exposed however fine the buckets are: what must travel in a pass and does not fit."""
    forward_s = COMPUTE_S / (1 + shape.backward)
    wire_s = shape.ratio * COMPUTE_S
    in_forward, in_backward = {0: (0, 1), 1: (1 / 2, 1 / 2), 2: (1 / 2, 1 / 2), 3: (1 / 3, 2 / 3)}[stage]
    left_s = max(0.0, in_forward * wire_s - forward_s)
    left_s += max(0.0, in_backward * wire_s - shape.backward * forward_s)
    return left_s / wire_s
