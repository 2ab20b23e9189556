"""fabric.save and fabric.load on two ranks: one plain file, written and read by any strategy, or a folder.

Oracle: the file that Fabric's own DDPStrategy writes after the same training, entry for entry, and a run that
was not interrupted. Tolerance 0: two ranks, one reduction per step.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.fabric_support import adamw, ddp, make_fabric, new_net, train, whole, zero
from tests.integrations.lightning_support import assert_same_weights


def new_state(strategy: Any, seed: int = 7, **keywords: Any) -> tuple[Any, dict[str, Any]]:
    fabric = make_fabric(strategy, **keywords)
    net = new_net(seed)
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, scheduler = fabric.setup(net, optimizer, scheduler=scheduler)
    return fabric, {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def go_on(fabric: Any, state: dict[str, Any]) -> dict[str, Tensor]:
    train(fabric, state["model"], state["optimizer"], state["scheduler"])
    state["step"] += 4
    return whole(fabric, state["model"])


def save(path: Path, strategy: Any, **keywords: Any) -> dict[str, Tensor]:
    """Train, save, train on; return the weights at the end."""
    fabric, state = new_state(strategy, **keywords)
    go_on(fabric, state)
    fabric.save(path, state)
    return go_on(fabric, state)


@distributed(world_size=2)
def test_a_file_goes_between_every_stage_and_ddp(tmp_path: Path) -> None:
    with subtest("ddp"):
        expected = save(tmp_path / "ddp", ddp())
    theirs = torch.load(tmp_path / "ddp", weights_only=True)
    for stage in (1, 2, 3):
        with subtest(f"written at stage {stage}"):
            assert_same_weights(save(tmp_path / str(stage), zero(stage)), expected)
            ours = torch.load(tmp_path / str(stage), weights_only=True)
            assert ours.keys() == theirs.keys() and ours["step"] == 4
            assert list(ours["model"]) == list(theirs["model"])
            assert all(torch.equal(value, ours["model"][key]) for key, value in theirs["model"].items())
            assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
            for index, entry in theirs["optimizer"]["state"].items():
                for key, value in entry.items():
                    assert torch.equal(value, ours["optimizer"]["state"][index][key]), (index, key)
    for source, strategy in [
        ("ddp", zero(1)),
        ("ddp", zero(3)),
        ("1", zero(3)),
        ("3", zero(2)),
        ("3", ddp()),
    ]:
        with subtest(f"{source} into {type(strategy).__name__}"):
            fabric, state = new_state(strategy, seed=1)
            assert fabric.load(tmp_path / source, state) == {}
            assert state["step"] == 4 and state["scheduler"].last_epoch == 4
            assert_same_weights(go_on(fabric, state), expected)


@distributed(world_size=2)
def test_masters_of_16_bit_weights_are_in_the_file(tmp_path: Path) -> None:
    for stage, other in ((1, 3), (3, 2)):
        with subtest(f"stage {stage} into {other}"):
            expected = save(tmp_path / str(stage), zero(stage), precision="bf16-true")
            fabric, state = new_state(zero(other), seed=1, precision="bf16-true")
            assert fabric.load(tmp_path / str(stage), state) == {}
            assert_same_weights(go_on(fabric, state), expected)
    with subtest("ddp reads the weights"):
        fabric, state = new_state(ddp(), seed=1, precision="bf16-true")
        del state["optimizer"]  # its moments are fp32 here
        assert "optimizer" in fabric.load(tmp_path / "3", state)
        assert state["model"].first.weight.dtype == torch.bfloat16
    with subtest("weights edited in the file count"):
        if fabric.is_global_zero:
            content = torch.load(tmp_path / "3", weights_only=True)
            content["model"]["head.bias"].fill_(3.0)
            torch.save(content, tmp_path / "edited")
        fabric, state = new_state(zero(3), seed=1, precision="bf16-true")
        fabric.barrier()
        fabric.load(tmp_path / "edited", state)
        masters = fabric.strategy.engine_of(state["model"]).full_state_dict(dtype=torch.float32)
        assert not masters or masters["head.bias"].item() == 3.0


@distributed(world_size=2)
def test_filter_strict_raw_files_and_several_models(tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            fabric, state = new_state(zero(stage))
            second = fabric.setup_module(new_net(5))
            plain = torch.nn.Linear(2, 2)  # never set up
            content = {"first": state["model"], "second": second, "plain": plain, "word": "x"}
            path = tmp_path / f"filtered-{stage}"
            fabric.save(path, content, filter={"first": lambda name, value: name.startswith("head")})
            file = fabric.load(path)  # without a state: everything
            assert list(file["first"]) == ["head.weight", "head.bias"] and file["word"] == "x"
            assert torch.equal(file["second"]["first.weight"], new_net(5).first.weight)
            assert torch.equal(file["plain"]["weight"], plain.weight)
            with expect_error(zs.CheckpointError, ["missing", "first.weight"]):
                fabric.load(path, {"first": second})
            fabric.load(path, {"first": second}, strict=False)
            found = whole(fabric, second)
            assert not found or torch.equal(found["head.bias"], new_net().head.bias)
            with expect_error(zs.CheckpointError, ["'third'", "'second'", "strict"]):
                fabric.load(path, {"third": second})
            assert fabric.load(path, {"third": second}, strict=False).keys() == file.keys()
            if fabric.is_global_zero:
                torch.save(new_net(9).state_dict(), tmp_path / f"raw-{stage}")
            fabric.barrier()
            fabric.load_raw(tmp_path / f"raw-{stage}", second)
            assert_same_weights(whole(fabric, second), dict(new_net(9).state_dict()))


@distributed(world_size=2)
def test_ranks_agree_on_a_file_also_where_one_of_them_has_freed_an_earlier_model(tmp_path: Path) -> None:
    fabric = make_fabric(zero(2))
    earlier = [fabric.setup_module(new_net(5))]
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    if rank() == 0:
        earlier.clear()
        gc.collect()
    assert len(fabric.strategy._living_engines()) == 1 + len(earlier)
    for state in ({"model": model}, {"optimizer": optimizer}, {"model": model, "optimizer": optimizer}):
        with subtest(f"{sorted(state)}"):
            fabric.save(tmp_path / "c", state)
            fabric.load(tmp_path / "c", state)
    with subtest("what cannot be read"):
        for number, data in enumerate((b"", b"root:x:0:0:root:/root:/bin/bash\n", b"PK\x03\x04 and no more")):
            if rank() == 0:
                (tmp_path / f"{number}").write_bytes(data)
            fabric.barrier()
            with expect_error(zs.CheckpointError, ["cannot be read", "damaged, or no checkpoint"]):
                fabric.load(tmp_path / f"{number}", {"model": model})


@distributed(world_size=2)
def test_a_folder_goes_between_the_stages(tmp_path: Path) -> None:
    with subtest("uninterrupted"):
        expected = save(tmp_path / "file", zero(2))
    for stage, other in ((1, 3), (3, 2)):
        with subtest(f"stage {stage} into {other}"):
            path = tmp_path / str(stage)
            assert_same_weights(save(path, zero(stage, state_dict_type="sharded")), expected)
            assert len(list(path.glob("*.safetensors"))) == 2  # a part of every rank
            fabric, state = new_state(zero(other), seed=1)
            assert fabric.load(path, {**state, "unknown": None}, strict=False) == {}
            assert fabric.load(path, state) == {} and state["step"] == 4
            assert_same_weights(go_on(fabric, state), expected)
            fabric.load_raw(path, state["model"])
            with expect_error(zs.CheckpointError, ["'unknown'", "'scheduler'"]):
                fabric.load(path, {**state, "unknown": None})
    with subtest("every rank's random numbers go on, with an optimizer"):
        fabric, state = new_state(zero(2, state_dict_type="sharded"))
        torch.manual_seed(50 + rank())
        fabric.save(tmp_path / "drawn", state)
        drawn = torch.rand(4)
        fabric, state = new_state(zero(3), seed=1)
        fabric.load(tmp_path / "drawn", state)
        assert torch.equal(torch.rand(4), drawn)
        fabric.load(tmp_path / "drawn", {"model": state["model"]}, strict=False)
        assert not torch.equal(torch.rand(4), drawn)
    with subtest("refused"):
        fabric, state = new_state(zero(3, state_dict_type="sharded"))
        second = fabric.setup_module(new_net(5))
        with expect_error(zs.CheckpointError, ["2 are in the state", "a folder for each"]):
            fabric.save(tmp_path / "two", {**state, "second": second})
        with expect_error(zs.CheckpointError, ["filter", "full"]):
            fabric.save(tmp_path / "x", state, filter={"model": lambda name, value: True})
        with expect_error(zs.CheckpointError, "file"):
            fabric.save(tmp_path / "file", state)
        with expect_error(zs.CheckpointError, "0 are in the state"):
            fabric.load(tmp_path / "1")
        with expect_error(zs.CheckpointError, "does not exist"):
            fabric.load(tmp_path / "nowhere", state)
        with expect_error(zs.ConfigError, ["'shard'", "sharded"]):
            zero(3, state_dict_type="shard")


@distributed(world_size=2)
def test_what_was_loaded_survives_when_its_file_is_written_again(tmp_path: Path) -> None:
    with subtest("stage 3"):
        fabric, state = new_state(zero(3))
        path = tmp_path / "file"
        state["numbers"] = torch.arange(100_000.0)
        fabric.save(path, state)
        rest = fabric.load(path, {"numbers": None, "model": state["model"]})
        fabric.load(path, state)
        if fabric.is_global_zero:
            path.write_bytes(b"")  # a mapped tensor would end the process now
        fabric.barrier()
        assert state["numbers"].sum() == torch.arange(100_000.0).sum() and rest["step"] == 0
