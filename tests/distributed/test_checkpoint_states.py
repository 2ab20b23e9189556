"""What optimizers keep of parameters that are not like the others: state of some groups only, 0-d, empty.

Oracles: the uninterrupted run and the values before the save, bit for bit; the dtypes that plain torch gives
a state which it loads into bf16 weights. Tolerance: none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.distributed.state_support import BF16, assert_same, sharded, whole_state
from tests.harness import distributed, rank, subtest
from tests.models import Mlp, inputs
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
    "centered": lambda model: torch.optim.RMSprop(trained(model, centered=True), lr=1e-3),
    "no momentum": lambda model: torch.optim.SGD(trained(model, momentum=0.0), lr=1e-2, momentum=0.9),
}


def state_of_one_param_group_only_is_saved_and_loaded(tmp_path: Path) -> None:
    for number, (name, optimizer_of) in enumerate(BY_GROUP.items()):
        stages = number % 4, (number + 2) % 4
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
            assert len(keys) == 2 or name == "no momentum", "the groups keep the same, so this shows nothing"
            assert_same(ends[1], ends[0])


def a_bucket_of_nothing_but_empty_parameters_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    for stage in range(4):
        with subtest(f"stage {stage}"):
            engine = sharded(build(0), stage=stage)
            assert any(bucket.layout.shard_numel == 0 for bucket in engine.buckets), "no such bucket"
            optimizer = engine.shard_optimizer(torch.optim.AdamW(trained(engine.model)))
            run(engine.model, optimizer, range(1))
            saved = whole_state(engine)
            engine.save_checkpoint(tmp_path / f"{stage}", asynchronous=stage % 2 == 0)
            engine.wait_for_checkpoint()
            other = sharded(build(1), stage=3 - stage)
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


CELLS: list[Callable[[Path], None]] = [
    state_of_one_param_group_only_is_saved_and_loaded,
    a_bucket_of_nothing_but_empty_parameters_is_saved_loaded_and_exported,
    loaded_state_has_the_dtypes_that_torch_gives_it_also_of_a_0_d_parameter,
    one_value_for_several_weights_keeps_the_dtype_in_which_its_optimizer_made_it,
]


@distributed(world_size=2, timeout=120)
def test_what_optimizers_keep_of_odd_parameters_and_groups_is_loaded_as_it_was(tmp_path: Path) -> None:
    for cell in CELLS:
        with subtest(cell.__name__):
            cell(tmp_path / cell.__name__)
