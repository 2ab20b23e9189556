"""One training loop, driven four ways, and the comparison of what it leaves: the oracle of the parity tests.

`Plain` is ordinary torch in one process, `Ddp` is torch's DistributedDataParallel, `Naive` averages whole
gradients after the backward (so that it can follow any control flow), `Zero` is the engine. All run the
same `train` with the same seeded data, and record losses, norms, gradients before `zero_grad` and weights
after every step. `train_whole_batch` is `Plain` on the batches of all ranks concatenated: what data
parallelism must reproduce. `compare` runs a loss of the test's own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import zero_strategy as zs
from tests.harness import rank, subtest, world_size
from tests.models import Awkward, adamw, batches, loss_of


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how.

    Attributes:
        num_steps: Optimizer steps.
        accumulation: Micro-batches per step.
        reduces_each: Whether every micro-batch is reduced, rather than the last of a step only (`no_sync`).
        recompute: None, "reentrant" or "non-reentrant".
        max_norm: Clip the global norm to this.
        max_value: Clip every element to this.
        build: Makes the model, seeded.
        optimizer: Makes the optimizer.
        dtype: Cast the model to this before anything else.
    """

    num_steps: int = 4
    accumulation: int = 1
    reduces_each: bool = False
    recompute: str | None = None
    max_norm: float | None = None
    max_value: float | None = None
    build: Callable[[str | None], nn.Module] = Awkward
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    dtype: torch.dtype | None = None

    def model(self) -> nn.Module:
        """The model, the same on every rank and in every way."""
        torch.manual_seed(0)
        model = self.build(self.recompute)
        return model if self.dtype is None else model.to(self.dtype)


@dataclass
class Trace:
    """What a training left behind; `weights` are there on rank 0 only if they were sharded."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


# -- the ways ------------------------------------------------------------------------------------------------


class Plain:
    """Ordinary torch."""

    def __init__(self, recipe: Recipe) -> None:
        self.model = recipe.model()
        self.module: nn.Module = self.model
        self.optimizer = recipe.optimizer(self.model)

    def no_sync(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def clip_norm(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def clip_value(self, max_value: float) -> None:
        nn.utils.clip_grad_value_(self.model.parameters(), max_value)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def grads(self) -> dict[str, Tensor | None]:
        named = self.model.named_parameters()
        return {name: None if param.grad is None else param.grad.clone() for name, param in named}

    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def close(self) -> None:
        """Let go of what the way has put on the model."""


class Ddp(Plain):
    """torch's own data parallelism."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.module = DistributedDataParallel(self.model, find_unused_parameters=True)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.module.no_sync()


class Naive(Plain):
    """Data parallelism as one would write it first: gradients are averaged in rank order at the end."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._is_averaged = False

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._is_averaged = False

    def average(self) -> None:
        """Replace gradients by their mean over ranks; where there is none, it counts as zeros."""
        for param in [] if self._is_averaged else list(self.model.parameters()):
            used = torch.tensor([int(param.grad is not None)])
            dist.all_reduce(used)
            if used.item() and param.requires_grad:
                own = torch.zeros_like(param) if param.grad is None else param.grad
                everybody = [torch.empty_like(own) for _ in range(world_size())]
                dist.all_gather(everybody, own.contiguous())
                param.grad = (sum(everybody[1:], everybody[0].float()) / world_size()).to(param.dtype)
        self._is_averaged = True

    def step(self) -> None:
        self.average()
        super().step()

    def grads(self) -> dict[str, Tensor | None]:
        self.average()
        return super().grads()


class Zero(Plain):
    """The engine, with whatever settings."""

    def __init__(self, recipe: Recipe, **settings: Any) -> None:
        self.model = self.module = recipe.model()
        # These models are small: shard all of them.
        settings.setdefault("stage3_param_persistence_threshold", 0)
        self.engine = zs.ZeroEngine(self.model, zs.ZeroConfig(**settings))
        self.users = recipe.optimizer(self.model)
        self.optimizer = self.engine.shard_optimizer(self.users)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.engine.no_sync()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def clip_norm(self, max_norm: float) -> Tensor:
        return self.optimizer.clip_grad_norm_(max_norm)

    def clip_value(self, max_value: float) -> None:
        self.optimizer.clip_grad_value_(max_value)

    def grads(self) -> dict[str, Tensor | None]:
        return {name: self.engine.full_grad(param) for name, param in self.model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return self.engine.full_state_dict()

    def close(self) -> None:
        self.engine.close()


# -- training ------------------------------------------------------------------------------------------------


def train(way: Plain, recipe: Recipe, data: list[tuple[Tensor, Tensor]] | None = None) -> Trace:
    """Run a recipe; by default on this rank's own batches. Closes the way."""
    data = data or batches(recipe.num_steps * recipe.accumulation, rank())
    trace = Trace()
    for step in range(recipe.num_steps):
        for micro in range(recipe.accumulation):
            tokens, targets = data[step * recipe.accumulation + micro]
            is_last = micro == recipe.accumulation - 1
            with way.no_sync() if not (is_last or recipe.reduces_each) else contextlib.nullcontext():
                loss = loss_of(way.module(tokens), targets) / recipe.accumulation
                way.backward(loss)
            trace.losses.append(loss.detach())
        if recipe.max_norm is not None:
            trace.norms.append(way.clip_norm(recipe.max_norm))
        if recipe.max_value is not None:
            way.clip_value(recipe.max_value)
        trace.grads.append(way.grads())
        way.step()
        trace.weights.append(way.weights())
    way.close()
    return trace


