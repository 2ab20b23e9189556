"""Checkpoints of a running engine: written sharded, read at any world size, stage and bucket size.

Oracles: the values before the save, gathered whole on rank 0, bit for bit; the uninterrupted run, bit for bit
in the same layout, and within 1e-5 of a tensor's norm at another world size, where gradients are added in
another order. Checkpoints saved again after a load must hold the same tensors (fp32 masters included).
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.state_support import (
    adamw,
    assert_same,
    build,
    sharded,
    train,
)
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.models import Mlp
from zero_strategy.checkpoint.format import MANIFEST_NAME, CheckpointReader
from zero_strategy.cli import main

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
]


def engine_of(layout: dict[str, Any], seed: int = 0) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
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


def stored(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, masters and all."""
    with CheckpointReader(folder) as reader:
        return {name: reader.read_tensor(name) for name in sorted(reader.manifest.tensors)}


def assert_close(left: dict[str, Any], right: dict[str, Any], tolerance: float) -> None:
    for name, value in left.items():
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            distance = (value.double() - right[name].double()).norm() / value.double().norm().clamp(min=1e-30)
            assert distance <= tolerance, f"{name}: {distance:.1e} > {tolerance:.1e}"


# -- other layouts -------------------------------------------------------------------------------------------


def save_all(folder: Path, numbers: list[int]) -> None:
    """Save one checkpoint for each of some layouts, and beside it what it holds and how the run goes on."""
    for number in numbers:
        layout = LAYOUTS[number]
        with subtest(f"save {layout}"):
            engine, optimizer = engine_of(layout)
            train(engine.model, optimizer, 2)
            optimizer.param_groups[0]["lr"] *= 0.5
            engine.save_checkpoint(folder / str(number), extra=EXTRA if rank() == 0 else None)
            at_save = whole_state(engine)
            losses = train(engine.model, optimizer, 3, first=2)
            if rank() == 0:
                torch.save([at_save, whole_state(engine)["weights"]], folder / f"{number}.pt")
            else:
                whole_state(engine)
            torch.save(losses, folder / f"{number}-losses-{rank()}.pt")
            engine.close()


def load_all(folder: Path, numbers: list[int], shift: int, same_world: bool) -> None:
    """Load each checkpoint in the layout `shift` places on, and compare."""
    for number in numbers:
        layout = LAYOUTS[number]
        other = {**LAYOUTS[(number + shift) % len(LAYOUTS)], "bf16": layout.get("bf16", {"enabled": False})}
        with subtest(f"load {layout} as {other}"):
            engine, optimizer = engine_of(other, seed=5)
            train(engine.model, optimizer, 1)  # state that a load must replace
            extra = engine.load_checkpoint(folder / str(number))
            assert_same(extra, EXTRA)
            at_save, after = torch.load(folder / f"{number}.pt", weights_only=False)
            assert_same(whole_state(engine), at_save)
            again = folder / f"{number}-again-{shift}"
            engine.save_checkpoint(again)
            before, saved_again = stored(folder / str(number)), stored(again)
            names = [name for name in before if not name.startswith("extra/")]
            assert_same({n: saved_again[n] for n in names}, {n: before[n] for n in names})
            losses = train(engine.model, optimizer, 3, first=2)
            weights = whole_state(engine)["weights"]
            if shift == 0 and same_world:
                assert_same(losses, torch.load(folder / f"{number}-losses-{rank()}.pt"))
                assert_same(weights, after)
            elif not layout.get("bf16"):
                del weights["counting._extra_state"]
                assert_close(weights, after, 1e-5)
            engine.close()


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "numbers"),
    [(2, [2, 3, 1], [0, 1, 2, 3, 4, 5]), (3, [4], [0, 2, 4]), (4, [3], [1, 3, 5])],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_a_checkpoint_loads_at_any_world_size_stage_and_bucket_size(
    saved_at: int, loaded_at: list[int], numbers: list[int], tmp_path: Path
) -> None:
    run_ranks(save_all, saved_at, {"folder": tmp_path, "numbers": numbers})
    for shift, world in enumerate(loaded_at, start=saved_at - 2):
        arguments = {"folder": tmp_path, "numbers": numbers, "shift": shift, "same_world": world == saved_at}
        run_ranks(load_all, world, arguments, process_group=world > 1)


