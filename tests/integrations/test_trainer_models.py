"""What else a Trainer does with a model, at stage 3 and below: recompute, generate, resize, compile, shrink.

Oracle: the same Trainer on plain Accelerate, which wraps in DDP; tolerance 0. Ranks stop generating at
different lengths, which a test makes sure of.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    StoppingCriteria,
    StoppingCriteriaList,
)

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations import tiny_models
from tests.integrations.accelerate_support import reset
from tests.integrations.lightning_support import make_trainer, zero
from tests.integrations.trainer_support import (
    SMALL_BUCKETS,
    STAGES,
    VOCAB,
    Run,
    arguments_of,
    assert_same,
    assert_sharded,
    llama,
    run,
    samples,
    trainer_of,
)
from zero_strategy.transformers import ZeroPlugin, ZeroTrainerMixin


@pytest.mark.slow
@distributed(world_size=2)
def test_gradient_checkpointing_of_both_kinds_equals_ddp(tmp_path: Path) -> None:
    def trained(stage: int | None, reentrant: bool) -> Run:
        arguments = arguments_of(
            tmp_path,
            max_steps=3,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        trainer = trainer_of(stage, arguments)
        found = run(trainer)
        assert trainer.model.is_activation_checkpointing
        if stage is not None:
            assert_sharded(trainer, stage)
        return found

    for reentrant in (True, False):
        expected = trained(None, reentrant)
        for stage in (1, 3):
            with subtest(f"stage {stage}, reentrant {reentrant}"):
                assert_same(trained(stage, reentrant), expected)


# -- generating --------------------------------------------------------------------------------------------


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):  # type: ignore[misc]
    pass


def t5() -> Any:
    torch.manual_seed(7)
    return tiny_models.t5()


class Until(StoppingCriteria):  # type: ignore[misc]
    """Ends when so many tokens are there."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def seq2seq(stage: int | None, folder: Path, model: Any, **keywords: Any) -> Any:
    reset()
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=1,
        max_steps=2,
        learning_rate=0.01,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        predict_with_generate=True,
        generation_max_length=14,
        max_grad_norm=1e6,
    )
    common: dict[str, Any] = {"train_dataset": samples(8), "eval_dataset": samples(6, seed=9)}
    if stage is None:
        return Seq2SeqTrainer(model, arguments, **common)
    plugin = ZeroPlugin(stage=stage, **keywords, **SMALL_BUCKETS)
    return ZeroSeq2SeqTrainer(model, arguments, zero_plugin=plugin, **common)


class CountForwards:
    def __init__(self, model: torch.nn.Module) -> None:
        self.number = 0
        model.register_forward_pre_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.number += 1


@distributed(world_size=2)
def test_predict_with_generate_ends_though_ranks_stop_at_different_lengths(tmp_path: Path) -> None:
    def generated(stage: int | None, **keywords: Any) -> tuple[list[np.ndarray], int]:
        model = t5()
        trainer = seq2seq(stage, tmp_path, model, **keywords)
        count = CountForwards(model)
        stop = StoppingCriteriaList([Until(4 + 5 * rank())])
        first = trainer.predict(samples(6, seed=9), stopping_criteria=stop).predictions
        number = count.number
        if stage is None:  # plain Accelerate would wrap this model in DDP no more
            trainer = seq2seq(stage, tmp_path, t5())
        trainer.train()
        if stage is not None:
            assert_sharded(trainer, stage)
        last = trainer.predict(samples(6, seed=9), stopping_criteria=stop).predictions
        return [first, last], number

    expected, number = generated(None)
    assert number == 3 * (3 + 5 * rank() + 1)  # three samples; tokens after the first, and a loss
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            found, own = generated(stage)
            assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
            assert own == number if stage < 3 else own >= number
    with subtest("stage 3, gathered once"):
        found, own = generated(3, gathers_to_generate=True)
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
        assert own == number


def prompt_and_lengths() -> tuple[Tensor, dict[str, Any]]:
    """This rank's prompt, and settings by which ranks generate tokens of different numbers."""
    prompts = torch.tensor([[5, 9, 11], [21, 4, 33]])[rank() : rank() + 1]
    return prompts, {"max_new_tokens": 3 + 4 * rank(), "do_sample": False, "eos_token_id": None}


