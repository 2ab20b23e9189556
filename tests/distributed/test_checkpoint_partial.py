"""Checkpoints that fit an engine in part: weights alone, other names, other param groups, adapters, frozen.

Oracles: the values before the save and before the load, bit for bit; the uninterrupted run, bit for bit.
Tolerance: none.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.state_support import (
    EXTRA,
    LAYOUTS,
    adamw,
    assert_same,
    build,
    engine_of,
    sharded,
    train,
    whole_state,
)
from tests.harness import distributed, expect_error, rank, run_ranks, subtest
from tests.models import Mlp, inputs
from tests.recorder import logged
from zero_strategy.checkpoint.format import CheckpointReader
from zero_strategy.cli import main


def said(lines: list[str], text: str) -> list[str]:
    """Return the lines with a text; rank 0 alone speaks at the level that is asked for."""
    return [line for line in lines if text in line]


def step(engine: zs.ZeroEngine, optimizer: Any, number: int = 0) -> Tensor:
    """Make one step on this rank's inputs and return the loss."""
    loss = engine.model(inputs(number)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


# -- weights alone -------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_weights_alone_leave_the_optimizer_as_it_is_and_a_step_does_not_undo_them(tmp_path: Path) -> None:
    for saved, loaded in ((LAYOUTS[1], LAYOUTS[3]), (LAYOUTS[4], LAYOUTS[5])):
        with subtest(f"{saved} as {loaded}"):
            engine, optimizer = engine_of(saved)
            train(engine.model, optimizer, 2)
            engine.save_checkpoint(tmp_path / "c", extra=EXTRA)
            engine.save_checkpoint(tmp_path / "light", weights_only=True)
            masters, weights = engine.full_state_dict(dtype=torch.float32), engine.full_state_dict()
            engine.close()
            for name in ("c", "light"):
                other, optimizer = engine_of(loaded, seed=5)
                train(other.model, optimizer, 1)
                before, generator = optimizer.state_dict(), torch.get_rng_state()
                extra = other.load_checkpoint(tmp_path / name, weights_only=True)
                assert_same(extra, EXTRA if name == "c" else None)
                assert_same(other.full_state_dict(dtype=torch.float32), masters)
                assert_same(other.full_state_dict(), weights)
                assert_same(optimizer.state_dict(), before)
                assert torch.equal(torch.get_rng_state(), generator)
                for group in optimizer.param_groups:
                    group["lr"] = 0.0
                train(other.model, optimizer, 1)
                after = other.full_state_dict(dtype=torch.float32)
                params = dict(other.model.named_parameters())
                assert all(torch.equal(after[key], masters[key]) for key in params if key in after)
                other.close()
    with subtest("no optimizer is in it"):
        other, _ = engine_of(LAYOUTS[3])
        with expect_error(zs.CheckpointError, ["0 optimizers", "weights_only=True", "Nothing was loaded"]):
            other.load_checkpoint(tmp_path / "light")


# -- other names ---------------------------------------------------------------------------------------------


class Older(Mlp):
    """Has a part that `Newer` does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.former = nn.Linear(15, 15)
        self.register_buffer("scale", torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.former(super().forward(x)) * self.scale


class Newer(Mlp):
    """Has a new part, and a buffer under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.latter = nn.Linear(15, 15)
        self.register_buffer("gain", torch.tensor([3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.latter(super().forward(x)) * self.gain


@distributed(world_size=2)
def test_names_on_one_side_only_are_refused_or_reported_once(tmp_path: Path) -> None:
    engine = sharded(build(Older), stage=2)
    step(engine, engine.shard_optimizer(torch.optim.AdamW(engine.model.parameters(), lr=1e-2)))
    engine.save_checkpoint(tmp_path / "c")
    there = engine.full_state_dict()
    engine.close()
    other = sharded(build(Newer, seed=5), stage=3)
    optimizer = other.shard_optimizer(torch.optim.AdamW(other.model.parameters(), lr=1e-3))
    here = other.full_state_dict()
    with expect_error(zs.CheckpointError, ["latter.weight", "former.weight", "strict=False"]):
        other.load_checkpoint(tmp_path / "c")
    with logged(logging.INFO) as lines, other.open_checkpoint(tmp_path / "c") as opened:
        loaded = opened.load_all(strict=False)
    assert loaded.missing_keys == ["gain", "latter.weight", "latter.bias"]
    assert sorted(loaded.unexpected_keys) == ["former.bias", "former.weight", "scale"]
    assert loaded.begun_anew == ["latter.weight", "latter.bias"]
    found = said(lines, "latter.weight")
    assert len(found) == (rank() == 0), lines
    assert not found or all(word in found[0] for word in ("3 weights", "3 names", "2 parameters"))
    for name, value in other.full_state_dict().items():
        assert torch.equal(value, here[name] if name in loaded.missing_keys else there[name]), name
    assert optimizer.param_groups[0]["lr"] == 1e-3, "hyper-parameters of other groups are not taken over"
    step(other, optimizer)
    with subtest("a missing buffer alone"):
        newer = sharded(build(Newer), stage=1)
        newer.save_checkpoint(tmp_path / "buffer")
        del newer.model.gain
        newer.model.register_buffer("gain", torch.tensor([1.0]), persistent=False)
        newer.save_checkpoint(tmp_path / "no-buffer")
        again = sharded(build(Newer), stage=1)
        with expect_error(zs.CheckpointError, ["gain", "Nothing was loaded"]):
            again.load_checkpoint(tmp_path / "no-buffer")


@distributed(world_size=2)
def test_the_same_parameters_in_other_param_groups_keep_their_state_by_name(tmp_path: Path) -> None:
    engine, optimizer = engine_of(LAYOUTS[3])
    train(engine.model, optimizer, 2)
    engine.save_checkpoint(tmp_path / "c")
    expected = whole_state(engine)
    by_name = {
        name: expected["optimizers"][0]["state"].get(index)
        for index, name in enumerate(names_of(engine, optimizer))
    }
    engine.close()
    for number in (1, 3):
        with subtest(f"{number} groups, backwards"), logged(logging.INFO) as lines:
            other = sharded(build(seed=5), **LAYOUTS[2])
            params = [param for param in other.model.parameters() if param.requires_grad][::-1]
            groups = [{"params": params[index::number], "lr": 0.5 + index} for index in range(number)]
            optimizer = other.shard_optimizer(torch.optim.AdamW(groups))
            other.load_checkpoint(tmp_path / "c")
            state = whole_state(other)
            assert_same(state["weights"], expected["weights"])
            names = names_of(other, optimizer)
            for index, name in enumerate(names):
                assert_same(state["optimizers"][0]["state"].get(index), by_name[name], name)
            assert [group["lr"] for group in optimizer.param_groups] == [0.5 + i for i in range(number)]
            assert len(said(lines, "other param groups")) == (rank() == 0), lines
            train(other.model, optimizer, 1)
            other.close()
    with subtest("the same groups in another order keep their hyper-parameters too"):
        other = sharded(build(seed=5), **LAYOUTS[1])
        groups = adamw(other.model).param_groups[::-1]
        for group in groups:
            group["params"] = group["params"][::-1]
        optimizer = other.shard_optimizer(torch.optim.AdamW(groups, lr=7.0))
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 7.0
        other.load_checkpoint(tmp_path / "c")
        assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 1e-2]
        assert [group["betas"] for group in optimizer.param_groups] == [(0.8, 0.95), (0.9, 0.999)]


def names_of(engine: zs.ZeroEngine, optimizer: zs.ShardedOptimizer) -> list[str]:
    """Return the names of an optimizer's parameters in its order."""
    names = {id(param): name for name, param in engine.model.named_parameters()}
    return [names[id(param)] for param in optimizer.params()]


@distributed(world_size=2)
def test_parameters_new_in_an_optimizer_begin_anew_if_that_is_asked_for(tmp_path: Path) -> None:
    def engine_over(num_layers: int, kind: Any = torch.optim.AdamW) -> tuple[zs.ZeroEngine, Any]:
        engine = sharded(build(Mlp), stage=2)
        params = [param for layer in engine.model.layers[:num_layers] for param in layer.parameters()]
        return engine, engine.shard_optimizer(kind(params, lr=1e-2))

    engine, optimizer = engine_over(2)
    step(engine, optimizer)
    engine.save_checkpoint(tmp_path / "c")
    for num_layers, texts in ((3, ["2 ('layers.2.weight'", "0 there only"]), (1, ["2 ('layers.1.weight'"])):
        other, optimizer = engine_over(num_layers)
        with subtest(f"{num_layers}"), expect_error(zs.CheckpointError, [*texts, "strict=False"]):
            other.load_checkpoint(tmp_path / "c")
        with other.open_checkpoint(tmp_path / "c") as opened:
            loaded = opened.load_all(strict=False)
        assert loaded.begun_anew == (["layers.2.weight", "layers.2.bias"] if num_layers == 3 else [])
        state = whole_state(other)["optimizers"][0]["state"]
        assert sorted(state) == list(range(2 * min(num_layers, 2)))
        assert all(entry["step"] == 1.0 for entry in state.values())
        step(other, optimizer, 1)
        state = whole_state(other)["optimizers"][0]["state"]
        assert [float(state[i]["step"]) for i in sorted(state)] == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0][
            : 2 * num_layers
        ]
    other, _ = engine_over(2, torch.optim.SGD)
    with subtest("class"), expect_error(zs.CheckpointError, ["SGD", "AdamW", "weights_only=True"]):
        other.load_checkpoint(tmp_path / "c", strict=False)
    other.load_checkpoint(tmp_path / "c", weights_only=True)
    weights = other.full_state_dict()
    with CheckpointReader(tmp_path / "c") as reader:
        for name, value in weights.items():
            assert torch.equal(value, reader.read_tensor(f"model/{name}")), name


# -- adapters and frozen weights -----------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank update that trains, and running statistics."""

    def __init__(self, inner: nn.Linear, rank_numel: int = 3) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Linear(15, rank_numel, bias=False)
        self.up = nn.Linear(rank_numel, 15, bias=False)
        self.register_buffer("mean", torch.zeros(15))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.inner(x - self.mean) + self.up(self.down(x))


def adapted(num_adapters: int = 3, seed: int = 0) -> nn.Module:
    """Return a model with frozen layers, the same for any seed, and adapters around the first of them."""
    model = build(Mlp).requires_grad_(False)
    torch.manual_seed(100 + seed)
    for index in range(num_adapters):
        model.layers[index] = Adapted(model.layers[index])
    return model


@distributed(world_size=2)
def test_adapters_alone_are_saved_and_resume_over_the_frozen_model(tmp_path: Path) -> None:
    def engine_over(model: nn.Module, stage: int) -> tuple[zs.ZeroEngine, zs.ShardedOptimizer]:
        engine = sharded(model, stage=stage, reduce_bucket_size=100)
        params = [param for param in model.parameters() if param.requires_grad]
        return engine, engine.shard_optimizer(torch.optim.AdamW(params, lr=1e-2))

    for saved_at, loaded_at in ((2, 3), (3, 2)):
        with subtest(f"stage {saved_at} to {loaded_at}"):
            engine, optimizer = engine_over(adapted(), saved_at)
            for number in range(2):
                step(engine, optimizer, number)
            folder = tmp_path / str(saved_at)
            engine.save_checkpoint(folder, trainable_only=True)
            losses = [step(engine, optimizer, number) for number in range(2, 4)]
            expected = whole_state(engine)
            frozen = [name for name, p in engine.model.named_parameters() if not p.requires_grad]
            with CheckpointReader(folder) as reader:
                assert sorted(reader.manifest.frozen_left_out) == sorted(frozen)
                assert not any(f"model/{name}" in reader.manifest.tensors for name in frozen)
                assert "layers.0.mean" in reader.manifest.buffers
            engine.close()
            other, optimizer = engine_over(adapted(seed=5), loaded_at)
            with logged(logging.INFO) as lines:
                other.load_checkpoint(folder)
            found = said(lines, "left out")
            assert len(found) == (rank() == 0) and all(f"{len(frozen)} frozen" in line for line in found), (
                lines
            )
            assert_same([step(other, optimizer, number) for number in range(2, 4)], losses)
            assert_same(whole_state(other), expected)
            other.close()
    with subtest("an adapter that was not saved"):
        folder = tmp_path / "2"
        small, optimizer = engine_over(adapted(2), 2)
        small.save_checkpoint(tmp_path / "two", trainable_only=True)
        other, _ = engine_over(adapted(3), 3)
        before = whole_state(other)
        with expect_error(zs.CheckpointError, ["'layers.2.down.weight'", "not in it", "Nothing was loaded"]):
            other.load_checkpoint(tmp_path / "two")
        assert_same(whole_state(other), before)
    with subtest("what trains here and was left out as frozen"):
        other = sharded(adapted().requires_grad_(True), stage=2)
        with expect_error(zs.CheckpointError, ["layers.0.inner.weight", "frozen, and left out"]):
            other.load_checkpoint(folder)
        with other.open_checkpoint(folder) as opened:
            assert sorted(opened.load_all(strict=False).missing_keys) == sorted(frozen)


@distributed(world_size=2)
def test_frozen_weights_and_buffers_changed_by_hand_are_restored_into_a_fresh_build(tmp_path: Path) -> None:
    def frozen_in_part(seed: int) -> nn.Module:
        model = build(Newer, seed)
        model.layers[1].requires_grad_(False)
        return model

    engine = sharded(frozen_in_part(0), stage=3)
    trainable = [param for param in engine.model.parameters() if param.requires_grad]
    optimizer = engine.shard_optimizer(torch.optim.AdamW(trainable))
    with engine.unsharded_params(writeback=True), torch.no_grad():
        engine.model.layers[1].weight.fill_(0.25)
    engine.model.gain.fill_(7.0)
    step(engine, optimizer)
    engine.save_checkpoint(tmp_path / "c")
    expected = engine.full_state_dict()
    other = sharded(frozen_in_part(5), stage=3)
    trainable = [param for param in other.model.parameters() if param.requires_grad]
    other.shard_optimizer(torch.optim.AdamW(trainable))
    other.load_checkpoint(tmp_path / "c")
    found = other.full_state_dict()
    assert_same(found, expected)
    assert rank() != 0 or (bool((found["layers.1.weight"] == 0.25).all()) and found["gain"] == 7.0)


# -- export --------------------------------------------------------------------------------------------------


def save_with_groups(folder: Path) -> None:
    """Save at every stage, with one, two and five param groups, of which one is empty."""
    for stage, num_groups in ((1, 1), (2, 2), (3, 5)):
        engine = sharded(build(), stage=stage, reduce_bucket_size=300)
        params = [param for param in engine.model.parameters() if param.requires_grad]
        groups = [{"params": params[index :: num_groups - 1 or 1]} for index in range(max(1, num_groups - 1))]
        groups += [{"params": []}] if num_groups > 1 else []
        optimizer = engine.shard_optimizer(torch.optim.AdamW(groups, lr=1e-2))
        assert len(optimizer.param_groups) == num_groups
        train(engine.model, optimizer, 2)
        engine.save_checkpoint(folder / str(stage))
        whole = whole_state(engine)
        if rank() == 0:
            torch.save(whole["weights"], folder / f"{stage}.pt")
        train(engine.model, optimizer, 1)
        engine.load_checkpoint(folder / str(stage))
        assert_same(whole_state(engine), whole)
        engine.close()


def test_an_export_has_every_name_of_two_tied_pairs_with_any_number_of_param_groups(tmp_path: Path) -> None:
    """The moments are not read: they are overwritten before, so that a reader of them would say so."""
    run_ranks(save_with_groups, 2, {"folder": tmp_path})
    for stage in (1, 2, 3):
        folder, out = tmp_path / str(stage), tmp_path / f"out-{stage}"
        overwrite_moments(folder)
        with subtest(f"stage {stage}"):
            assert main(["consolidate", str(folder), str(out)]) == 0
        model = build(seed=5)
        model.counting = nn.Identity()
        missing, unexpected = safetensors.torch.load_model(model, out / "model.safetensors", strict=True)
        assert (missing, unexpected) == (set(), [])
        expected = torch.load(tmp_path / f"{stage}.pt", weights_only=False)
        for name, value in model.state_dict().items():
            assert torch.equal(value, expected[name]), name
        assert model.head.weight is model.embed.weight and model.right.weight is model.left.weight
        assert not torch.equal(model.left.weight[:11], model.embed.weight)


def overwrite_moments(folder: Path) -> None:
    """Overwrite every byte of optimizer state in the files of a checkpoint."""
    with CheckpointReader(folder) as reader:
        for name, entry in reader.manifest.tensors.items():
            for piece in entry.pieces if name.startswith("optim/") else ():
                file = reader.manifest.open_file(folder, piece.file)
                offset = file.tensors[piece.key].offset_bytes + piece.file_start * entry.torch_dtype.itemsize
                file.close()
                with open(folder / piece.file, "r+b") as raw:
                    raw.seek(offset)
                    raw.write(b"\xff" * (piece.numel * entry.torch_dtype.itemsize))
