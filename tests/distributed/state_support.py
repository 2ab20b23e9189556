"""What the tests of whole state and of checkpoints share: a model with one of everything, and its training.

`Everything` has what a state can be made of. `train` takes a rank's rows of a global batch that is split
evenly, so that any number of ranks computes the same mean gradient, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import rank, world_size
from tests.models import VOCAB, WIDTH, Awkward, loss_of, param_groups

GLOBAL_BATCH = 12  # rows: divisible by 1, 2, 3 and 4 ranks

BF16 = {"bf16": {"enabled": True}}
EXTRA = {
    "epoch": 3,
    "nested": [{"x": torch.arange(5), "y": None}, 1.5],
    "name": "run",
    "scalar": torch.tensor(2.0),
}
LAYOUTS: list[dict[str, Any]] = [
    {"stage": 0, "reduce_bucket_size": 25_000_000},
    {"stage": 1, "reduce_bucket_size": 300},
    {"stage": 2, "reduce_bucket_size": 100},
    {"stage": 3, "reduce_bucket_size": 1_000},
    {"stage": 3, "reduce_bucket_size": 100, **BF16},
    {"stage": 1, "reduce_bucket_size": 1_000, **BF16},
    {"stage": 2, "reduce_bucket_size": 1_000, **BF16},
]


class Counting(nn.Module):
    """Counts its calls in a module's own extra state, neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.names = ["start"]

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x

    def get_extra_state(self) -> Any:
        return {"num_calls": self.num_calls, "names": self.names}

    def set_extra_state(self, state: Any) -> None:
        self.num_calls, self.names = state["num_calls"], state["names"]


class Everything(Awkward):
    """`Awkward` with a second tied pair, an empty and a 0-dim parameter, buffers, extra state."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__(recompute)
        self.left = nn.Linear(WIDTH, WIDTH, bias=False)
        self.right = nn.Linear(WIDTH, WIDTH, bias=False)
        self.right.weight = self.left.weight
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("num_batches", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.randn(2, 3))
        self.register_buffer("scratch", torch.randn(4), persistent=False)
        self.counting = Counting()

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.num_batches += 1
            self.average.mul_(0.9).add_(0.1)
        logits = super().forward(tokens)
        x = torch.tanh(self.right(torch.tanh(self.left(self.embed(tokens)))))
        return logits * self.temperature + self.counting(x) @ self.head.weight.T


def build(kind: type[nn.Module] = Everything, seed: int = 0) -> nn.Module:
    """Return a model; equal on every rank, other values for another seed."""
    torch.manual_seed(seed)
    return kind()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over two param groups with their own lr, decay and betas."""
    groups = param_groups(model)
    groups[1]["betas"] = (0.8, 0.95)
    return torch.optim.AdamW(groups, lr=1e-2)


def global_batches(num: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's rows of `num` batches, beginning with number `first`."""
    generator = torch.Generator().manual_seed(7)
    for number in range(first + num):
        tokens, targets = torch.randint(0, VOCAB, (2, GLOBAL_BATCH, 5), generator=generator)
        if number >= first:
            yield tokens[rank() :: world_size()], targets[rank() :: world_size()]


def train(model: nn.Module, optimizer: Any, num_steps: int, first: int = 0) -> list[Tensor]:
    """Train with any module and any optimizer, sharded or not; return this rank's losses."""
    losses = []
    for tokens, targets in global_batches(num_steps, first):
        loss = loss_of(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sharded(model: nn.Module, **settings: Any) -> zs.ZeroEngine:
    """Return an engine; at stage 3 nothing stays whole for being small."""
    if settings.get("stage") == 3:
        settings = {"stage3_param_persistence_threshold": 0, **settings}
    return zs.ZeroEngine(model, zs.ZeroConfig(**settings))


def engine_of(layout: dict[str, Any], seed: int = 0) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
    """Return an engine over `Everything` in one of the layouts, and its AdamW."""
    engine = sharded(build(seed=seed), **layout)
    return engine, engine.shard_optimizer(adamw(engine.model))


def whole_state(engine: zs.ZeroEngine) -> dict[str, Any]:
    """Return all that a checkpoint must keep, whole; the same on every rank."""
    found = [engine.full_state_dict(), [optimizer.state_dict() for optimizer in engine.optimizers]]
    if dist.is_initialized():
        dist.broadcast_object_list(found)
    weights, optimizers = found
    for optimizer in optimizers:
        optimizer["state"] = dict(sorted(optimizer["state"].items()))
    return {"weights": weights, "optimizers": optimizers}


def save_alone(folder: Path) -> None:
    """Save two layouts, named by their number of settings, and beside each what it holds."""
    for layout in LAYOUTS[3:5]:
        engine, optimizer = engine_of(layout)
        train(engine.model, optimizer, 2)
        engine.save_checkpoint(folder / str(len(layout)), extra=EXTRA)
        torch.save(whole_state(engine), folder / f"{len(layout)}.pt")


def assert_same(left: Any, right: Any, path: str = "state") -> None:
    """Require that two nested structures are equal: types, dtypes, every bit of every tensor."""
    assert type(left) is type(right), f"{path}: {type(left).__name__} and {type(right).__name__}"
    if isinstance(left, Tensor):
        assert left.dtype == right.dtype and left.shape == right.shape, f"{path}: {left} and {right}"
        same = torch.equal(left.nan_to_num(nan=7.0), right.nan_to_num(nan=7.0))
        assert same, f"{path}: differs by up to {(left.double() - right.double()).abs().max()}"
    elif isinstance(left, dict):
        assert list(left) == list(right), f"{path}: keys {list(left)} and {list(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{path}[{key!r}]")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), f"{path}: {len(left)} and {len(right)} items"
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    else:
        assert left == right, f"{path}: {left!r} and {right!r}"
