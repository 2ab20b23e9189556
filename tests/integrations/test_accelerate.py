"""ZeroAccelerator on two ranks: the loop of a script, with everything that it calls between loss and step.

Oracle: the same loop under Accelerate's own Accelerator, which wraps in DDP. Tolerance 0 where there is one
reduction per step, for losses, weights and norms, which are those of DDP's gradients in fp64, rounded once as
the engine's are (torch adds up in fp32). Clipping and a reduction per micro-batch agree to rounding.
"""

from __future__ import annotations

import math
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin, TorchDynamoPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.accelerate_support import (
    STAGES,
    accelerator_of,
    assert_same,
    assert_sharded,
    exact_norm,
    new_loader,
    new_model,
    train,
    whole,
)
from tests.models import Mlp, adamw, awkward_loss, inputs, loss_of, sgd, square_loss
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin, rebinding

# -- the loop ----------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_ten_steps_equal_ddp_bit_for_bit_with_and_without_accumulation() -> None:
    for num_micro_batches in (1, 3):
        with subtest(f"ddp, {num_micro_batches} micro-batches"):
            expected = train(accelerator_of(None, gradient_accumulation_steps=num_micro_batches))
        for stage in STAGES:
            with subtest(f"stage {stage}, {num_micro_batches} micro-batches"):
                config = {"accumulate_whole_gradients": True}
                accelerator = accelerator_of(stage, config, gradient_accumulation_steps=num_micro_batches)
                assert_same(train(accelerator), expected)
                assert_sharded(accelerator, accelerator._models[0], stage)
    with subtest("a reduction per micro-batch, stage 2"):
        accelerator = accelerator_of(2, gradient_accumulation_steps=3)
        assert_same(train(accelerator), expected, tolerance=2e-5)


@distributed(world_size=2)
def test_clipping_by_norm_equals_ddp() -> None:
    with subtest("ddp"):
        expected = train(accelerator_of(None), num_steps=4, max_norm=0.3)
        assert all(norm > 0.3 for norm in expected.norms)
    traces = []
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            traces.append(train(accelerator_of(stage), num_steps=4, max_norm=0.3))
            assert_same(traces[-1], expected, tolerance=2e-5)
            assert_same(traces[-1], traces[0])


# -- clipping ----------------------------------------------------------------------------------------------


def backwards(accelerator: Any, num: int = 1) -> tuple[Any, Any]:
    """Prepare a model with two optimizers and run backwards."""
    model = new_model()
    first = torch.optim.SGD(
        [p for n, p in model.named_parameters() if p.requires_grad and "blocks" in n], lr=0.1
    )
    rest = torch.optim.SGD(
        [p for n, p in model.named_parameters() if p.requires_grad and "blocks" not in n], lr=0.1
    )
    model, first, rest = accelerator.prepare(model, first, rest)
    for step in range(num):
        accelerator.backward(awkward_loss(model, step))
    return model, (first, rest)


def grads(accelerator: Any, model: nn.Module) -> dict[str, Tensor | None]:
    inside = accelerator.unwrap_model(model)
    if isinstance(accelerator, ZeroAccelerator):
        engine = accelerator.engine_of(model)
        return {name: engine.full_grad(param) for name, param in inside.named_parameters()}
    return {name: param.grad for name, param in inside.named_parameters()}


def assert_same_grads(
    found: dict[str, Tensor | None], expected: dict[str, Tensor | None], rtol: float = 0.0
) -> None:
    for name, grad in expected.items():
        if grad is None:
            assert found[name] is None, name
        else:
            torch.testing.assert_close(
                found[name], grad, rtol=rtol, atol=rtol * 1e-2, msg=lambda m, n=name: f"{n}: {m}"
            )


