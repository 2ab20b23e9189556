"""transformers' Trainer on two ranks: accumulation and the token-weighted loss, evaluation, the best model.

Oracle: the same Trainer on plain Accelerate, which wraps in DDP. Tolerance 0 where the order of additions is
the same, which at stages 2 and 3 `accumulate_whole_gradients` makes it; stated where it is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.harness import distributed, rank, subtest
from tests.integrations.trainer_support import (
    STAGES,
    Run,
    arguments_of,
    assert_same,
    assert_sharded,
    llama,
    run,
    samples,
    trainer_of,
    whole,
)

WHOLE = {"accumulate_whole_gradients": True}


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_the_token_weighted_loss_of_accumulated_batches_is_that_of_ddp(quick: bool, tmp_path: Path) -> None:
    """Two epochs of 8 micro-batches each in windows of 3, the last of which is short."""

    def trained(stage: int | None, config: dict[str, Any] | None = None, **keywords: Any) -> Run:
        arguments = arguments_of(
            tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=3, **keywords
        )
        trainer = trainer_of(stage, arguments, config=config, train_dataset=samples(32))
        found = run(trainer)
        if stage is not None:
            assert_sharded(trainer, stage)
        return found

    with subtest("ddp"):
        expected = trained(None)
        assert len(expected.losses) == 6
    for stage in (3,) if quick else STAGES:
        with subtest(f"stage {stage}"):
            assert_same(trained(stage, WHOLE), expected)
    if quick:
        return
    with subtest("a reduction for each micro-batch"):
        assert_same(trained(2), expected, tolerance=1e-3)
    with subtest("tokens of each rank by themselves"):
        alone = trained(None, average_tokens_across_devices=False)
        assert alone.losses != expected.losses
        assert_same(trained(1, average_tokens_across_devices=False), alone)


@pytest.mark.slow
@distributed(world_size=2)
def test_every_split_into_micro_batches_has_the_same_loss_and_norm(tmp_path: Path) -> None:
    splits = ((6, 1), (3, 2), (2, 3), (1, 6))
    runs = []
    for size, steps in splits:
        with subtest(f"{steps} batches of {size}"):
            arguments = arguments_of(
                tmp_path,
                max_steps=3,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=steps,
                optim="sgd",
            )
            stage = 3 if steps > 1 else 2
            trainer = trainer_of(stage, arguments, train_dataset=samples(36))
            runs.append(run(trainer))
            assert_sharded(trainer, stage, num_moments=0)
    for found in runs[1:]:
        assert_same(found, runs[0], tolerance=1e-4)


@distributed(world_size=2)
def test_evaluating_before_during_and_after_training_gives_ddps_losses(tmp_path: Path) -> None:
    def evaluated(stage: int | None) -> list[float]:
        arguments = arguments_of(tmp_path, eval_strategy="steps", eval_steps=2, eval_on_start=True)
        trainer = trainer_of(stage, arguments, eval_dataset=samples(9, seed=6))
        if stage is not None:  # after it, plain Accelerate wraps nothing in DDP: ranks would train apart
            first = trainer.evaluate()["eval_loss"]
        if stage == 3:
            engine = trainer.accelerator.engine_of(trainer.model)
            assert engine.config.stage == 3 and engine.ledger.comm["all_gather"]["bytes_sent"] > 0
        trainer.train()
        last = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(samples(5, seed=8))
        if stage is not None:
            assert_sharded(trainer, stage)
        during = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert stage is None or first == during[0]
        return [*during, last, predicted.metrics["test_loss"], float(predicted.predictions.sum())]

    expected = evaluated(None)
    assert len(set(expected)) >= 5
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            assert evaluated(stage) == expected


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_the_best_model_is_loaded_at_the_end_also_where_only_models_are_saved(
    quick: bool, tmp_path: Path
) -> None:
    for stage, only in ((3, True),) if quick else ((1, True), (2, False), (3, False)):
        with subtest(f"stage {stage}, only models {only}"):
            folder = tmp_path / str(stage)
            # The highest loss of what is trained on counts as the best, so that it is not the last.
            arguments = arguments_of(
                folder,
                eval_strategy="steps",
                eval_steps=1,
                save_strategy="steps",
                save_steps=1,
                save_total_limit=2,
                load_best_model_at_end=True,
                greater_is_better=True,
                save_only_model=only,
            )
            trainer = trainer_of(stage, arguments, eval_dataset=samples())
            trainer.train()
            assert_sharded(trainer, stage)
            best = Path(trainer.state.best_model_checkpoint)
            assert best.name == "checkpoint-1"
            found = whole(trainer)
            assert (best / "optimizer.pt").exists() != only
            if rank() == 0:
                plain = LlamaForCausalLM.from_pretrained(best).state_dict()
                last = LlamaForCausalLM.from_pretrained(folder / "checkpoint-4").state_dict()
                assert all(torch.equal(found[name], plain[name]) for name in plain)
                assert any(not torch.equal(found[name], last[name]) for name in last)
            if only:  # weights are resumed, and the optimizer begins anew
                again = trainer_of(stage, arguments_of(folder, max_steps=3), llama(seed=8))
                again.train(resume_from_checkpoint=str(best))
                assert again.state.global_step == 3


@pytest.mark.slow
@distributed(world_size=2)
def test_training_goes_on_with_the_same_trainer_and_optimizer(tmp_path: Path) -> None:
    def twice(stage: int | None) -> Run:
        trainer = trainer_of(stage, arguments_of(tmp_path, max_steps=3, lr_scheduler_type="constant"))
        trainer.train()
        found = run(trainer)
        if stage is not None:
            assert_sharded(trainer, stage)
        return found

    expected = twice(None)
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            assert_same(twice(stage), expected)
    with subtest("a new model for each run"):
        trainer = trainer_of(2, arguments_of(tmp_path, max_steps=2), model_init=lambda: llama())
        first, second = run(trainer), run(trainer)
        assert_same(second, first)
