"""Who trains a module after a run of ZeroStrategy: another strategy, a plain loop, the engine; 2 ranks.

Oracle: the same sequence of runs with Lightning's `DDPStrategy` throughout, and a plain loop on a copy of the
module. Tolerance 0, the same bits of the weights and of every rank's losses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from tests.integrations.lightning_support import (
    TinyModule,
    assert_same_losses,
    assert_same_weights,
    ddp,
    loader,
    make_trainer,
    whole_weights,
    zero,
)


def run(strategies: Sequence[Any], **keywords: Any) -> tuple[TinyModule, list[dict[str, Tensor]], list[Any]]:
    """Fit one module with one Trainer after the other; return it, its weights after each, the Trainers."""
    module, weights, trainers = TinyModule(), [], []
    for strategy in strategies:
        trainer = make_trainer(strategy, max_epochs=1, **keywords)
        trainer.fit(module, loader(2), loader(1))
        trainer.validate(module, loader(1), verbose=False)
        weights.append({name: value.clone() for name, value in module.state_dict().items()})
        trainers.append(trainer)
    return module, weights, trainers


@distributed(world_size=2)
def test_another_strategy_trains_the_module_after_a_run_and_the_next_run_goes_on_from_there() -> None:
    with subtest("ddp"):
        module, weights, _ = run([ddp(), ddp(), ddp()])
        assert not torch.equal(weights[0]["head.weight"], weights[1]["head.weight"])
    for stage in (1, 2):
        with subtest(f"stage {stage}, ddp, stage {stage}"):
            found, found_weights, trainers = run([zero(stage), ddp(), zero(stage)])
            assert_same_losses(found, module)
            for after, expected in zip(found_weights, weights, strict=True):
                assert_same_weights(after, expected)
            assert trainers[0].strategy.engine is trainers[2].strategy.engine
            assert_same_weights(whole_weights(trainers[0]), weights[2])  # the first Trainer can still save
        with subtest(f"ddp, stage {stage}, ddp"):
            found, found_weights, _ = run([ddp(), zero(stage), ddp()])
            assert_same_losses(found, module)
            assert_same_weights(found_weights[2], weights[2])


def plain_step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = next(iter(loader(1)))
    nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


@distributed(world_size=2)
def test_a_plain_loop_trains_the_module_after_a_run_and_the_engine_takes_over_when_asked() -> None:
    for stage in (1, 2):
        with subtest(f"stage {stage}"):
            module, _, (trainer,) = run([zero(stage)])
            engine, sharded = trainer.strategy.engine, trainer.optimizers[0]
            alone = copy.deepcopy(module)
            for model in (module, alone):
                optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                for _ in range(2):
                    plain_step(model, optimizer)
            assert_same_weights(whole_weights(trainer), alone.state_dict())
            with expect_error(zs.ShardingError, ["a run that has ended", "engine.backward(loss)"]):
                plain_step(module, sharded)
            for model in (module, alone):
                loss = model(torch.ones(1, 4)).sum()
                engine.backward(loss) if model is module else loss.backward()
                plain = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
                if model is alone:
                    plain.step()
                    continue
                with expect_error(zs.ConfigError, "'first.weight'"):
                    plain.step()
                engine.forget_optimizers()
                engine.shard_optimizer(plain).step()
            assert_same_weights(whole_weights(trainer), alone.state_dict())


@distributed(world_size=2)
def test_masters_follow_what_others_have_trained_after_a_run() -> None:
    with subtest("bf16"):
        module, _, (trainer,) = run([zero(2)], precision="bf16-true")
        engine = trainer.strategy.engine
        before = engine.full_state_dict(dtype=torch.float32)
        with torch.no_grad():
            module.head.weight[0, :3] += 1.0
        after = engine.full_state_dict(dtype=torch.float32)
        for name, value in before.items():
            written = torch.zeros_like(value, dtype=torch.bool)
            if name == "head.weight":
                written[0, :3] = True
                assert torch.equal(after[name][written].bfloat16(), module.head.weight[0, :3].detach())
            assert torch.equal(after[name][~written], value[~written]), name
        run_again = make_trainer(zero(2), max_epochs=1, precision="bf16-true")
        run_again.validate(module, loader(1), verbose=False)
        assert run_again.strategy.engine is engine
        for name, value in engine.full_state_dict(dtype=torch.float32).items():
            assert torch.equal(value, after[name]), name


@distributed(world_size=2)
def test_what_is_sharded_at_stage_3_is_refused_to_others_by_name() -> None:
    with subtest("ddp"):
        module = TinyModule()
        make_trainer(zero(3), max_epochs=1).fit(module, loader(2))
        with expect_error(zs.ShardingError, ["first.weight", "sharded at this moment"]):
            make_trainer(ddp(), max_epochs=1).fit(module, loader(2))
    with subtest("a plain optimizer"):
        optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
        with expect_error(zs.ConfigError, ["plain SGD", "'first.weight'"]):
            plain_step(module, optimizer)