@distributed(world_size=2)
def test_clipping_clips_what_it_is_given_returns_the_norm_before_and_inf_measures() -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            ddp = accelerator_of(None)
            theirs, _ = backwards(ddp)
            some = [
                n for n, _ in ddp.unwrap_model(theirs).named_parameters() if "blocks.0" in n or "embed" in n
            ]
            all_of_theirs = dict(ddp.unwrap_model(theirs).named_parameters())
            before = {n: None if p.grad is None else p.grad.clone() for n, p in all_of_theirs.items()}

            accelerator = accelerator_of(stage)
            ours, _ = backwards(accelerator)
            named = dict(ours.named_parameters())
            assert torch.equal(accelerator.clip_grad_norm_(ours.parameters(), math.inf), exact_norm(theirs))
            for kind in (1.0, math.inf):
                norm = accelerator.clip_grad_norm_(ours.parameters(), math.inf, norm_type=kind)
                torch.testing.assert_close(
                    norm, ddp.clip_grad_norm_(theirs.parameters(), 1e9, norm_type=kind)
                )
            assert_same_grads(grads(accelerator, ours), before)  # measuring has changed nothing

            # Some of the parameters of two optimizers: their norm, and nothing else is scaled.
            mine = accelerator.clip_grad_norm_([named[name] for name in some], 0.01)
            torch.testing.assert_close(
                mine, ddp.clip_grad_norm_([all_of_theirs[name] for name in some], 0.01)
            )
            found = grads(accelerator, ours)
            assert_same_grads(found, grads(ddp, theirs), rtol=1e-5)
            untouched = {name: grad for name, grad in before.items() if name not in some}
            assert_same_grads(found, untouched)

            one = named["embed.weight"]
            assert accelerator.clip_grad_norm_(one, math.inf) < mine  # a single tensor is taken too
            accelerator.clip_grad_value_(ours.parameters(), 1e-3)
            ddp.clip_grad_value_(theirs.parameters(), 1e-3)
            assert_same_grads(grads(accelerator, ours), grads(ddp, theirs), rtol=1e-5)


@distributed(world_size=2)
def test_parameters_outside_of_any_engine_are_clipped_with_the_others() -> None:
    accelerator = accelerator_of(2)
    model, _ = backwards(accelerator)
    alone = accelerator.clip_grad_norm_(model.parameters(), math.inf)
    plain = nn.Parameter(torch.zeros(3))
    plain.grad = torch.tensor([3.0, 0.0, 4.0])
    norm = accelerator.clip_grad_norm_([plain, *model.parameters()], 1.0)
    torch.testing.assert_close(norm, (alone**2 + 25.0).sqrt())
    torch.testing.assert_close(plain.grad, torch.tensor([3.0, 0.0, 4.0]) / norm, rtol=1e-5, atol=0.0)
    accelerator.clip_grad_value_([plain], 0.1)
    assert plain.grad.max() == torch.tensor(0.1)


@distributed(world_size=2)
def test_clipping_in_every_micro_batch_is_clipping_at_the_boundary() -> None:
    def run(stage: int, always: bool, **plugin: Any) -> dict[str, Tensor]:
        accelerator = accelerator_of(
            stage, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4, **plugin)
        )
        model = new_model()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), new_loader(8))
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens), targets))
                if always or accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    accelerator.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                optimizer.zero_grad()
        return whole(accelerator, model)

    for stage in (1, 3):
        for plugin in ({}, {"sync_each_batch": True}):
            with subtest(f"stage {stage}, {plugin}"):
                found, expected = run(stage, True, **plugin), run(stage, False, **plugin)
                assert all(torch.equal(found[name], expected[name]) for name in expected)


