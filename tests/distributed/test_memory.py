"""Bytes held are those of the formulas, and nothing whole is held in secret.

Two oracles. The formulas of ZeRO (`estimate.model_state_bytes`), to which the ledger must add up exactly once
declared padding is taken off. And `StorageTracker`, which watches storages come and go and knows nothing of
ledger or buckets: what parameters ever pointed at is "parameters", everything else alive is "the rest".
Tolerance: none for the formulas. Bounds are sums of whole buckets, with `SLACK_BYTES` for activations,
counters and placeholders (the batch is one row), and one weight's gradient on its way to its bucket.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy as zs
from tests.harness import distributed, subtest, world_size
from tests.storage_tracker import Alive, StorageTracker
from zero_strategy.estimate import model_state_bytes
from zero_strategy.layout import START_BYTES, BucketLayout

WIDTH, INNER, DEPTH = 64, 256, 6
SLACK_BYTES = 20_000  # a sixth of a unit


class Unit(nn.Module):
    """A residual block; all of them are equal, and weights are by far the largest tensors."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Stem and norm belong to the root; the units between them are what stage 3 gathers one by one."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, recompute: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.units = nn.ModuleList(Unit(width, inner) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(width)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False) if self.recompute else unit(x)
        return self.norm(x)


class Sizes:
    """Bytes of whole buckets, from the shapes."""

    def __init__(self, model: Chain, itemsize: int) -> None:
        unit = [(name, tuple(param.shape)) for name, param in model.units[0].named_parameters()]
        root = [(n, tuple(p.shape)) for n, p in model.named_parameters() if not n.startswith("units")]
        self.unit = BucketLayout.build(unit, world_size(), itemsize).padded_numel * itemsize
        self.root = BucketLayout.build(root, world_size(), itemsize).padded_numel * itemsize
        self.whole = DEPTH * self.unit + self.root
        self.shard = self.whole // world_size()
        self.fp32_shard = self.unit // itemsize * 4 // world_size()
        # A weight's gradient on its way from autograd to its bucket; accumulation may copy it once.
        self.passing_grad = 2 * WIDTH * INNER * itemsize


