"""A step returns while weights that stay whole are under way, and nobody sees any but the new ones.

Oracle: the same training with `overlap_comm: false`, whose step waits; tolerance 0. That a weight was under
way when it was read is asserted too (its class says so), and holds whatever the machine does: it stays so
until somebody waits.
"""

from __future__ import annotations

import copy
import ctypes
import io
import os
import select
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Mlp
from zero_strategy.comm import watch
from zero_strategy.late import LateTensor

WIDTH = 15


class Training:
    """An `Mlp` of four layers, each a bucket, and one step at a time."""

    def __init__(self, build: Callable[[], nn.Module] = lambda: Mlp(4, WIDTH), **keys: Any) -> None:
        torch.manual_seed(3)
        self.model = build()
        self.engine = zs.ZeroEngine(self.model, zs.ZeroConfig(**{"reduce_bucket_size": 240, **keys}))
        self.optimizer = self.engine.shard_optimizer(torch.optim.AdamW(self.model.parameters(), lr=0.1))
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        generator = torch.Generator().manual_seed(10 * self.num_steps + rank())
        self.engine.backward(self.model(torch.randn(2, WIDTH, generator=generator)).pow(2).mean())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def late(self) -> list[str]:
        return [name for name, param in self.model.named_parameters() if isinstance(param, LateTensor)]


def twins(**keys: Any) -> tuple[Training, Training]:
    """Two trainings after a step, one with weights under way and one that has waited."""
    lazy, eager = Training(**keys), Training(**keys, overlap_comm=False)
    for training in (lazy, eager):
        training.step()
    assert len(lazy.late()) == 8 and not eager.late()
    return lazy, eager


def memory_of(param: Tensor) -> Tensor:
    """A copy made behind torch's back, from the address."""
    raw = (ctypes.c_char * (param.numel() * param.element_size())).from_address(param.data_ptr())
    return torch.frombuffer(bytearray(raw), dtype=param.dtype).view(param.shape)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(t: Training) -> Any:
    ema = zs.ShardedEMA(t.engine, decay=0.5)
    ema.update()
    t.step()
    ema.update()
    with ema.swapped():
        return t.model.state_dict()


def reloaded(t: Training, folder: Path) -> Any:
    t.engine.save_checkpoint(folder)
    t.step()
    t.engine.load_checkpoint(folder)
    return t.engine.full_state_dict()


def written(t: Training) -> Any:
    with torch.no_grad():
        t.model.layers[2].weight.mul_(0.5)
    t.engine.sync_masters_from_params()
    t.step()
    return t.engine.full_state_dict()


def in_a_block(t: Training) -> Any:
    with t.engine.unsharded_params():
        return [memory_of(param) for param in t.model.parameters()]


def frozen(t: Training) -> Any:
    t.model.layers[0].requires_grad_(False)
    t.step()
    return t.engine.full_state_dict()


X = torch.linspace(-1, 1, WIDTH)
READERS: dict[str, Callable[[Training], Any]] = {
    "clone": lambda t: t.model.layers[3].weight.clone(),
    "data": lambda t: t.model.layers[3].weight.data,
    "numpy": lambda t: t.model.layers[3].weight.detach().numpy().copy(),
    "repr": lambda t: repr(t.model.layers[3].weight),
    "item": lambda t: t.model.layers[3].bias[2].item(),
    "address": lambda t: memory_of(t.model.layers[3].weight),
    "deepcopy of a parameter": lambda t: copy.deepcopy(t.model.layers[3].weight),
    "deepcopy of the model": lambda t: copy.deepcopy(t.model)(X),
    "nn.Parameter": lambda t: nn.Parameter(t.model.layers[3].weight),
    "pickle": lambda t: saved(t.model.layers[3].weight),
    "state_dict": lambda t: saved(t.model.state_dict()),
    "state_dict(keep_vars)": lambda t: list(t.model.state_dict(keep_vars=True).values())[5].clone(),
    "named_parameters": lambda t: {k: v.detach() + 0 for k, v in t.model.named_parameters()},
    "one call for all": lambda t: torch._foreach_norm(list(t.model.parameters())),
    "a list": lambda t: torch.cat([p.flatten() for p in t.model.parameters()]),
    "to": lambda t: t.model.layers[1].weight.to(torch.float64),
    "another module's weight": lambda t: F.linear(X, t.model.layers[3].weight.T),
    "a forward without gradients": lambda t: torch.no_grad()(t.model)(X),
    "a submodule": lambda t: t.model.layers[2](X),
    "functional_call": lambda t: torch.func.functional_call(t.model, dict(t.model.named_parameters()), X),
    "gradients of a weight": lambda t: torch.autograd.grad(
        t.model.layers[3].weight.pow(3).sum(), t.model.layers[3].weight
    ),
    "unsharded_params": in_a_block,
    "full_state_dict": lambda t: t.engine.full_state_dict(),
    "an average": averaged,
    "a write": written,
    "the next steps": lambda t: (t.step(), t.step(), t.engine.full_state_dict())[2],
    "a step after freezing": frozen,
}