# -- accumulation ------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_no_sync_and_trigger_sync_in_backward_decide_when_gradients_are_averaged() -> None:
    def run(stage: int | None, inside: bool) -> dict[str, Tensor | None]:
        config, keywords = (
            ({"accumulate_whole_gradients": True}, {}) if stage else (None, {"find_unused": False})
        )
        accelerator = accelerator_of(stage, config, **keywords)
        torch.manual_seed(7)
        model = Mlp()
        model, _ = accelerator.prepare(model, sgd(model))
        with accelerator.no_sync(model):
            first, second = square_loss(model, 0), square_loss(model, 1)
            if inside:
                accelerator.backward(first)
                with accelerator.trigger_sync_in_backward(model):
                    accelerator.backward(second)
        if not inside:
            accelerator.backward(first)  # DDP asks where the forward was, we where the backward is
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(second)
        return grads(accelerator, model)

    for inside in (True, False):
        expected = run(None, inside)
        for stage in STAGES:
            with subtest(f"stage {stage}, inside {inside}"):
                assert_same_grads(run(stage, inside), expected, rtol=0.0 if inside else 1e-5)
    with subtest("a step inside no_sync is refused"):
        accelerator = accelerator_of(2)
        model = new_model()
        model, optimizer = accelerator.prepare(model, adamw(model))
        with accelerator.no_sync(model):
            accelerator.backward(awkward_loss(model, 0))
            with expect_error(zs.ShardingError, "inside no_sync"):
                optimizer.step()


@distributed(world_size=2)
def test_an_incomplete_window_at_the_end_of_a_loader_is_stepped_and_model_zero_grad_clears() -> None:
    def run(stage: int | None) -> list[Tensor]:
        config = {"accumulate_whole_gradients": True} if stage else None
        accelerator = accelerator_of(stage, config, gradient_accumulation_steps=3)
        model = new_model()
        model, optimizer, loader = accelerator.prepare(model, adamw(model), new_loader(5))
        losses = []
        for tokens, targets in (batch for _ in range(2) for batch in loader):
            with accelerator.accumulate(model):
                loss = loss_of(model(tokens), targets)
                accelerator.backward(loss)
                optimizer.step()
                if accelerator.sync_gradients:
                    model.zero_grad()  # transformers never calls the optimizer's
            losses.append(loss.detach())
        return losses

    expected = run(None)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            assert all(map(torch.equal, run(stage), expected))


# -- what is prepared --------------------------------------------------------------------------------------