def save_alone(folder: Path) -> None:
    for layout in LAYOUTS[3:5]:
        engine, optimizer = engine_of(layout)
        train(engine.model, optimizer, 2)
        engine.save_checkpoint(folder / str(len(layout)), extra=EXTRA)
        torch.save(whole_state(engine), folder / f"{len(layout)}.pt")


def load_on_three(folder: Path) -> None:
    for layout in LAYOUTS[3:5]:
        engine, _ = engine_of({**layout, "stage": 2}, seed=5)
        assert_same(engine.load_checkpoint(folder / str(len(layout))), EXTRA)
        assert_same(whole_state(engine), torch.load(folder / f"{len(layout)}.pt", weights_only=False))


def test_a_checkpoint_of_one_process_without_a_group_loads_on_three_ranks(tmp_path: Path) -> None:
    run_ranks(save_alone, 1, {"folder": tmp_path}, process_group=False)
    run_ranks(load_on_three, 3, {"folder": tmp_path})


# -- what is kept --------------------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """A user's optimizer whose state has plain Python values beside a tensor."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("average", torch.zeros_like(param))
                    state["count"], state["note"] = state.get("count", 0) + 1, None
                    state["average"].lerp_(param.grad, 1 - group["betas"][0])
                    param.sub_(state["average"].sign(), alpha=group["lr"] / state["count"])


@distributed(world_size=2)
def test_every_elementwise_optimizer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    optimizers: dict[str, Any] = {
        name: getattr(torch.optim, name)
        for name in ("SGD", "Adam", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "ASGD")
    }
    optimizers["Lion"] = Lion
    for name, kind in optimizers.items():
        options = {"SGD": {"momentum": 0.9, "nesterov": True}, "Adam": {"amsgrad": True}}.get(name, {})
        with subtest(name):
            ends = []
            for seed in (0, 5):
                engine = sharded(build(seed=seed), stage=3, reduce_bucket_size=300)
                trainable = [p for p in engine.model.parameters() if p.requires_grad]
                optimizer = engine.shard_optimizer(kind(trainable, lr=1e-3, **options))
                if seed == 0:
                    train(engine.model, optimizer, 2)
                    engine.save_checkpoint(tmp_path / name)
                    saved = states_of(optimizer)
                else:
                    engine.load_checkpoint(tmp_path / name)
                    assert_same(states_of(optimizer), saved)
                losses = train(engine.model, optimizer, 3, first=2)
                ends.append([losses, whole_state(engine)])
                engine.close()
            assert_same(ends[1], ends[0])


def states_of(optimizer: zs.ShardedOptimizer) -> dict[tuple[str, int, str], Any]:
    return {
        (entry.fqn, entry.piece.param_start, entry.key): copy.deepcopy(entry.value)
        for entry in optimizer.slice_states()
    }


@distributed(world_size=3)
def test_several_optimizers_with_their_own_groups_and_schedulers_are_kept(tmp_path: Path) -> None:
    ends = []
    for seed in (0, 5):
        engine = sharded(build(seed=seed), stage=2, reduce_bucket_size=1_000)
        blocks = [p for p in engine.model.blocks.parameters() if p.requires_grad]
        others = [p for n, p in engine.model.named_parameters() if p.requires_grad and "blocks" not in n]
        first = engine.shard_optimizer(
            torch.optim.AdamW(
                [{"params": blocks[:3], "betas": (0.5, 0.6)}, {"params": blocks[3:], "lr": 3e-3}]
            )
        )
        second = engine.shard_optimizer(torch.optim.SGD(others, lr=0.1, momentum=0.9))
        scheduler = torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5)

        class Both:
            """Steps both, and the scheduler of the first."""

            def step(self) -> None:
                first.step()  # noqa: B023
                second.step()  # noqa: B023
                scheduler.step()  # noqa: B023

            def zero_grad(self) -> None:
                engine.zero_grad()  # noqa: B023

        if seed == 0:
            train(engine.model, Both(), 2)
            engine.save_checkpoint(tmp_path / "both", extra={"scheduler": scheduler.state_dict()})
        else:
            extra = engine.load_checkpoint(tmp_path / "both")
            scheduler.load_state_dict(extra["scheduler"])
            assert [group["lr"] for group in first.param_groups] == [2.5e-4, 7.5e-4]
            assert first.param_groups[0]["betas"] == (0.5, 0.6)
            assert first.param_groups[0]["initial_lr"] == 1e-3
        train(engine.model, Both(), 2, first=2)
        ends.append(whole_state(engine))
        engine.close()
    assert_same(ends[1], ends[0])