class Watch:
    """A tracker, and what it has found to be storages of parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.tracker = StorageTracker()
        self.model = model
        self.users = set(self.tracker.add(model.parameters()))
        self.params: set[int] = set()
        self.tracker.listen(self._note_params)

    def _note_params(self, now: Alive) -> None:
        self.params.update(set(self.tracker.add(self.model.parameters())) - self.users)

    @contextmanager
    def phase(self) -> Iterator[list[Alive]]:
        """Yield a list that holds, at the end, what was alive at each look of the block."""
        history: list[Alive] = []
        self.tracker.history = history
        self.tracker.look()
        yield history
        self.tracker.look()

    def split(self, alive: Alive) -> tuple[int, int]:
        """Return the bytes of parameters, and of the rest."""
        params = sum(nbytes for serial, nbytes in alive.items() if serial in self.params)
        return params, sum(alive.values()) - params

    def most(self, history: list[Alive]) -> tuple[int, int]:
        """Return the most bytes of parameters, and the most of the rest, at any look."""
        looks = [self.split(alive) for alive in history]
        return max(params for params, _ in looks), max(rest for _, rest in looks)


def config(stage: int, bf16: bool = False, **settings: Any) -> zs.ZeroConfig:
    if stage == 3:
        settings.setdefault("stage3_param_persistence_threshold", 0)
    return zs.ZeroConfig(stage=stage, bf16={"enabled": bf16}, **settings)


def row(model: nn.Module) -> Tensor:
    return torch.randn(1, WIDTH, dtype=next(model.parameters()).dtype)


def cut_off(state: Any) -> set[int]:
    """Storage addresses of all tensors in a result that the caller owns."""
    if isinstance(state, Tensor):
        return {state.untyped_storage()._cdata}
    if isinstance(state, dict):
        return {address for value in state.values() for address in cut_off(value)}
    return set()


def settle(history: list[Alive], bound_bytes: float) -> None:
    """Look again until no more is alive, at most two seconds: gloo may drop its tensors a moment later."""
    deadline = time.monotonic() + 2
    while sum(history[-1].values()) > bound_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
        torch.zeros(1)  # the tracker looks at every operation


# -- nothing whole in secret --


@distributed(world_size=2)
def test_the_users_model_is_let_go_of_bucket_by_bucket_while_it_is_sharded() -> None:
    for bf16 in (False, True):
        with subtest(f"bf16={bf16}"):
            model = Chain()
            sizes, watch = Sizes(model, 2 if bf16 else 4), Watch(model)
            with watch.tracker, watch.phase() as history:
                engine = zs.ZeroEngine(model, config(3, bf16))
                # A rank keeps its shard of the parameters, and of the values from before rounding.
                kept = sizes.shard + (2 * sizes.shard if bf16 else 0)
                settle(history, kept + SLACK_BYTES)
            # Of the bucket that is being moved: its flat buffer, and while casting its fp32 values.
            moving = sizes.unit + (2 * sizes.unit if bf16 else 0)
            for alive in history:
                users = sum(nbytes for serial, nbytes in alive.items() if serial in watch.users)
                done = 1 - users / (4 * sum(param.numel() for param in model.parameters()))
                added = sum(alive.values()) - users
                bound = done * kept + moving + (kept // 4) + SLACK_BYTES
                assert added <= bound, f"{added} bytes beside the user's {users}, {bound:.0f} allowed"
            assert not watch.users & set(history[-1]), "a storage of the user's model is still alive"
            assert watch.split(history[-1])[0] <= SLACK_BYTES, "parameters are whole after construction"
            assert sum(history[-1].values()) <= kept + SLACK_BYTES
            assert history[0] and len(watch.params) > DEPTH, "the tracker has seen nothing"
            engine.close()


@distributed(world_size=2, timeout=120)
def test_two_buckets_and_the_root_are_the_most_that_is_whole_in_training() -> None:
    for bf16, recompute in ((False, False), (True, False), (False, True)):
        with subtest(f"bf16={bf16} recompute={recompute}"):
            model = Chain(recompute=recompute)
            sizes, watch = Sizes(model, 2 if bf16 else 4), Watch(model)
            with watch.tracker:
                engine = zs.ZeroEngine(model, config(3, bf16))
                optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
                for step in range(3):
                    check_step(engine, optimizer, watch, sizes, gathers_ahead=step > 0)
            engine.close()


def check_step(
    engine: zs.ZeroEngine, optimizer: torch.optim.Optimizer, watch: Watch, sizes: Sizes, gathers_ahead: bool
) -> None:
    """Take a step and hold every look at it against the bounds."""
    two_buckets = 2 * sizes.unit + sizes.root
    with watch.phase() as forward:
        loss = engine.model(row(engine.model)).float().square().mean()
    params, rest = watch.most(forward)
    base = watch.split(forward[0])[1]
    assert params <= two_buckets + SLACK_BYTES, f"{params} bytes of parameters whole in the forward"
    # The bound is reached, or this test would see nothing.
    assert params >= (two_buckets if gathers_ahead else sizes.unit + sizes.root)
    assert rest <= base + SLACK_BYTES, (
        f"{rest - base} bytes more than before, of no parameter, in the forward"
    )

    with watch.phase() as backward:
        engine.backward(loss)
        del loss
    params, rest = watch.most(backward)
    assert params <= two_buckets + SLACK_BYTES, f"{params} bytes of parameters whole in the backward"
    # Gradients: reduced ones; whole, of the bucket that fills up and the one that is reduced; what it
    # receives; the root's, which fills up from first to last; and one on its way.
    grads = sizes.shard + 2 * sizes.unit + sizes.unit + sizes.root + sizes.passing_grad
    assert rest <= base + grads + SLACK_BYTES, (
        f"{rest - base} bytes of gradients in the backward, {grads} allowed"
    )
    assert rest >= base + sizes.unit, "the tracker does not see the backward"
    params, rest = watch.split(backward[-1])
    assert params <= SLACK_BYTES, f"{params} bytes of parameters whole after the backward"
    assert rest <= base + sizes.shard + SLACK_BYTES, f"{rest - base} bytes of gradients after the backward"

    with watch.phase() as stepping:
        optimizer.step()
        optimizer.zero_grad()
    assert watch.most(stepping)[0] <= SLACK_BYTES, "parameters are whole in the step"
    largest = max(nbytes for alive in stepping for nbytes in alive.values())
    assert largest <= sizes.fp32_shard, f"{largest} bytes in one storage, more than a shard of fp32"


@distributed(world_size=2)
def test_two_buckets_are_the_most_that_is_whole_without_gradients() -> None:
    model = Chain()
    sizes, watch = Sizes(model, 4), Watch(model)
    with watch.tracker:
        engine = zs.ZeroEngine(model, config(3))
        for _ in range(2):
            with watch.phase() as history, torch.no_grad():
                model(row(model))
            params, rest = watch.most(history)
            assert params <= 2 * sizes.unit + sizes.root + SLACK_BYTES
            assert rest <= watch.split(history[0])[1] + SLACK_BYTES
            assert watch.split(history[-1])[0] <= SLACK_BYTES, "parameters are whole after the forward"
    engine.close()


@distributed(world_size=2, timeout=120)
def test_two_buckets_are_the_most_that_is_whole_while_saving_and_loading(tmp_path: Path) -> None:
    model = Chain()
    sizes, watch = Sizes(model, 4), Watch(model)
    two_buckets = 2 * sizes.unit + SLACK_BYTES
    with watch.tracker:
        engine = zs.ZeroEngine(model, config(3))
        optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
        engine.backward(model(row(model)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        results: dict[str, Any] = {}
        actions = {
            "full_state_dict": lambda: results.update(weights=engine.full_state_dict()),
            "load_full_state_dict": lambda: engine.load_full_state_dict(results["weights"]),
            "optimizer.state_dict": lambda: results.update(state=optimizer.state_dict()),
            "optimizer.load_state_dict": lambda: optimizer.load_state_dict(results["state"]),
            "save_checkpoint": lambda: engine.save_checkpoint(tmp_path / "step"),
            "load_checkpoint": lambda: engine.load_checkpoint(tmp_path / "step"),
        }
        for name, action in actions.items():
            with subtest(name):
                with watch.phase() as history:
                    action()
                # What the caller gets is the caller's: whole tensors, on rank 0.
                given = {address for value in results.values() for address in cut_off(value)}
                theirs = {s for a, (s, _) in watch.tracker._known.items() if a in given}
                before = sum(nbytes for serial, nbytes in history[0].items() if serial not in theirs)
                most = max(sum(n for s, n in alive.items() if s not in theirs) for alive in history)
                # Besides, the shard that is being sent: this rank's own, put together from its slices.
                assert most - before <= two_buckets + sizes.unit // 2, (
                    f"{most - before} bytes more than before"
                )
                assert watch.split(history[-1])[0] <= SLACK_BYTES, "parameters are whole afterwards"
                if "checkpoint" in name:
                    largest = max(
                        nbytes for alive in history for s, nbytes in alive.items() if s not in theirs
                    )
                    assert largest <= sizes.unit // 2, "more than a shard in one storage"
    engine.close()


class Comparison:
    """Takes what the ledger counts off what is alive, at every look."""

    def __init__(self, engine: zs.ZeroEngine, uncounted: list[int]) -> None:
        self.engine, self.uncounted = engine, uncounted
        self.before: Alive = {}

    def __call__(self, alive: Alive) -> None:
        counted = sum(nbytes for kind, nbytes in self.engine.ledger.memory.items() if kind != "padding")
        # What came to life in this very operation has not been handed to its owner yet.
        settled = sum(nbytes for serial, nbytes in alive.items() if serial in self.before)
        self.uncounted.append(settled - counted)
        self.before = alive


@distributed(world_size=2, timeout=120)
def test_the_ledger_counts_every_byte_that_the_tracker_sees_in_a_forward_and_backward() -> None:
    for stage in (0, 1, 2, 3):
        with subtest(f"stage {stage}"):
            model = Chain()
            sizes, watch = Sizes(model, 4), Watch(model)
            with watch.tracker:
                engine = zs.ZeroEngine(model, config(stage, reduce_bucket_size=40_000))
                optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
                uncounted: list[int] = []
                watch.tracker.listen(Comparison(engine, uncounted))
                for _ in range(2):
                    engine.backward(model(row(model)).square().mean())
                    allowed = sizes.passing_grad + SLACK_BYTES
                    assert max(uncounted) <= allowed, f"{max(uncounted)} bytes in no kind"
                    optimizer.step()
                    optimizer.zero_grad()
                    uncounted.clear()
            engine.close()


# -- formulas --

SHAPES = {"even": (128, 256), "odd": (15, 7)}  # without padding at 2 ranks, and with much of it


def over_all_ranks(value: int) -> int:
    total = torch.tensor([value])
    dist.all_reduce(total)
    return int(total.item())


@distributed(world_size=[2, 3], timeout=120)
def test_bytes_held_are_the_formulas_plus_declared_padding() -> None:
    adam, sgd = (torch.optim.AdamW, {}, 8), (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}, 4)
    for stage in (0, 1, 2, 3):
        for shape, bf16, (kind, options, state_bytes) in (
            ("even", False, adam),
            ("even", True, adam),
            ("odd", True, adam),
            ("odd", False, sgd),
        ):
            with subtest(f"stage {stage} {shape} {kind.__name__} bf16={bf16}"):
                width, inner = SHAPES[shape]
                engine = zs.ZeroEngine(Chain(width, inner), config(stage, bf16))
                optimizer = engine.shard_optimizer(kind(engine.model.parameters(), **options))
                check_formulas(engine, optimizer, width, 2 if bf16 else 4, state_bytes)
                engine.close()


def check_formulas(
    engine: zs.ZeroEngine, optimizer: torch.optim.Optimizer, width: int, param_bytes: int, state_bytes: int
) -> None:
    """Compare at three moments: sharded, before the first step, and before the second."""
    stage = engine.config.stage
    psi = sum(param.numel() for param in engine.model.parameters())
    # Every element counted over all ranks: exact where a rank's own share is rounded.
    formula = model_state_bytes(
        psi * world_size(), world_size(), stage, param_bytes=param_bytes, optimizer_state_bytes=state_bytes
    )
    held = engine.ledger.memory
    assert held["grads"] == held["optimizer"] == held["unsharded"] == 0
    assert (
        over_all_ranks(held["params"] + held["master"] - held["padding"]) == formula.params + formula.master
    )
    x = torch.randn(1, width, dtype=next(engine.model.parameters()).dtype)
    for step in range(2):
        engine.backward(engine.model(x).float().square().mean())
        held = engine.ledger.memory
        without_optimizer = held["params"] + held["grads"] + held["master"] - held["padding"]
        expected = formula.params + formula.grads + formula.master
        assert over_all_ranks(without_optimizer) == expected, f"{held} before step {step}"
        assert over_all_ranks(held["optimizer"]) == (formula.optimizer if step else 0)
        assert held["unsharded"] == 0
        optimizer.step()
        optimizer.zero_grad()
    held = engine.ledger.memory
    assert held["grads"] == 0
    if world_size() == 2 and width == SHAPES["even"][0]:
        assert held["padding"] == 0
        mine = model_state_bytes(
            psi, world_size(), stage, param_bytes=param_bytes, optimizer_state_bytes=state_bytes
        )
        assert (held["params"], held["master"], held["optimizer"]) == (
            mine.params,
            mine.master,
            mine.optimizer,
        )


@distributed(world_size=2)
def test_padding_is_what_alignment_costs_and_no_more() -> None:
    engine = zs.ZeroEngine(Chain(*SHAPES["odd"]), config(3))
    layouts = [bucket.layout for bucket in engine.buckets]
    assert over_all_ranks(engine.ledger.memory["padding"]) == 4 * sum(
        layout.padding_numel for layout in layouts
    )
    for layout in layouts:
        # Less than one alignment for each parameter's start, and less than one for each shard's end.
        limit = (len(layout.params) * START_BYTES) // 4 + world_size() * layout.align_numel
        assert 0 <= layout.padding_numel < limit


@distributed(world_size=[1, 2, 3], timeout=120)
def test_tensors_that_exist_after_a_step_have_the_bytes_the_ledger_says() -> None:
    for stage in (0, 1, 2, 3):
        for bf16 in (False, True):
            with subtest(f"stage {stage} bf16={bf16}"):
                gc.collect()
                gc.freeze()  # what exists already is not looked at
                model = Chain(15, 7)
                engine = zs.ZeroEngine(model, config(stage, bf16, reduce_bucket_size=500))
                optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))
                for _ in range(2):
                    x = torch.ones(1, 15, dtype=next(model.parameters()).dtype)
                    engine.backward(model(x).float().square().mean())
                    optimizer.step()
                optimizer.zero_grad()
                del x
                dist.barrier() if dist.is_initialized() else None
                held = engine.ledger.memory
                counted = sum(nbytes for kind, nbytes in held.items() if kind != "padding")
                # The parameters of a bucket that is freed, or has been late, point at one element.
                num_hidden = len(engine.buckets) if stage == 3 or (stage and world_size() > 1) else 0
                placeholders = num_hidden * (2 if bf16 else 4)
                real = settled_bytes(counted + placeholders)
                assert real == counted + placeholders, f"{real} bytes exist, the ledger says {held}"
                engine.close()
                del engine, optimizer, model


def settled_bytes(expected: int) -> int:
    """Return the bytes of all storages that Python's tensors refer to, made since `gc.freeze`."""
    for _ in range(50):
        gc.collect()
        tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        real = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        if real == expected:
            break
        time.sleep(0.02)  # a thread of gloo lets go of a message a little after everybody has it
    return real


# -- the witness itself --


def test_the_tracker_sees_backwards_emptied_storages_and_reused_addresses() -> None:
    tracker = StorageTracker()
    with tracker:
        kept = torch.zeros(100)
        for _ in range(3):
            torch.zeros(1000)  # dropped at once
        weight = torch.zeros(50, 50, requires_grad=True)
        (weight @ weight).sum().backward()
        assert any(10_000 in alive.values() for alive in tracker.history), "not even the forward"
        assert weight.grad is not None
        seen = tracker.add([weight.grad])[0]
        assert any(seen in alive for alive in tracker.history), (
            "a gradient was not seen when autograd made it"
        )
        del weight
        kept.untyped_storage().resize_(0)
        assert 400 not in tracker.alive().values()
        kept.untyped_storage().resize_(400)
        assert 400 in tracker.alive().values()
    assert sum(4000 in alive.values() for alive in tracker.history) >= 3
    assert 4000 not in tracker.alive().values()


@pytest.fixture(autouse=True)
def _collect_garbage() -> None:
    gc.collect()
