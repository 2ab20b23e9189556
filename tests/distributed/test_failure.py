"""One rank's trouble ends all ranks soon, with that rank's error; a slow rank is waited for.

Oracle: the text of the exception that a rank was made to raise, and the processes that are left. Tolerance:
all ranks end within 20 seconds of the trouble. Within a launch the watch looks more often than it does for
users, so that a grid stays short; real processes have its real times.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest, world_size
from tests.launching import TORCHRUN, assert_all_ended, run_script
from tests.recorder import logged
from zero_strategy.comm import watch


class Chain(nn.Module):
    """Three layers of different sizes; `run` is the forward, which a test replaces on one rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.a, self.b, self.c = nn.Linear(8, 12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.run: Callable[[Chain, Tensor], Tensor] = lambda m, x: m.c(m.b(m.a(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).mean()


@contextmanager
def training(stage: int = 3) -> Iterator[tuple[Chain, zs.ZeroEngine, Callable[[], None]]]:
    """A model in training: the engine, and a function that makes one step."""
    model = Chain()
    engine = zs.ZeroEngine(
        model, {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    )
    optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))

    def step() -> None:
        engine.backward(model(torch.ones(2, 8)))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    try:
        yield model, engine, step
    finally:
        engine.close()


def look_often() -> None:
    watch.POLL_S, watch.LONG_WAIT_S = 0.05, 0.5


@distributed(world_size=[2, 3])
def test_ranks_that_have_parted_end_with_the_module_and_the_ranks() -> None:
    look_often()
    forwards: dict[str, tuple[Callable[[Chain, Tensor], Tensor], str]] = {
        "skips a module": (lambda m, x: m.c(m.a(x) @ torch.ones(12, 16)), "bucket 'b."),
        "returns early": (lambda m, x: m.b(m.a(x)), "bucket 'c."),
        "runs a module more": (lambda m, x: m.c(m.b(m.a(x) + m.a(x))), "bucket 'a."),
    }
    for name, (forward, bucket) in forwards.items():
        with subtest(name), training() as (model, _, step):
            if rank() == 1:
                model.run = forward
            began = time.monotonic()
            with expect_error(zs.ShardingError, [bucket, "on rank 1;", "leaf_module"]):
                step()
                step()
            assert time.monotonic() - began < 20


@distributed(world_size=2)
def test_a_call_on_one_rank_only_is_a_parting_too(tmp_path: Path) -> None:
    look_often()
    with training() as (_, engine, _):
        engine.save_checkpoint(tmp_path / "c")
    for name, call in {
        "gather": lambda engine: engine.full_state_dict(),
        "step": lambda engine: engine.optimizers[0].clip_grad_norm_(1.0),
        "load": lambda engine: engine.load_checkpoint(tmp_path / "c"),
        "wait": lambda engine: engine.wait_for_checkpoint(),
    }.items():
        parted = expect_error(zs.ShardingError, ["rank 0", "rank 1"])
        with subtest(name), training() as (_, engine, step), parted:
            if rank() == 1:
                call(engine)
            step()
            step()


@distributed(world_size=2)
def test_torchs_own_barrier_on_one_rank_only_is_a_parting_with_its_line() -> None:
    look_often()
    texts = [
        "rank 1 waits in torch.distributed.barrier(), which rank 0 has not begun",
        "rank 1 at test_failure.py:",
    ]
    with training() as (_, _, step):
        with expect_error(zs.ShardingError, texts):
            if rank() == 1:
                dist.barrier()  # returns when rank 0 has been told and joins in
            step()
        if rank() == 0:
            dist.barrier()


@distributed(world_size=2)
def test_ranks_that_are_slow_in_torchs_own_collectives_are_waited_for() -> None:
    look_often()
    with training() as (_, _, step):
        with subtest("a rank comes late"):
            if rank() == 1:
                time.sleep(2.5)
            dist.barrier()
            step()
        with subtest("one has passed, and waits already in a gather for the other, who comes late"):
            if rank() == 1:
                time.sleep(2.5)
            dist.broadcast(torch.ones(8), src=0)
            step()
        with subtest("in another group"):
            group = dist.new_group()
            if rank() == 1:
                time.sleep(2.5)
            dist.barrier(group=group)
            step()


@distributed(world_size=2)
def test_a_slow_rank_is_waited_for_and_named_in_one_line() -> None:
    look_often()
    watch.REPORT_S = 1.0
    with logged() as lines, training() as (_, _, step):
        if rank() == 1:
            time.sleep(2.5)
        step()
        waited = [line for line in lines if "has waited" in line]
        if rank() == 0:
            assert len(waited) == 1, lines
            assert "Rank 0 has waited 1 s in" in waited[0] and "nobody: [1]" in waited[0]
        else:
            assert not waited
        step()


@distributed(world_size=3)
def test_what_one_rank_fails_by_is_raised_on_the_others_also_in_a_collective() -> None:
    look_often()
    with training() as (model, engine, step):
        if rank() == 1:
            model.run = lambda m, x: m.c(m.b(m.a(x)) * torch.ones(3))
            with pytest.raises(RuntimeError) as info:
                step()
            engine.watch.fail(info.value)  # what a front end does, and sys.excepthook
            with expect_error(zs.ShardingError, ["This rank has failed", "OnExceptionCheckpoint"]):
                engine.full_state_dict()
        else:
            if rank() == 2:
                time.sleep(1.0)  # computes on, and learns of it at its next collective
            texts = ["Rank 1 has failed: RuntimeError: The size of tensor", "Traceback", "in forward"]
            with expect_error(zs.ShardingError, texts):
                step()
                step()


@distributed(world_size=2)
def test_a_run_after_an_error_that_all_ranks_caught_is_a_new_one() -> None:
    look_often()
    with training() as (_, engine, step):
        with subtest("the same error on all ranks"):
            engine.watch.fail(ValueError("caught"))
            time.sleep(0.3)
            engine.watch.forgive()
            time.sleep(0.3)
            step()
        with subtest("an error that ranks agree on is no failure"):
            with expect_error(zs.ConfigError, "been through shard_optimizer") as info:
                engine.shard_optimizer(engine.optimizers[0])
            engine.watch.fail(info.value)
            step()


@distributed(world_size=2)
def test_a_rank_that_has_closed_its_engine_is_not_waited_for() -> None:
    look_often()
    with training() as (_, engine, step):
        if rank() == 1:
            engine.close()
        else:
            with expect_error(
                zs.ShardingError, ["Rank 1 has ended", "(at test_failure.py:", "as many batches"]
            ):
                step()


@distributed(world_size=[1, 2])
def test_engines_leave_no_thread_no_hook_and_no_word_behind() -> None:
    def watching() -> int:
        return sum(thread.name == "zero_strategy.watch" for thread in threading.enumerate())

    hook = sys.excepthook
    with training(), training(1):
        assert watching() == (2 if world_size() > 1 else 0)
    assert watching() == 0
    assert sys.excepthook is hook


@distributed(world_size=1, process_group=False)
def test_without_a_process_group_there_is_nothing_to_watch() -> None:
    with training() as (_, engine, step):
        engine.watch.fail(ValueError("alone"))
        step()
    assert not dist.is_initialized()


# -- real processes --


SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch import nn
import zero_strategy as zs

trouble, rank = sys.argv[1], int(os.environ.get("RANK") or sys.argv[2])
print(f"rank {rank} is {os.getpid()}", flush=True)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
engine = zs.ZeroEngine(model, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
optimizer = engine.shard_optimizer(torch.optim.AdamW(model.parameters()))

def begin():
    if rank == 0 and trouble == "stuck":
        time.sleep(1000)
    if rank == 0 and trouble == "barrier":
        dist.barrier()
    if rank == 1 and trouble != "none":
        print("now", flush=True)
        if trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trouble == "exit":
            sys.exit(0)
        raise ValueError("boom of rank 1")

for number in range(4):
    x = model[0](torch.ones(2, 8))
    if number == 2:
        x.register_hook(lambda grad: begin())
    engine.backward(model[2](model[1](x)).mean())
    optimizer.step()
    optimizer.zero_grad()
"""


def launch(folder: Path, trouble: str, *, torchrun: bool = False):
    script = folder / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    if torchrun:
        return run_script([*TORCHRUN, "2", str(script), trouble])
    return run_script(*([str(script), trouble, str(rank), str(folder / "store")] for rank in range(2)))


@pytest.mark.slow
def test_torchrun_ends_by_an_exception_in_a_backward_with_its_text_on_rank_0(tmp_path: Path) -> None:
    ended = launch(tmp_path, "raise", torchrun=True)
    assert_all_ended(ended, "[rank 0] Rank 1 has failed: ValueError: boom of rank 1")


def test_a_killed_rank_ends_the_other_with_its_number(tmp_path: Path) -> None:
    ended = launch(tmp_path, "kill")
    assert_all_ended(ended, "[rank0]: zero_strategy.errors.ShardingError: The process of rank 1 has died")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ("raise", "ShardingError: Rank 1 has failed: ValueError: boom of rank 1"),
        ("barrier", "[rank 0] Rank 1 has failed: ValueError: boom of rank 1"),
        ("stuck", "This process is ended: it stands in a call that cannot be ended. Rank 1 has failed"),
    ],
)
def test_without_a_launcher_ranks_end_wherever_they_stand(tmp_path: Path, trouble: str, text: str) -> None:
    assert_all_ended(launch(tmp_path, trouble), text)


@pytest.mark.slow
def test_a_rank_that_exits_early_is_named(tmp_path: Path) -> None:
    ended = launch(tmp_path, "exit")
    assert not ended.hung
    assert ended.codes[0] != 0 and ended.seconds < 20, ended.output
    assert "[rank0]: zero_strategy.errors.ShardingError" in ended.output


@pytest.mark.slow
def test_ranks_that_end_at_different_times_say_nothing(tmp_path: Path) -> None:
    ended = launch(tmp_path, "none")
    assert ended.codes == [0, 0], ended.output
    assert "Error" not in ended.output and "failed" not in ended.output, ended.output