@distributed(world_size=2)
def test_a_checkpoint_before_the_first_step_and_before_an_optimizer(tmp_path: Path) -> None:
    for layout in (LAYOUTS[0], LAYOUTS[3], LAYOUTS[4]):
        with subtest(f"{layout}"):
            ends = []
            engine = sharded(build(), **layout)
            engine.save_checkpoint(tmp_path / "no-optimizer")
            optimizer = engine.shard_optimizer(adamw(engine.model))
            engine.save_checkpoint(tmp_path / "no-step")
            train(engine.model, optimizer, 2)
            ends.append(whole_state(engine))
            for name in ("no-optimizer", "no-step"):
                engine = sharded(build(seed=5), **layout)
                if name == "no-optimizer":
                    engine.load_checkpoint(tmp_path / name)
                    optimizer = engine.shard_optimizer(adamw(engine.model))
                else:
                    optimizer = engine.shard_optimizer(adamw(engine.model))
                    train(engine.model, optimizer, 1)
                    engine.load_checkpoint(tmp_path / name)
                    assert not list(optimizer.slice_states()), "what was trained before the load is forgotten"
                train(engine.model, optimizer, 2)
                ends.append(whole_state(engine))
            for end in ends[1:]:
                assert_same(end, ends[0])


@distributed(world_size=2)
def test_unused_frozen_and_buffers_are_stored_as_what_they_are(tmp_path: Path) -> None:
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 2)
    engine.save_checkpoint(tmp_path / "c")
    with CheckpointReader(tmp_path / "c") as reader:
        manifest = reader.manifest
        assert not manifest.params["blocks.0.scale"].trainable
        assert manifest.params["unused"].trainable
        assert not any("unused" in name for name in manifest.tensors if name.startswith("optim/"))
        assert not any("scale" in name for name in manifest.tensors if name.startswith("optim/"))
        assert manifest.params["embed.weight"].aliases == ("head.weight",)
        assert manifest.params["left.weight"].aliases == ("right.weight",)
        assert manifest.params["empty"].shape == (0, 3)
        assert manifest.params["temperature"].shape == ()
        assert set(manifest.buffers) == {"bias_table", "num_batches", "average"}
        assert int(reader.read_tensor("model/num_batches")) == 2
        assert manifest.stage == 3 and manifest.world_size == 2


@distributed(world_size=2)
def test_buffers_and_extra_state_of_modules_are_loaded_on_every_rank(tmp_path: Path) -> None:
    engine, optimizer = engine_of(LAYOUTS[2])
    train(engine.model, optimizer, 2)
    engine.model.counting.names.append("later")
    engine.save_checkpoint(tmp_path / "c", extra=EXTRA)
    other, _ = engine_of(LAYOUTS[3], seed=5)
    scratch = other.model.scratch.clone()
    assert_same(other.load_checkpoint(tmp_path / "c"), EXTRA)
    assert int(other.model.num_batches) == 2
    assert torch.equal(other.model.average, engine.model.average)
    assert torch.equal(other.model.scratch, scratch)
    assert other.model.counting.get_extra_state() == {"num_calls": 2, "names": ["start", "later"]}


@distributed(world_size=2)
def test_a_load_between_forward_and_step_replaces_what_is_whole(tmp_path: Path) -> None:
    """At stage 3 the root stays whole from its forward on; a load must reach those values too."""
    engine, optimizer = engine_of({**LAYOUTS[3], "stage3_param_persistence_threshold": 40})
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(tmp_path / "c")
    before = whole_state(engine)
    train(engine.model, optimizer, 2)
    engine.model(torch.zeros(2, 5, dtype=torch.int64))
    engine.load_checkpoint(tmp_path / "c")
    assert_same(whole_state(engine)["weights"].keys(), before["weights"].keys())
    with engine.unsharded_params():
        for name, param in engine.model.named_parameters():
            assert torch.equal(param, before["weights"][name]), name