def trained(accelerator: Any, model: nn.Module, optimizer: Any, num_steps: int = 3) -> dict[str, Tensor]:
    for step in range(num_steps):
        accelerator.backward(awkward_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return whole(accelerator, model)


@distributed(world_size=2)
def test_prepare_takes_everything_in_any_order_together_or_one_after_the_other() -> None:
    def together(accelerator: Any) -> Any:
        model = new_model()
        return accelerator.prepare(model, adamw(model))

    def optimizer_first(accelerator: Any) -> Any:
        model = new_model()
        loader, optimizer, model = accelerator.prepare(
            new_loader(1), adamw(model), model, device_placement=[True, True, True]
        )
        assert isinstance(loader, torch.utils.data.DataLoader)
        return model, optimizer

    def apart(accelerator: Any) -> Any:
        model = accelerator.prepare(new_model())
        return model, accelerator.prepare(adamw(model))

    def apart_optimizer_first(accelerator: Any) -> Any:
        model = new_model()
        optimizer = accelerator.prepare(adamw(model))
        return accelerator.prepare(model), optimizer

    def by_name(accelerator: Any) -> Any:
        model = accelerator.prepare_model(new_model())
        return model, accelerator.prepare_optimizer(adamw(model))

    ways = (together, optimizer_first, apart, apart_optimizer_first, by_name)
    ddp = accelerator_of(None)
    expected = trained(ddp, *together(ddp))
    for stage in (2, 3):
        for way in ways:
            with subtest(f"stage {stage}, {way.__name__}"):
                accelerator = accelerator_of(stage)
                model, optimizer = way(accelerator)
                found = trained(accelerator, model, optimizer)
                assert all(torch.equal(found[name], expected[name]) for name in expected)
                assert_sharded(accelerator, model, stage)
                assert accelerator.unwrap_model(model) is model and accelerator.prepare(model) is model


def adversaries(accelerator: Any) -> dict[str, Tensor]:
    """Two models that train in turns on one another's outputs, and a third that is only asked."""
    torch.manual_seed(3)
    first, second, judge = Mlp(), Mlp(), Mlp()
    judge.requires_grad_(False)
    optimizers = [torch.optim.AdamW(second.parameters(), lr=0.01), sgd(first, momentum=0.9)]
    # Optimizers in the other order than their models, which are told by their parameters.
    of_second, first, second, of_first = accelerator.prepare(optimizers[0], first, second, optimizers[1])
    judge = accelerator.prepare_model(judge, evaluation_mode=True)
    losses = []
    for step in range(4):
        x = inputs(step)
        for mine, other, optimizer in ((first, second, of_first), (second, first, of_second)):
            with torch.no_grad():
                wanted = other(x) + judge(x)
            loss = (mine(x) - wanted).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(mine.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return {
        "losses": torch.stack(losses),
        **{f"{i}.{k}": v for i in (0, 1) for k, v in whole(accelerator, (first, second)[i]).items()},
    }


def one_loss_of_two(accelerator: Any) -> dict[str, Tensor]:
    """A loss that reaches two models, each with its optimizer."""
    torch.manual_seed(4)
    encoder, head = Mlp(), Mlp(depth=2)
    encoder, head, of_head, of_encoder = accelerator.prepare(
        encoder, head, torch.optim.AdamW(head.parameters()), torch.optim.AdamW(encoder.parameters())
    )
    norms = []
    for step in range(3):
        accelerator.backward(head(encoder(inputs(step))).square().mean())
        both = [*encoder.parameters(), *head.parameters()]
        is_ours = isinstance(accelerator, ZeroAccelerator)
        exact = None if is_ours else exact_norm(nn.ModuleList([encoder, head]))
        norm = accelerator.clip_grad_norm_(both, 1e6)
        norms.append(norm if exact is None else exact)
        for optimizer in (of_encoder, of_head):
            optimizer.step()
            optimizer.zero_grad()
    return {
        "norms": torch.stack(norms),
        **whole(accelerator, encoder),
        **{f"head.{k}": v for k, v in whole(accelerator, head).items()},
    }


@distributed(world_size=2)
def test_several_models_and_optimizers_train_as_under_ddp() -> None:
    for run in (adversaries, one_loss_of_two):
        with subtest(f"{run.__name__}, ddp"):
            expected = run(accelerator_of(None))
        for stage in STAGES:
            with subtest(f"{run.__name__}, stage {stage}"):
                accelerator = accelerator_of(stage)
                found = run(accelerator)
                assert found.keys() == expected.keys()
                assert all(torch.equal(found[name], expected[name]) for name in expected)
                engines = accelerator.living_engines()
                assert [engine.config.stage for engine in engines[:2]] == [stage, stage]
                if run is adversaries:  # what is only asked is sharded where that saves memory
                    assert len(engines) == (3 if stage == 3 else 2)
    with subtest("an optimizer over two models"):
        accelerator = accelerator_of(2)
        first, second = accelerator.prepare(Mlp(), Mlp())
        with expect_error(zs.ConfigError, "one engine for each model"):
            accelerator.prepare(torch.optim.AdamW([*first.parameters(), *second.parameters()]))


@distributed(world_size=2)
def test_a_model_that_was_evaluated_first_is_trained_later_and_again_after_free_memory() -> None:
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage)
            model = accelerator.prepare_model(new_model(), evaluation_mode=True)
            with torch.no_grad():
                before = awkward_loss(model, 0)
            model, optimizer = accelerator.prepare(model, adamw(model))
            assert torch.equal(before, awkward_loss(model, 0).detach())
            trained(accelerator, model, optimizer)
            engine = accelerator.engine_of(model)
            assert engine.ledger.memory["optimizer"] > 0
            optimizer = accelerator.free_memory(optimizer)
            assert accelerator._models == [] and engine.ledger.memory["optimizer"] == 0
            model, optimizer = accelerator.prepare(model, adamw(model))
            assert accelerator.engine_of(model) is engine
            trained(accelerator, model, optimizer)
            assert_sharded(accelerator, model, stage)


@distributed(world_size=2)
def test_metrics_are_gathered_and_other_calls_act_as_under_ddp() -> None:
    def run(stage: int | None) -> list[Any]:
        accelerator = accelerator_of(stage)
        model = new_model()
        model, loader = accelerator.prepare(model, new_loader(2))
        model.eval()
        seen = []
        for tokens, targets in loader:
            with torch.no_grad(), accelerator.autocast():
                found = model(tokens).argmax(-1)
            gathered, wanted = accelerator.gather_for_metrics((found, targets))
            seen += [gathered.sum(), wanted.sum(), torch.tensor(len(wanted))]
        seen.append(accelerator.reduce(torch.tensor(float(rank())), "sum"))
        seen.append(torch.tensor(accelerator.num_processes * 10 + accelerator.is_main_process))
        return [value.clone() for value in seen]

    expected = run(None)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            assert all(map(torch.equal, run(stage), expected))


@distributed(world_size=2)
def test_uneven_inputs_and_local_sgd_are_refused_by_name() -> None:
    from accelerate.local_sgd import LocalSGD

    accelerator = accelerator_of(2)
    model = new_model()
    model, optimizer = accelerator.prepare(model, adamw(model))
    with accelerator.join_uneven_inputs([model]):
        accelerator.backward(awkward_loss(model, 0))
    with (
        expect_error(zs.ConfigError, "even_batches=False"),
        accelerator.join_uneven_inputs([model], even_batches=False),
    ):
        pass
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
        accelerator.backward(awkward_loss(model, 0))
        with expect_error(zs.ShardingError, "inside no_sync"):
            optimizer.step()


# -- schedulers --------------------------------------------------------------------------------------------


@distributed(world_size=2)
def test_a_scheduler_moves_once_per_applied_step_by_accelerates_rule() -> None:
    def rates(stage: int | None, accumulation: int, **keywords: Any) -> list[float]:
        accelerator = accelerator_of(stage, gradient_accumulation_steps=accumulation, **keywords)
        model = new_model()
        plain = adamw(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda step: 0.5**step)
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, plain, new_loader(3 * accumulation, size=4), scheduler
        )
        found = []
        for tokens, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(tokens), targets))
                found += [optimizer.param_groups[0]["lr"]] if accelerator.sync_gradients else []
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return found

    split = DataLoaderConfiguration(split_batches=True)
    for accumulation in (1, 4):
        for keywords, moves in (({}, 2), ({"dataloader_config": split}, 1)):
            expected = rates(None, accumulation, **keywords)
            assert (
                expected == [0.01 * 0.5 ** (moves * step) for step in range(len(expected))]
                and len(expected) >= 3
            )
            with subtest(f"{accumulation} micro-batches, {moves} moves"):
                assert rates(3, accumulation, **keywords) == expected


