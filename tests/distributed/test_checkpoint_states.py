"""What optimizers keep of parameters that are not like the others: state of some groups only, 0-d, empty.

Oracles: the uninterrupted run and the values before the save, bit for bit; the dtypes that plain torch gives
a state which it loads into bf16 weights. Tolerance: none.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_strategy as zs
from tests.distributed.state_support import BF16, assert_same, sharded, whole_state
from tests.harness import distributed, expect_error, rank, subtest
from tests.models import Mlp, inputs
from tests.synthetic_checkpoint import edit_manifest
from zero_strategy.checkpoint.consolidate import consolidate

PURE_BF16 = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


class Scaled(Mlp):
    """A small model with a 0-d parameter, and frozen ones without elements, alone in their bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0), requires_grad=False)
        self.less = nn.Parameter(torch.empty(3, 0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x) * self.gain
        return out


def build(seed: int) -> Scaled:
    torch.manual_seed(seed)
    return Scaled()


def trained(model: nn.Module, **of_the_second: Any) -> list[dict[str, Any]]:
    """Return what trains in two param groups, the second with settings of its own."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [{"params": params[1::2]}, {"params": params[0::2], **of_the_second}]


def run(model: nn.Module, optimizer: Any, steps: range) -> None:
    for number in steps:
        model(inputs(number).to(next(model.parameters()).dtype)).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# Optimizers whose state has other keys in one param group than in the other.
BY_GROUP: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "amsgrad": lambda model: torch.optim.AdamW(trained(model, amsgrad=True), lr=1e-2),
    "momentum": lambda model: torch.optim.RMSprop(trained(model, momentum=0.9), lr=1e-3),
}


def state_of_one_param_group_only_is_saved_and_loaded(tmp_path: Path) -> None:
    for number, (name, optimizer_of) in enumerate(BY_GROUP.items()):
        stages = number + 1, 3 - number
        with subtest(f"{name}, stages {stages}"):
            ends = []
            for seed, stage in enumerate(stages):
                engine = sharded(build(seed), stage=stage, reduce_bucket_size=60)
                optimizer = engine.shard_optimizer(optimizer_of(engine.model))
                if seed == 0:
                    run(engine.model, optimizer, range(2))
                    engine.save_checkpoint(tmp_path / name)
                else:
                    engine.load_checkpoint(tmp_path / name)
                run(engine.model, optimizer, range(2, 5))
                ends.append(whole_state(engine))
                engine.close()
            keys = {frozenset(state) for state in ends[0]["optimizers"][0]["state"].values()}
            assert len(keys) == 2, "the groups keep the same, so this shows nothing"
            assert_same(ends[1], ends[0])


def a_bucket_of_nothing_but_empty_parameters_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    for stage in (1, 2, 3):
        with subtest(f"stage {stage}"):
            engine = sharded(build(0), stage=stage)
            assert any(bucket.layout.shard_numel == 0 for bucket in engine.buckets), "no such bucket"
            optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model)))
            run(engine.model, optimizer, range(1))
            saved = whole_state(engine)
            engine.save_checkpoint(tmp_path / f"{stage}", asynchronous=stage % 2 == 0)
            engine.wait_for_checkpoint()
            other = sharded(build(1), stage=stage % 3 + 1)
            other.shard_optimizer(torch.optim.AdamW(trained(other.model)))
            other.load_checkpoint(tmp_path / f"{stage}")
            assert_same(whole_state(other), saved)
            other.load_full_state_dict(saved["weights"])
            if rank() == 0:
                consolidate(tmp_path / f"{stage}", tmp_path / f"{stage}-whole")
            engine.close()
            other.close()


def dtypes_of(state: dict[Any, dict[str, Any]]) -> dict[Any, dict[str, torch.dtype]]:
    return {index: {key: value.dtype for key, value in of.items()} for index, of in state.items()}


def loaded_state_has_the_dtypes_that_torch_gives_it_also_of_a_0_d_parameter(tmp_path: Path) -> None:
    engine = sharded(build(0), stage=2, **BF16)
    optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model)))
    run(engine.model, optimizer, range(2))
    engine.save_checkpoint(tmp_path / "c")
    state = whole_state(engine)["optimizers"][0]
    engine.close()
    plain = torch.optim.AdamW(trained(build(1).bfloat16()))
    plain.load_state_dict(state)
    expected = dict(sorted(plain.state_dict()["state"].items()))
    assert set(dtypes_of(expected)[0].values()) == {torch.bfloat16, torch.float32}

    for way in ("load_checkpoint", "load_state_dict"):
        with subtest(way):
            engine = sharded(build(1), stage=2, **PURE_BF16)
            optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model)))
            if way == "load_checkpoint":
                engine.load_checkpoint(tmp_path / "c")
            else:
                optimizer.load_state_dict(state)
            assert_same(whole_state(engine)["optimizers"][0]["state"], expected)
            run(engine.model, optimizer, range(2, 3))
            engine.close()

    with subtest("an optimizer that was stepped before it was sharded"):
        model = build(1).bfloat16()
        plain = torch.optim.AdamW(trained(model))
        run(model, plain, range(1))
        engine = sharded(model, stage=2, **BF16)
        engine.shard_optimizer(plain)
        found = dtypes_of(whole_state(engine)["optimizers"][0]["state"])
        assert {dtype for of in found.values() for dtype in of.values()} == {torch.float32}, found
        engine.close()


def one_value_for_several_weights_keeps_the_dtype_in_which_its_optimizer_made_it(tmp_path: Path) -> None:
    """NAdam's product of momenta, which torch itself rounds to bf16 when it loads."""
    ends = []
    for way in ("train", "load_state_dict", "load_checkpoint"):
        engine = sharded(build(len(ends)), stage=1, **PURE_BF16)
        params = [param for param in engine.model.parameters() if param.requires_grad and param.dim()]
        optimizer = engine.shard_optimizer(torch.optim.NAdam(params))
        if way == "train":
            run(engine.model, optimizer, range(2))
            engine.save_checkpoint(tmp_path / "c")
            weights = engine.full_state_dict()
            state = optimizer.state_dict()
        elif way == "load_state_dict":
            engine.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
        else:
            engine.load_checkpoint(tmp_path / "c")
        run(engine.model, optimizer, range(2, 4))
        ends.append(whole_state(engine))
        engine.close()
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


# -- state that cannot be told apart, or not be stored -------------------------------------------------------


class Odd(torch.optim.Optimizer):
    """Counts its steps in a tensor of one element, under a key of the caller's."""

    def __init__(self, params: Any, key: Any = "count") -> None:
        super().__init__(params, {"lr": 0.1})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            if param.grad is not None:
                count = self.state[param].setdefault(self.key, torch.zeros(1))
                param.sub_(param.grad, alpha=0.1 / float(count.add_(1)))


class ThirtyThree(nn.Module):
    """Of its only parameter rank 1 of 2 holds one element: parameters begin at multiples of 256 bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(33.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x.mean()


def one_value_for_all_elements_is_known_as_such_where_a_rank_has_one_element(tmp_path: Path) -> None:
    ends = []
    for way in ("train", "load_state_dict", "load_checkpoint"):
        engine = sharded(ThirtyThree(), stage=2)
        optimizer = engine.shard_optimizer(Odd(engine.model.parameters()))
        assert [piece.numel for piece, _ in optimizer.slices_of(engine.model.weight)] == [(32, 1)[rank()]]
        if way == "train":
            run(engine.model, optimizer, range(2))
            engine.save_checkpoint(tmp_path / "c")
            weights, state = engine.full_state_dict(), optimizer.state_dict()
            assert rank() or state["state"][0]["count"].numel() == 1
        elif way == "load_state_dict":
            engine.load_full_state_dict(weights)
            optimizer.load_state_dict(state)
        else:
            engine.load_checkpoint(tmp_path / "c")
        run(engine.model, optimizer, range(2, 4))
        ends.append(engine.full_state_dict())
        engine.close()
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


class Phase(str, enum.Enum):
    """As configs have them."""

    WARM = "warm"


def what_no_name_or_value_of_a_manifest_can_be_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    for key in ("a/b", "", 0):
        with subtest(f"key {key!r}"):
            engine = sharded(ThirtyThree(), stage=2)
            optimizer = engine.shard_optimizer(Odd(engine.model.parameters(), key))
            run(engine.model, optimizer, range(1))
            with expect_error(zs.CheckpointError, [f"The state {key!r} of 'weight'", "'exp_avg'"]):
                engine.save_checkpoint(tmp_path / "c")
            engine.close()
    assert not list(tmp_path.iterdir())
    with subtest("what is a string or a number of a class of its own is stored as that"):
        engine = sharded(ThirtyThree(), stage=2)
        number = enum.IntEnum("Number", {"ONE": 1}).ONE
        extra = {Phase.WARM: [Phase.WARM, number], "numpy": numpy.float64(0.5)}
        engine.save_checkpoint(tmp_path / "c", extra=extra)
        assert_same(engine.load_checkpoint(tmp_path / "c"), {"warm": ["warm", 1], "numpy": 0.5})
        engine.close()


# -- all or nothing ------------------------------------------------------------------------------------------


def spoilt_scale(document: dict[str, Any]) -> None:
    document["loss_scaler"]["scale"] = -1.0


def spoilt_count(document: dict[str, Any]) -> None:
    document["loss_scaler"]["num_steps"] = float("nan")


def spoilt_group(document: dict[str, Any]) -> None:
    document["optimizers"][0]["param_groups"][0]["lr"] = [0.1]


def spoilt_rng(document: dict[str, Any]) -> None:
    del document["tensors"]["rng/1"]


def spoilt_state(document: dict[str, Any]) -> None:
    document["tensors"]["optim/0/layers.0.bias/exp_avg"]["shape"] = [3, 5]


def nothing_is_loaded_if_something_of_it_cannot_be(tmp_path: Path) -> None:
    spoils: dict[Callable[[dict[str, Any]], None], list[str]] = {
        spoilt_scale: ["loss scaler cannot be used", "-1.0"],
        spoilt_count: ["loss scaler cannot be used", "nan"],
        spoilt_group: ["'lr'", "[0.1]", "Nothing was loaded"],
        spoilt_rng: ["rng/1"],
        spoilt_state: ["optim/0/layers.0.bias/exp_avg", "[3, 5]"],
    }
    engine = sharded(build(0), stage=2, fp16={"enabled": True})
    lr = torch.tensor(1e-2)
    optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model), lr=lr, foreach=False))
    for number in range(4):  # the first scales are too large
        engine.backward(engine.model(inputs(number).half()).float().pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    for spoil in spoils:
        engine.save_checkpoint(tmp_path / spoil.__name__)
    if rank() == 0:
        for spoil in spoils:
            edit_manifest(tmp_path / spoil.__name__, spoil)
    engine.backward(engine.model(inputs(4).half()).float().pow(2).mean())
    optimizer.step()
    before, scaler = whole_state(engine), engine.loss_scaler.state_dict()
    for spoil, texts in spoils.items():
        with subtest(spoil.__name__):
            with expect_error(zs.CheckpointError, texts):
                engine.load_checkpoint(tmp_path / spoil.__name__)
            assert_same(whole_state(engine), before)
            assert engine.loss_scaler.state_dict() == scaler
    engine.close()


def bytes_read() -> int:
    """Return how many bytes this process has read, from the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


def whole_weights_on_every_rank_are_read_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine = sharded(Mlp(depth=4, width=256), stage=3, **BF16)
    engine.shard_optimizer(torch.optim.SGD(engine.model.parameters()))
    engine.save_checkpoint(tmp_path / "c")
    expected = [engine.full_state_dict()]
    dist.broadcast_object_list(expected)
    with engine.open_checkpoint(tmp_path / "c") as opened:
        before = bytes_read()
        found = opened.whole_weights()
        num_read = bytes_read() - before
    assert_same(dict(sorted(found.items())), dict(sorted(expected[0].items())))
    stored_bytes = sum(4 * param.numel() for param in engine.model.parameters())
    assert (num_read >= stored_bytes) if rank() == 0 else (num_read < stored_bytes / 4)
    with engine.open_checkpoint(tmp_path / "c") as opened:
        if rank() == 0:
            next((tmp_path / "c").glob("rank-00001-*")).unlink()
        dist.barrier()
        with expect_error(zs.CheckpointError, ["[rank 0]", "rank-00001"]):
            opened.whole_weights()
    engine.close()


def a_checkpoint_that_does_not_open_leaves_the_count_of_steps(tmp_path: Path) -> None:
    """By which the engine knows whether ranks may have stepped apart since they had the same weights."""
    engine = sharded(build(0), stage=2)
    optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model)))
    run(engine.model, optimizer, range(3))
    with expect_error(zs.CheckpointError, "does not exist"):
        engine.load_checkpoint(tmp_path / "none")
    assert engine._ownership.num_steps == 3
    engine.save_checkpoint(tmp_path / "c")
    engine.load_checkpoint(tmp_path / "c")
    assert engine._ownership.num_steps == 0
    engine.close()


CELLS: list[Callable[[Path], None]] = [
    state_of_one_param_group_only_is_saved_and_loaded,
    a_bucket_of_nothing_but_empty_parameters_is_saved_loaded_and_exported,
    loaded_state_has_the_dtypes_that_torch_gives_it_also_of_a_0_d_parameter,
    one_value_for_several_weights_keeps_the_dtype_in_which_its_optimizer_made_it,
    one_value_for_all_elements_is_known_as_such_where_a_rank_has_one_element,
    what_no_name_or_value_of_a_manifest_can_be_is_refused_before_anything_is_written,
    nothing_is_loaded_if_something_of_it_cannot_be,
    whole_weights_on_every_rank_are_read_by_one,
    a_checkpoint_that_does_not_open_leaves_the_count_of_steps,
]


@distributed(world_size=2, timeout=120)
def test_what_is_kept_of_odd_parameters_groups_and_states_is_loaded_as_it_was(tmp_path: Path) -> None:
    for cell in CELLS:
        with subtest(cell.__name__):
            folder = tmp_path / cell.__name__
            folder.mkdir(exist_ok=True)
            cell(folder)