# -- on disk -------------------------------------------------------------------------------------------------


@distributed(world_size=[2, 4])
def test_a_checkpoint_takes_no_more_than_its_tensors(tmp_path: Path) -> None:
    for layout in ({"stage": 0}, {"stage": 3}, {"stage": 2, **BF16}):
        with subtest(f"{layout}"):
            torch.manual_seed(0)
            engine = sharded(Mlp(depth=4, width=256), **layout)
            optimizer = engine.shard_optimizer(torch.optim.AdamW(engine.model.parameters()))
            inputs = torch.randn(2, 256, dtype=next(engine.model.parameters()).dtype)
            engine.model(inputs).sum().backward()
            optimizer.step()
            engine.save_checkpoint(tmp_path / "c")
            psi = sum(param.numel() for param in engine.model.parameters())
            found = sum(path.stat().st_size for path in (tmp_path / "c").iterdir())
            # fp32 weights (or masters) and two fp32 moments; nothing twice, no padding.
            assert 12 * psi <= found <= 1.05 * 12 * psi
            engine.close()


@distributed(world_size=2)
def test_saving_twice_into_a_folder_leaves_the_second_checkpoint_only(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    engine, optimizer = engine_of(LAYOUTS[1])
    engine.save_checkpoint(folder, extra={"number": 1})
    first = {path.name for path in folder.iterdir()}
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 2})
    second = {path.name for path in folder.iterdir()}
    assert len(second) == 3 and first & second == {MANIFEST_NAME}
    expected = whole_state(engine)
    other, _ = engine_of(LAYOUTS[3], seed=5)
    assert other.load_checkpoint(folder) == {"number": 2}
    assert_same(whole_state(other), expected)


def save_until_killed(folder: Path, delay_s: float) -> None:
    """Save over and over; rank 1 is killed after a while, wherever it is then, and rank 0 must notice."""
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 1})
    expected = whole_state(engine)
    if rank() == 0:
        torch.save(expected, folder.parent / "expected.pt")
    else:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, delay_s)
    with pytest.raises(zs.ZeroError):
        while True:
            engine.save_checkpoint(folder, extra={"number": 1})


def load_what_is_left(folder: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1], seed=5)
    assert engine.load_checkpoint(folder) == {"number": 1}
    assert_same(whole_state(engine), torch.load(folder.parent / "expected.pt", weights_only=False))
    engine.save_checkpoint(folder, extra={"number": 3})
    dist.barrier()
    assert len(list(folder.iterdir())) == 3, "what the killed save left is removed by the next one"


@pytest.mark.parametrize("delay_s", [0.02, 0.1])
def test_a_rank_killed_while_saving_leaves_a_checkpoint_that_loads(delay_s: float, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    with pytest.raises(AssertionError, match="exit code -9"):
        run_ranks(save_until_killed, 2, {"folder": folder, "delay_s": delay_s})
    run_ranks(load_what_is_left, 2, {"folder": folder})


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as a full disk would."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


@distributed(world_size=3)
def test_a_rank_that_cannot_write_fails_the_save_on_all_ranks_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 1)
    engine.save_checkpoint(folder, extra={"number": 1})
    expected = whole_state(engine)
    before = sorted(path.name for path in folder.iterdir())
    train(engine.model, optimizer, 1)
    for broken in (0, 1, 2):
        with subtest(f"rank {broken}"):
            limit = file_size_limit(5_000) if rank() == broken else contextlib.nullcontext()
            start = time.monotonic()
            with limit, expect_error(zs.CheckpointError, f"[rank {broken}]") as info:
                engine.save_checkpoint(folder, extra={"number": 2})
            assert time.monotonic() - start < 10
            assert "too large" in str(info.value) or "space" in str(info.value)
            dist.barrier()
            assert sorted(path.name for path in folder.iterdir()) == before
    other, _ = engine_of(LAYOUTS[1], seed=5)
    assert other.load_checkpoint(folder) == {"number": 1}
    assert_same(whole_state(other), expected)
    engine.save_checkpoint(folder, extra={"number": 2})
    assert other.load_checkpoint(folder) == {"number": 2}