@distributed(world_size=2)
def test_generate_of_a_sharded_model_waits_for_the_last_rank_and_a_whole_one_is_free(tmp_path: Path) -> None:
    plain = llama()
    prompts, lengths = prompt_and_lengths()
    expected = plain.generate(prompts, **lengths)
    trainer = trainer_of(3, arguments_of(tmp_path, max_steps=1))
    trainer.model.eval()
    trainer.accelerator.prepare_model(trainer.model, evaluation_mode=True)
    assert torch.equal(trainer.model.generate(prompts, **lengths), expected)
    engine = trainer.engine
    with engine.unsharded_params():
        sent = engine.ledger.comm["all_gather"]["bytes_sent"]
        if rank() == 0:  # alone
            assert torch.equal(trainer.model.generate(prompts, **lengths), expected)
    assert engine.ledger.comm["all_gather"]["bytes_sent"] == sent
    trainer.train()
    assert_sharded(trainer, 3)


class Generating(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@distributed(world_size=2)
def test_generate_in_lightning_waits_for_the_last_rank_too() -> None:
    prompts, lengths = prompt_and_lengths()
    expected = llama().generate(prompts, **lengths)
    module = Generating()
    trainer = make_trainer(zero(3), max_steps=1)
    trainer.fit(module, DataLoader(samples(4), batch_size=1))
    sent = trainer.strategy.engine.ledger.comm["all_gather"]["bytes_sent"]
    with torch.no_grad():
        assert torch.equal(module.model.eval().generate(prompts, **lengths), expected)
    assert trainer.strategy.engine.ledger.comm["all_gather"]["bytes_sent"] > sent > 0


# -- other surgery -----------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(world_size=2)
def test_embeddings_may_be_resized_until_the_model_is_sharded(tmp_path: Path) -> None:
    def trained(stage: int | None) -> Run:
        trainer = trainer_of(stage, arguments_of(tmp_path, max_steps=2))
        torch.manual_seed(3)
        trainer.model.resize_token_embeddings(VOCAB + 5)
        found = run(trainer)
        if stage is not None:
            assert_sharded(trainer, stage)
        return found

    expected = trained(None)
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            assert_same(trained(stage), expected)
            if rank() == 0:
                assert expected.weights["model.embed_tokens.weight"].shape == (VOCAB + 5, 20)
    with subtest("later"):
        trainer = trainer_of(3, arguments_of(tmp_path, max_steps=1))
        trainer.train()
        with expect_error(zs.ShardingError, "embed_tokens"):
            trainer.model.resize_token_embeddings(VOCAB + 5)


def too_large(module: Any, args: Any, output: Tensor) -> None:
    if output.shape[0] > 2:
        raise RuntimeError("CUDA out of memory. Tried to allocate")


@pytest.mark.slow
@distributed(world_size=2)
def test_auto_find_batch_size_begins_anew_with_smaller_batches(tmp_path: Path) -> None:
    def trained(stage: int | None, find: bool) -> Run:
        model = llama()
        if find:
            model.model.layers[1].mlp.register_forward_hook(too_large)
        arguments = arguments_of(
            tmp_path, per_device_train_batch_size=3 if find else 2, auto_find_batch_size=find
        )
        trainer = trainer_of(stage, arguments, model)
        found = run(trainer)
        assert trainer._train_batch_size == 2
        if stage is not None:
            assert_sharded(trainer, stage)
        return found

    expected = trained(None, find=False)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            assert_same(trained(stage, find=True), expected)


@pytest.mark.slow
@distributed(world_size=2, timeout=240)
def test_a_compiled_model_trains_as_it_does_uncompiled(tmp_path: Path) -> None:
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            runs = []
            for compiled in (False, True):
                keywords = {"torch_compile": True, "torch_compile_backend": "eager"} if compiled else {}
                trainer = trainer_of(stage, arguments_of(tmp_path, max_steps=2, **keywords))
                runs.append(run(trainer))
                assert_sharded(trainer, stage)
                assert (trainer.model._compiled_call_impl is not None) == compiled
            assert_same(runs[1], runs[0], tolerance=1e-5)