@distributed(world_size=2, timeout=120)
def test_every_reader_of_weights_finds_the_new_ones(tmp_path: Path) -> None:
    def through_a_folder(training: Training) -> Any:
        return reloaded(training, tmp_path / str(training.engine.config.zero_optimization.overlap_comm))

    readers = {**READERS, "a checkpoint": through_a_folder}
    for number, (name, read) in enumerate(readers.items()):
        stage = 1 + number % 2  # weights are late in the same way at both
        with subtest(f"stage {stage}, {name}"):
            lazy, eager = twins(stage=stage)
            found, wanted = read(lazy), read(eager)
            assert_same(found, wanted)
            lazy.engine.close()
            assert not lazy.late()
            eager.engine.close()


def assert_same(found: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        for mine, yours in zip(found, wanted, strict=True):
            assert_same(mine, yours)
    elif isinstance(wanted, Tensor):
        assert type(found) is type(wanted) and torch.equal(found, wanted) and not wanted.isnan().any()
    elif not isinstance(wanted, str | float):
        assert (found == wanted).all()
    else:
        assert found == wanted


@distributed(world_size=2)
def test_a_layer_waits_for_its_own_weights_and_for_no_others() -> None:
    for stage in (1, 2):
        with subtest(f"stage {stage}"):
            training, seen = Training(stage=stage), list[int]()
            note = partial(_note_late, training, seen)
            for layer in training.model.layers:
                layer.register_forward_hook(note)
            training.step()
            training.step()
            assert seen == [0, 0, 0, 0, 6, 4, 2, 0]  # two parameters each
            assert len(training.late()) == 8
            training.engine.close()


def _note_late(training: Training, seen: list[int], *args: Any) -> None:
    seen.append(len(training.late()))


@distributed(world_size=2)
def test_questions_that_have_to_do_with_no_values_do_not_wait() -> None:
    training, eager = twins(stage=2)
    for param in training.model.parameters():
        assert (
            param.requires_grad and param.grad is None and param.is_leaf and isinstance(param, nn.Parameter)
        )
        assert param.shape == param.size() and param.dtype == torch.float32
        assert param.nbytes == 4 * param.numel() > 0
    training.model.zero_grad()
    assert len(set(training.model.parameters())) == len(training.late()) == 8
    training.engine.wait_for_weights()
    assert not training.late()
    training.engine.close()
    eager.engine.close()


@distributed(world_size=2)
def test_what_is_on_its_way_is_no_more_than_allowed() -> None:
    """Of four equal buckets two fit: the step waits for the others."""
    training = Training(stage=2)
    numel = 2 * training.engine.buckets[0].layout.padded_numel
    training.engine.close()
    training = Training(stage=2, allgather_bucket_size=numel)
    training.step()
    assert training.late() == [f"layers.{i}.{name}" for i in (2, 3) for name in ("weight", "bias")]
    training.engine.close()


def scripted() -> nn.Module:
    model = Mlp(4, WIDTH)
    model.layers[1] = torch.jit.script(model.layers[1])
    return model


@distributed(world_size=2)
def test_what_stays_whole_at_stage_3_is_late_too_and_nothing_is_where_a_part_is_scripted() -> None:
    """TorchScript takes weights in C++, where nothing of ours would wait."""
    biases = [f"layers.{i}.bias" for i in range(4)]
    everything = [name for name, _ in Mlp(4, WIDTH).named_parameters()]
    for stage, build, threshold, late in (
        (3, None, 1000, everything),
        (3, None, WIDTH + 1, biases),
        (2, scripted, 0, []),
    ):
        with subtest(f"stage {stage}, whole below {threshold}, scripted {build is not None}"):
            keys: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": threshold}
            builds = [] if build is None else [build]
            lazy, eager = Training(*builds, **keys), Training(**keys, overlap_comm=False)
            for _ in range(2):
                lazy.step()
                eager.step()
                assert lazy.late() == late and not eager.late()
            assert_same(lazy.engine.full_state_dict(), eager.engine.full_state_dict())
            lazy.engine.close()
            eager.engine.close()


class Behind(nn.Module):
    """A layer that reads the memory of a weight as C++ code does: without asking the weight's class."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            seen = self.inner.weight.detach().sum()
        return x + F.linear(x, self.inner.weight) * seen


@distributed(world_size=2)
def test_code_that_torch_does_not_see_finds_the_weights_of_its_unit_and_no_old_ones_elsewhere() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(Behind() for _ in range(3)))

    lazy, eager = Training(build, stage=2), Training(build, stage=2, overlap_comm=False)
    for training in (lazy, eager):
        training.step()
    assert len(lazy.late()) == 3
    with torch._C.DisableTorchFunctionSubclass():
        assert (lazy.model[2].inner.weight + 0).isnan().all()
    for training in (lazy, eager):
        training.step()
    assert_same(lazy.engine.full_state_dict(), eager.engine.full_state_dict())
    lazy.engine.close()
    eager.engine.close()


@distributed(world_size=2)
def test_a_rank_that_fails_with_weights_under_way_is_named_to_who_waits_for_them() -> None:
    watch.POLL_S = 0.05
    training = Training(stage=2)
    training.step()
    if rank() == 1:
        training.engine.backward(training.model(X).sum())
        dist.barrier()  # not before the other has weights under way
        training.engine.watch.fail(ValueError("boom of rank 1"))
        return
    training.step()
    assert training.late()
    dist.barrier()
    for _ in range(2):
        with expect_error(zs.ShardingError, "boom of rank 1"):
            training.model.layers[3].weight.sum()
    with expect_error(zs.ShardingError, "boom of rank 1"):
        training.model(X)
    with expect_error(zs.ShardingError, "boom of rank 1"):
        training.engine.close()


@distributed(world_size=2)
def test_a_forked_process_is_told_that_weights_under_way_never_arrive_there() -> None:
    """It has no threads that could receive them, and would wait for ever."""
    training = Training(stage=2)
    training.step()
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = str(training.model.layers[3].weight.sum())
        except zs.ShardingError as error:
            said = str(error)
        os.write(theirs, said.encode())
        os._exit(0)
    ready, _, _ = select.select([ours], [], [], 20)
    said = os.read(ours, 4096).decode() if ready else "nothing: it hangs"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert "forked" in said and "wait_for_weights()" in said, said
    training.step()
    training.engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=200)
def test_weights_are_not_late_where_the_model_or_a_block_of_it_is_compiled() -> None:
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "around": lambda model: torch.compile(model, backend="eager"),  # type: ignore[dict-item,return-value]
        "in place": lambda model: (model.compile(backend="eager"), model)[1],  # type: ignore[func-returns-value]
        "a block": lambda model: (model.layers[1].compile(backend="eager"), model)[1],  # type: ignore[operator,union-attr,func-returns-value]
    }
    for name, compile_it in ways.items():
        with subtest(name):
            torch._dynamo.reset()
            lazy, eager = Training(stage=2), Training(stage=2, overlap_comm=False)
            lazy.model = compile_it(lazy.model)
            for _ in range(4):
                lazy.step()
                eager.step()
                assert not lazy.late()
            assert_same(
                list(lazy.engine.full_state_dict().values()), list(eager.engine.full_state_dict().values())
            )
            lazy.engine.close()
            eager.engine.close()
