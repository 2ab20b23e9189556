"""What the Accelerate tests share: an Accelerator whose processes are the harness's ranks, a loop, its data.

`accelerator_of(None)` is Accelerate's own, which wraps in DDP; any stage is a `ZeroAccelerator`. Buckets are
small and nothing is persistent: at stage 3 every block is really sharded, which `assert_sharded` checks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.harness import rank, world_size
from tests.models import VOCAB, Awkward, adamw, loss_of
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin

SMALL_BUCKETS = {"reduce_bucket_size": 300, "stage3_param_persistence_threshold": 0}
STAGES = (1, 2, 3)


def reset() -> None:
    """Forget what former Accelerators of this process have agreed on, and be a rank of a launcher."""
    GradientState._reset_state()
    AcceleratorState._reset_state(True)
    os.environ |= {"OMP_NUM_THREADS": "1"}
    if dist.is_initialized():
        place = {
            "RANK": rank(),
            "LOCAL_RANK": rank(),
            "WORLD_SIZE": world_size(),
            "LOCAL_WORLD_SIZE": world_size(),
        }
        os.environ |= {name: str(value) for name, value in place.items()}


def accelerator_of(stage: int | None, config: dict[str, Any] | None = None, **keywords: Any) -> Any:
    """Return a fresh Accelerator: Accelerate's own for None, else ours at a stage."""
    reset()
    if stage is None:
        handlers = [
            DistributedDataParallelKwargs(find_unused_parameters=keywords.pop("find_unused", True)),
            *keywords.pop("kwargs_handlers", []),
        ]
        return Accelerator(cpu=True, kwargs_handlers=handlers, **keywords)
    settings = {**SMALL_BUCKETS, **(config or {})}
    return ZeroAccelerator(zero_plugin=ZeroPlugin(stage=stage, **settings), **keywords)


def new_model(seed: int = 7) -> Awkward:
    torch.manual_seed(seed)
    return Awkward()


def new_loader(num_batches: int, size: int = 3) -> DataLoader[Any]:
    """Batches for every rank: Accelerate deals them out."""
    generator = torch.Generator().manual_seed(5)
    num = num_batches * size * world_size()
    tokens, targets = (torch.randint(0, VOCAB, (num, 5), generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(tokens, targets), batch_size=size)


class Trace(NamedTuple):
    """What a run has done: losses of this rank, norms, and what of it is left."""

    losses: list[Tensor]
    norms: list[Tensor]
    weights: dict[str, Tensor]


def exact_norm(model: nn.Module) -> Tensor:
    """Return the norm of DDP's gradients as the engine takes it: in fp64, rounded once."""
    squares = [
        torch.linalg.vector_norm(p.grad, dtype=torch.float64) ** 2
        for p in model.parameters()
        if p.grad is not None
    ]
    return torch.stack(squares).sum().sqrt().float()


def train(accelerator: Any, num_steps: int = 10, max_norm: float = math.inf, seed: int = 7) -> Trace:
    """Train as Accelerate's examples do; the number of micro-batches is the accelerator's."""
    model = new_model(seed)
    loader = new_loader(num_steps * accelerator.gradient_accumulation_steps)
    model, optimizer, loader = accelerator.prepare(model, adamw(model), loader)
    losses, norms = [], []
    for tokens, targets in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model(tokens), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                exact = None if isinstance(accelerator, ZeroAccelerator) else exact_norm(model)
                norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                norms.append(norm if exact is None else exact)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert len(norms) == num_steps
    return Trace(losses, norms, whole(accelerator, model))


def whole(accelerator: Any, model: nn.Module) -> dict[str, Tensor]:
    """Return whole weights on rank 0, {} elsewhere."""
    state = accelerator.get_state_dict(model)
    return {name: value.clone() for name, value in state.items()} if rank() == 0 else {}


def assert_sharded(accelerator: Any, model: nn.Module, stage: int) -> None:
    """The engine is in use: its stage, a share of the states, bytes that were sent."""
    engine = accelerator.engine_of(model)
    assert engine.config.stage == stage
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    states, comm = engine.ledger.memory["optimizer"], engine.ledger.comm
    if world_size() == 1:
        return
    assert 0 < states < 2 * trainable * 4, f"{states} bytes of states on this rank"
    assert comm["reduce_scatter"]["bytes_sent"] > 0 and comm["all_gather"]["bytes_sent"] > 0
    assert all(param.grad is None for param in model.parameters())


def assert_same(found: Trace, expected: Trace, tolerance: float = 0.0) -> None:
    """Losses, norms and weights are equal, to a relative tolerance."""
    for name, ours, theirs in (
        ("loss", found.losses, expected.losses),
        ("norm", found.norms, expected.norms),
        ("weight", list(found.weights.values()), list(expected.weights.values())),
    ):
        assert len(ours) == len(theirs), name
        for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(
                a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name, i=number: f"{n} {i}: {m}"
            )


Run = Callable[[Any], Any]