@distributed(world_size=2)
def test_a_file_where_the_folder_should_be_fails_the_save_on_all_ranks(tmp_path: Path) -> None:
    engine, _ = engine_of(LAYOUTS[1])
    if rank() == 0:
        (tmp_path / "taken").write_text("mine")
    dist.barrier()
    for path in (tmp_path / "taken", tmp_path / "taken" / "below"):
        with subtest(path.name), expect_error(zs.CheckpointError, ["[rank 0]", "taken", "another path"]):
            engine.save_checkpoint(path)
    assert (tmp_path / "taken").read_text() == "mine"


@distributed(world_size=2)
def test_extra_that_cannot_be_stored_is_refused_on_all_ranks_before_anything_is_written(
    tmp_path: Path,
) -> None:
    engine, optimizer = engine_of(LAYOUTS[1])
    with expect_error(zs.CheckpointError, ["[rank 0]", 'extra["a"][1]', "pickle"]):
        engine.save_checkpoint(tmp_path / "c", extra={"a": [1, object()]})
    optimizer.param_groups[0]["hook"] = print
    with expect_error(zs.CheckpointError, ["'hook'", "pickle"]):
        engine.save_checkpoint(tmp_path / "c")
    dist.barrier()
    assert not (tmp_path / "c" / MANIFEST_NAME).exists()
    assert not list((tmp_path / "c").glob("rank-*")) if (tmp_path / "c").exists() else True


# -- consolidation -------------------------------------------------------------------------------------------


def save_for_consolidation(folder: Path) -> None:
    for name, layout in (("fp32", LAYOUTS[3]), ("bf16", LAYOUTS[4])):
        engine, optimizer = engine_of(layout)
        train(engine.model, optimizer, 2)
        engine.save_checkpoint(folder / name)
        whole = whole_state(engine)["weights"]
        if rank() == 0:
            torch.save(whole, folder / f"{name}.pt")


def test_a_consolidated_checkpoint_loads_strictly_into_the_plain_model(tmp_path: Path) -> None:
    run_ranks(save_for_consolidation, 3, {"folder": tmp_path})
    for name in ("fp32", "bf16"):
        assert main(["consolidate", str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 0
        found = safetensors.torch.load_file(tmp_path / f"{name}-out" / "model.safetensors")
        expected = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        tensors = {key: value for key, value in expected.items() if isinstance(value, Tensor)}
        aliases = {"head.weight": "embed.weight", "right.weight": "left.weight"}
        assert_same({key: found[aliases.get(key, key)] for key in tensors}, tensors)
        model = build()
        model.counting = nn.Identity()
        missing, unexpected = safetensors.torch.load_model(
            model, tmp_path / f"{name}-out" / "model.safetensors", strict=True
        )
        assert (missing, unexpected) == (set(), [])
        for key, value in model.state_dict().items():
            assert torch.equal(value, tensors[key].to(value.dtype)), key


def test_a_consolidated_bf16_checkpoint_can_give_its_fp32_masters(tmp_path: Path) -> None:
    run_ranks(save_for_consolidation, 2, {"folder": tmp_path})
    assert main(["consolidate", str(tmp_path / "bf16"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    rounded = torch.load(tmp_path / "bf16.pt", weights_only=False)
    master = found["shared.weight"]
    assert master.dtype == torch.float32
    assert torch.equal(master.bfloat16(), rounded["shared.weight"])
    assert not torch.equal(master, rounded["shared.weight"].float())


def test_the_manifest_names_what_a_reader_needs(tmp_path: Path) -> None:
    run_ranks(save_alone, 1, {"folder": tmp_path}, process_group=False)
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    document = json.loads((folder / MANIFEST_NAME).read_text())
    optimizer = document["optimizers"][0]
    assert optimizer["class"] == "AdamW"
    assert [group["betas"] for group in optimizer["param_groups"]] == [[0.9, 0.999], [0.8, 0.95]]
    assert "embed.weight" in optimizer["param_groups"][0]["params"]
    assert main(["inspect", str(folder), "--verify"]) == 0
    assert os.listdir(folder)