# -- one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_one_process_without_a_group_trains_as_plain_torch(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    expected = train(accelerator_of(None, gradient_accumulation_steps=2), num_steps=3)
    accelerator = accelerator_of(stage, gradient_accumulation_steps=2)
    found = train(accelerator, num_steps=3)
    assert_same(found, expected)
    assert accelerator.num_processes == 1 and type(accelerator) is not Accelerator
    assert_sharded(accelerator, accelerator._models[0], stage)


def inputs_of(other: int) -> Tensor:
    """Return what `inputs` gives another rank."""
    return torch.randn(4, 15, generator=torch.Generator().manual_seed(other))


# -- what else a script may do -----------------------------------------------------------------------------


@distributed(world_size=2)
def test_gathered_parameters_of_accelerates_are_whole_and_what_rank_0_writes_is_kept() -> None:
    rebinding.install()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage)
            model = accelerator.prepare(new_model())
            weight = model.blocks[0].up.weight
            with accelerate.utils.GatheredParameters([weight]):
                before = weight.detach().clone()
            with accelerate.utils.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
                weight.add_(1.0 if rank() == 0 else 5.0)
            with accelerate.utils.operations.GatheredParameters(model.parameters()):
                assert torch.equal(weight, before + 1.0)
            as_rank_1 = accelerate.utils.GatheredParameters(weight, modifier_rank=1)
            with expect_error(zs.ConfigError, "modifier_rank=1"), as_rank_1:
                pass
            with accelerate.utils.GatheredParameters(weight, modifier_rank=0, enabled=False):
                assert stage < 3 or "sharded" in repr(weight)


