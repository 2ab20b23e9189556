"""Modules as users write them: an initialiser of their own, odd arguments, odd groups.

Oracle: the same module unsharded, in the same process. Tolerance 0: nothing is added in another order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_strategy as zs
from tests.harness import distributed, subtest

STAGE_3 = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}


def whole(engine: zs.ZeroEngine) -> dict[str, Tensor]:
    """Whole weights, on every rank."""
    with engine.unsharded_params():
        return {name: param.detach().clone() for name, param in engine.model.named_parameters()}


class InitialisesAtTheEnd(nn.Module):
    """As transformers' models do: the outermost constructor fills what the inner ones have made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.apply(self.fill)

    @staticmethod
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight[0].zero_()


@distributed(world_size=2)
def test_a_models_own_initialiser_counts_also_where_it_is_built_on_meta() -> None:
    torch.manual_seed(5)
    expected = dict(InitialisesAtTheEnd().named_parameters())
    for name in ("real", "meta"):
        with subtest(name):
            torch.manual_seed(5)
            with torch.device("meta" if name == "meta" else "cpu"):
                model = InitialisesAtTheEnd()
            if name == "meta":
                torch.manual_seed(6)
            engine = zs.ZeroEngine(model, STAGE_3, device="cpu", param_init_fn=InitialisesAtTheEnd.fill)
            found = whole(engine)
            for fqn, value in found.items():
                if name == "real":
                    assert torch.equal(value, expected[fqn].detach()), fqn
                if value.ndim > 1:
                    assert abs(float(value[1:].std()) - 0.02) < 0.002, fqn
            assert not found["embed.weight"][0].any() and not found["layers.0.bias"].any()
            engine.close()


class AnyArguments(nn.Module):
    """A block that takes what attention blocks take."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(12, 12), nn.Dropout(0.3)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, *, pos: Tensor, flag: bool, cache: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        x = x + self.drop(torch.tanh(self.linear(x[:, pos])))
        x = x if mask is None else x * mask
        return (x if flag else -x), {**cache, "calls": cache["calls"] + 1}


class Recomputing(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks, self.how = nn.ModuleList(AnyArguments() for _ in range(3)), how

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[str, Any] = {"calls": 0, "none": None}
        pos, mask = torch.arange(11, -1, -1), torch.ones(12, dtype=torch.bool)
        for number, block in enumerate(self.blocks):
            args = (x, None if number == 1 else mask)
            keywords = {"pos": pos, "flag": number != 2, "cache": cache}
            if self.how == "none":
                x, cache = block(*args, **keywords)
            else:
                x, cache = checkpoint(block, *args, use_reentrant=False, **keywords)
        assert cache["calls"] == 3
        return x


@distributed(world_size=2)
def test_recomputed_blocks_take_any_arguments_in_training_and_evaluation() -> None:
    """Dropout draws the same numbers when it is recomputed."""
    plain = Recomputing("none")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = Recomputing("torch")
    engine = zs.ZeroEngine(model, STAGE_3)
    optimizer = engine.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    for number in range(3):
        for way, step in ((plain, reference), (model, optimizer)):
            torch.manual_seed(number)
            way(x).square().mean().backward()
            step.step()
            step.zero_grad()
        with torch.no_grad():
            assert torch.equal(model.eval()(x), plain.eval()(x))
        model.train(), plain.train()
    for name, value in whole(engine).items():
        assert torch.equal(value, plain.get_parameter(name).detach()), name
    engine.close()


@distributed(world_size=2)
def test_interleaved_param_groups_come_back_to_their_own_parameters(tmp_path: Path) -> None:
    """By way of a checkpoint: what is in a group has nothing to do with where it lies."""

    def build() -> tuple[zs.ZeroEngine, Any]:
        torch.manual_seed(9)
        model = nn.Sequential(*[nn.Linear(7, 7) for _ in range(4)])
        config = {"zero_optimization": {**STAGE_3["zero_optimization"], "reduce_bucket_size": 64}}
        engine = zs.ZeroEngine(model, config)
        assert len(engine.buckets) > 1 and all(bucket.policy.shard_params for bucket in engine.buckets)
        params = list(model.parameters())
        groups = [{"params": params[::2], "weight_decay": 0.1}, {"params": params[1::2], "lr": 1e-2}]
        return engine, engine.shard_optimizer(torch.optim.AdamW(groups, lr=1e-1, weight_decay=0.0))

    def step(engine: zs.ZeroEngine, optimizer: Any, number: int) -> None:
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(number))
        engine.backward(engine.model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    first, optimizer = build()
    for number in range(2):
        step(first, optimizer, number)
    first.save_checkpoint(tmp_path / "half")
    kept = whole(first)
    second, resumed = build()
    second.load_checkpoint(tmp_path / "half")
    for name, value in whole(second).items():
        assert torch.equal(value, kept[name]), name
    assert [group["lr"] for group in resumed.param_groups] == [1e-1, 1e-2]
    step(first, optimizer, 2)
    step(second, resumed, 2)
    expected = whole(first)
    for name, value in whole(second).items():
        assert torch.equal(value, expected[name]), name
    first.close()
    second.close()


@distributed(world_size=2)
def test_a_channels_last_weight_is_stored_row_major_with_its_values() -> None:
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            torch.manual_seed(5)
            model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
            before = model[0].weight.detach().clone(memory_format=torch.contiguous_format)
            assert not model[0].weight.is_contiguous()
            engine = zs.ZeroEngine(model, {"zero_optimization": {"stage": stage}})
            with engine.unsharded_params():
                assert model[0].weight.is_contiguous() and torch.equal(model[0].weight, before)
            engine.close()
