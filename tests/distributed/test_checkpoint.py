"""Checkpoints of a running engine: written sharded, read at any world size, stage and bucket size.

Oracles: the values before the save, gathered whole on rank 0, bit for bit; the uninterrupted run, bit for bit
at the same world size, and in fp32 within 1e-5 of a tensor's norm at another one, where gradients are added
in another order. In bf16 that order changes rounded gradients, and Adam divides them by their own size, so no
useful bound holds: there the run that goes on at this world size from the whole state, without a checkpoint,
bit for bit. Checkpoints saved again after a load must hold the same tensors (fp32 masters included).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_strategy as zs
from tests.distributed.state_support import (
    EXTRA,
    LAYOUTS,
    adamw,
    assert_same,
    build,
    engine_of,
    save_alone,
    sharded,
    train,
    whole_state,
)
from tests.harness import distributed, rank, run_ranks, subtest, world_size
from zero_strategy.checkpoint.format import CheckpointReader


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
        name = f"{world_size()}-{number}"
        with subtest(f"save {layout}"):
            engine, optimizer = engine_of(layout)
            train(engine.model, optimizer, 2)
            optimizer.param_groups[0]["lr"] *= 0.5
            engine.save_checkpoint(folder / name, extra=EXTRA if rank() == 0 else None)
            at_save = whole_state(engine)
            masters = engine.full_state_dict(dtype=torch.float32)
            losses = train(engine.model, optimizer, 3, first=2)
            after = whole_state(engine)["weights"]
            if rank() == 0:
                torch.save([at_save, masters, after], folder / f"{name}.pt")
            torch.save(losses, folder / f"{name}-losses-{rank()}.pt")
            engine.close()


def go_on_from_whole_state(whole: dict[str, Any], masters: dict[str, Tensor], bf16: Any) -> list[Any]:
    """Return what three steps from a whole state come to at this world size: losses and weights."""
    engine, optimizer = engine_of({"stage": 2, "bf16": bf16}, seed=6)
    engine.load_full_state_dict(masters)
    optimizer.load_state_dict(whole["optimizers"][0])
    outcome = [train(engine.model, optimizer, 3, first=2), whole_state(engine)["weights"]]
    engine.close()
    return outcome


def load_all(folder: Path, loads: list[tuple[int, int, dict[str, Any]]]) -> None:
    """Load checkpoints, each by the world size and the layout it was saved at, in another layout."""
    twins: dict[str, list[Any]] = {}
    for saved_at, number, other in loads:
        layout, name = LAYOUTS[number], f"{saved_at}-{number}"
        with subtest(f"load {layout} of {saved_at} ranks as {other}"):
            engine, optimizer = engine_of(other, seed=5)
            train(engine.model, optimizer, 1)  # state that a load must replace
            extra = engine.load_checkpoint(folder / name)
            assert_same(extra, EXTRA)
            at_save, masters, after = torch.load(folder / f"{name}.pt", weights_only=False)
            assert_same(whole_state(engine), at_save)
            again = folder / f"{name}-again-{world_size()}-{other['stage']}-{other['reduce_bucket_size']}"
            engine.save_checkpoint(again)
            before, saved_again = stored(folder / name), stored(again)
            names = [name for name in before if not name.startswith(("extra/", "rng/"))]
            assert_same({n: saved_again[n] for n in names}, {n: before[n] for n in names})
            losses = train(engine.model, optimizer, 3, first=2)
            weights = whole_state(engine)["weights"]
            if world_size() == saved_at:  # neither the stage nor the bucket size changes a bit
                assert_same(losses, torch.load(folder / f"{name}-losses-{rank()}.pt"))
                assert_same(weights, after)
            elif "bf16" in layout:
                if name not in twins:
                    twins[name] = go_on_from_whole_state(at_save, masters, layout["bf16"])
                assert_same([losses, weights], twins[name])
            else:
                del weights["counting._extra_state"]
                assert_close(weights, after, 1e-5)
            engine.close()


def shifted(saved_at: int, number: int, shift: int) -> tuple[int, int, dict[str, Any]]:
    """Return what `load_all` takes: a checkpoint, and the layout `shift` places on in the same precision."""
    precision = LAYOUTS[number].get("bf16", {"enabled": False})
    return saved_at, number, {**LAYOUTS[(number + shift) % len(LAYOUTS)], "bf16": precision}


@pytest.mark.parametrize(
    ("saved_at", "loaded_at", "numbers"),
    [
        (2, [2, 3, 1], [0, 1, 2, 3, 4, 5]),
        pytest.param(3, [4], [0, 2, 4], marks=pytest.mark.slow),
        pytest.param(4, [3], [1, 3, 5], marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_a_checkpoint_loads_at_any_world_size_stage_and_bucket_size(
    saved_at: int, loaded_at: list[int], numbers: list[int], tmp_path: Path
) -> None:
    run_ranks(save_all, saved_at, {"folder": tmp_path, "numbers": numbers})
    for shift, world in enumerate(loaded_at, start=saved_at - 2):
        loads = [shifted(saved_at, number, shift) for number in numbers]
        run_ranks(load_all, world, {"folder": tmp_path, "loads": loads}, process_group=world > 1)


OTHER_SIZES = {1: 1_000, 2: 300, 3: 100}  # the bucket sizes to load at; each stage was saved with another


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_stage_at_1_2_and_4_ranks_loads_at_every_other_in_fp32_and_in_bf16(tmp_path: Path) -> None:
    """The whole matrix: 9 ways to save, 9 ways to load each, in two precisions."""
    numbers = [number for number, layout in enumerate(LAYOUTS) if layout["stage"]]
    assert sorted((LAYOUTS[n]["stage"], "bf16" in LAYOUTS[n]) for n in numbers) == [
        (stage, is_bf16) for stage in (1, 2, 3) for is_bf16 in (False, True)
    ]
    worlds = (1, 2, 4)
    for world in worlds:
        arguments = {"folder": tmp_path, "numbers": numbers}
        run_ranks(save_all, world, arguments, timeout=120, process_group=world > 1)
    loads = [
        (
            saved_at,
            number,
            {
                "stage": stage,
                "reduce_bucket_size": size,
                "bf16": LAYOUTS[number].get("bf16", {"enabled": False}),
            },
        )
        for saved_at in worlds
        for number in numbers
        for stage, size in OTHER_SIZES.items()
    ]
    assert len(loads) == 2 * 27
    for world in worlds:
        arguments = {"folder": tmp_path, "loads": loads}
        run_ranks(load_all, world, arguments, timeout=400, process_group=world > 1)


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


@distributed(world_size=2)
def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    """As torch.set_default_device("cuda") sets it; with "meta" a tensor made without a device shows."""
    engine, optimizer = engine_of(LAYOUTS[4])
    train(engine.model, optimizer, 2)
    expected = whole_state(engine)
    with torch.device("meta"):
        engine.save_checkpoint(tmp_path / "c", extra={"number": 1})
        assert engine.load_checkpoint(tmp_path / "c") == {"number": 1}
        state, weights = optimizer.state_dict(), engine.full_state_dict()
        optimizer.load_state_dict(state)
        engine.load_full_state_dict(weights)
    assert_same(whole_state(engine), expected)