@pytest.mark.slow
@distributed(world_size=2)
def test_compiled_models_train_as_they_do_uncompiled() -> None:
    expected = train(accelerator_of(2), num_steps=2)
    for regional in (False, True):
        with subtest(f"regional {regional}"):
            plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=regional)
            accelerator = accelerator_of(3, dynamo_plugin=plugin)
            assert_same(train(accelerator, num_steps=2), expected)
            model = accelerator._models[0]
            compiled = [module for module in model.modules() if module._compiled_call_impl is not None]
            assert (model in compiled) != regional and compiled
    with subtest("compiled by the script"):
        accelerator = accelerator_of(3)
        model = new_model()
        model, optimizer = accelerator.prepare(torch.compile(model, backend="eager"), adamw(model))
        accelerator.backward(awkward_loss(model, 0))
        model.zero_grad()
        assert accelerator.engine_of(model).full_grad(model.embed.weight) is None
        trained(accelerator, model, optimizer, num_steps=1)


@distributed(world_size=2)
def test_a_model_on_meta_is_filled_while_it_is_sharded_and_trains() -> None:
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            accelerator = accelerator_of(stage)
            with torch.device("meta"):
                model = Mlp()
            torch.manual_seed(7)
            model, optimizer = accelerator.prepare(model, sgd(model))
            accelerator.backward(square_loss(model, 0))
            optimizer.step()
            found = whole(accelerator, model)
            torch.manual_seed(7)
            plain = Mlp()
            of_plain = sgd(plain)
            torch.stack([plain(inputs_of(other)).pow(2).mean() for other in range(2)]).mean().backward()
            of_plain.step()
            for name, value in found.items():
                torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-7)


@distributed(world_size=2)
def test_a_model_that_device_map_has_spread_is_refused() -> None:
    accelerator = accelerator_of(2)
    model = Mlp()
    model.hf_device_map = {"layers.0": 0, "layers.1": "cpu"}
    with expect_error(ValueError, "device_map"):
        accelerator.prepare(model)


@distributed(world_size=2)
def test_a_schedule_of_the_config_ends_after_the_steps_that_each_process_makes() -> None:
    accelerator_of(2)
    blocks = {
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": "auto",
                "warmup_num_steps": 2,
                "warmup_type": "linear",
                "warmup_max_lr": 1.0,
            },
        },
    }
    accelerator = ZeroAccelerator(zero_plugin=ZeroPlugin(2, blocks))
    model = Mlp()
    dummy = DummyOptim(model.parameters(), lr=1.0)
    model, optimizer, scheduler = accelerator.prepare(model, dummy, DummyScheduler(dummy, total_num_steps=12))
    rates = []
    for step in range(8):
        rates.append(optimizer.param_groups[0]["lr"])
        accelerator.backward(square_loss(model, step))
        optimizer.step()
        scheduler.step()
    assert rates == [0.0, 0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0]  # 12 steps of one process are 6 of two