def train_zero(recipe: Recipe, **settings: Any) -> Trace:
    """Run a recipe on the engine."""
    return train(Zero(recipe, **settings), recipe)


def train_ddp(recipe: Recipe) -> Trace:
    """Run a recipe on torch's DDP, which is plain torch where there is no process group."""
    return train(Ddp(recipe) if dist.is_initialized() else Plain(recipe), recipe)


def train_whole_batch(recipe: Recipe) -> Trace:
    """Run a recipe in this process alone, on the batches of all ranks concatenated."""
    num = recipe.num_steps * recipe.accumulation
    everybody = zip(*(batches(num, other) for other in range(world_size())), strict=True)
    whole = [(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])) for pairs in everybody]
    return train(Plain(recipe), recipe, whole)


def train_with(way: Plain, loss_at: Callable[[Any, int], Tensor], num_steps: int = 3) -> Trace:
    """Train a way on a loss of the caller's own, `loss_at(model, step)`. Does not close it."""
    trace = Trace()
    for step in range(num_steps):
        loss = loss_at(way.model, step)
        way.backward(loss)
        trace.losses.append(loss.detach())
        trace.grads.append(way.grads())
        way.step()
        trace.weights.append(way.weights())
    return trace


def compare(
    recipe: Recipe,
    loss_at: Callable[[Any, int], Tensor],
    tolerance: float = 0.0,
    num_steps: int = 3,
    **settings: Any,
) -> None:
    """Require the engine to train `loss_at(model, step)` as naive data parallelism does."""
    reference = train_with(Naive(recipe), loss_at, num_steps)
    zero = Zero(recipe, **settings)
    trace = train_with(zero, loss_at, num_steps)
    zero.close()
    if tolerance:
        assert_close(trace, reference, tolerance)
    else:
        assert_same_bits(trace, reference)


def grid(**axes: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a test body run once for every combination of some arguments, within one launch of ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def every_cell(**kwargs: Any) -> None:
            for values in itertools.product(*axes.values()):
                cell = dict(zip(axes, values, strict=True))
                with subtest(", ".join(f"{name}={value}" for name, value in cell.items())):
                    body(**cell, **kwargs)

        others = [p for name, p in inspect.signature(body).parameters.items() if name not in axes]
        every_cell.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
        return every_cell

    return decorate


# -- comparison ----------------------------------------------------------------------------------------------


def assert_same_bits(trace: Trace, reference: Trace) -> None:
    """Require two traces to be equal in every bit; weights where both have them."""
    for what, value, wanted in _pairs(trace, reference):
        assert torch.equal(value, wanted), f"{what} differs by up to {(value - wanted).abs().max():.3g}"


def assert_close(trace: Trace, reference: Trace, tolerance: float = 1e-6) -> None:
    """Require norm(difference) <= tolerance * norm(reference) per tensor.

    Single elements differ by up to 2e-3 after ten steps of AdamW, where a moment is near zero: hence norms.
    """
    for what, value, wanted in _pairs(trace, reference):
        error = relative_difference(value, wanted)
        assert error <= tolerance, f"{what} differs by {error:.3g} of its norm"


def relative_difference(value: Tensor, wanted: Tensor) -> float:
    """Return norm(value - wanted) / norm(wanted); the former alone where the latter is zero."""
    norm = float(wanted.double().norm())
    return float((value.double() - wanted.double()).norm()) / (norm or 1.0)


def mean_over_ranks(trace: Trace) -> Trace:
    """Return the trace with losses averaged over ranks, to be compared with that of the whole batch."""
    losses = torch.stack(trace.losses).double()
    dist.all_reduce(losses)
    mean = (losses / world_size()).float()
    return Trace(list(mean), trace.norms, trace.grads, trace.weights)


def _pairs(trace: Trace, reference: Trace) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield every tensor with its counterpart and its name, in the order of time; None only matches None."""
    for mine, others in ((trace.losses, reference.losses), (trace.norms, reference.norms)):
        assert len(mine) == len(others), f"{len(mine)} values against {len(others)}"
    for step in range(len(reference.grads)):
        micro = len(reference.losses) // len(reference.grads)
        for index in range(step * micro, (step + 1) * micro):
            yield f"loss of micro-batch {index}", trace.losses[index], reference.losses[index]
        if reference.norms:
            yield f"gradient norm of step {step}", trace.norms[step], reference.norms[step]
        for name, wanted in reference.grads[step].items():
            value = trace.grads[step][name]
            assert (value is None) == (wanted is None), (
                f"step {step}: gradient of {name!r} is {value}, not {wanted}"
            )
            if value is not None and wanted is not None:
                yield f"step {step}: gradient of {name!r}", value, wanted
        if trace.weights[step] and reference.weights[step]:
            names = trace.weights[step].keys() ^ reference.weights[step].keys()
            assert not names, f"step {step}: {sorted(names)} are weights of one side only"
            for name, wanted in reference.weights[step].items():
                yield f"step {step}: weight {name!r}", trace.weights[step][name], wanted
