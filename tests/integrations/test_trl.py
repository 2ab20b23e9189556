"""TRL's trainers on two ranks, with and without adapters, with reference models and generation.

Oracle: the same trainer on plain Accelerate, which wraps in DDP. Tolerance 0 for logged losses and rewards
and for weights; norms are torch's own sum in fp32 there, and agree to rounding. What is sampled is the same,
since no more random numbers are drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import peft
from transformers import LlamaForCausalLM

from tests.harness import distributed, rank, subtest
from tests.integrations.trainer_support import STAGES, assert_sharded, whole
from tests.integrations.trl_support import lora, model_folder, trainer_of
from zero_strategy.front_ends.engines import find_engine
from zero_strategy.transformers import sharded_from_pretrained

LOGGED = ("loss", "reward", "kl", "rewards/margins", "logps/chosen", "completions/mean_length")


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [{k: log[k] for k in LOGGED if k in log} for log in trainer.state.log_history if "loss" in log]


def compare(kind: str, stages: tuple[int, ...], tmp_path: Path, **settings: Any) -> None:
    """Train under DDP and at some stages, and require the same bits."""
    folder = model_folder(tmp_path)
    with subtest(f"{kind} under ddp"):
        plain = trainer_of(kind, None, folder, tmp_path, **settings)
        plain.train()
        expected, weights = logs_of(plain), whole(plain)
        assert len(expected) == 3 and len({tuple(log.values()) for log in expected}) == 3, expected
        first = LlamaForCausalLM.from_pretrained(folder).state_dict()
        has_moved = [n for n, weight in first.items() if n in weights and (weight != weights[n]).any()]
        assert rank() or has_moved or any((w != 0).all() for n, w in weights.items() if "lora_B" in n)
    for stage in stages:
        with subtest(f"{kind}, stage {stage}, {settings}"):
            trainer = trainer_of(kind, stage, folder, tmp_path, **settings)
            trainer.train()
            assert logs_of(trainer) == expected
            assert_sharded(trainer, stage)
            for name, weight in whole(trainer).items():
                assert torch.equal(weight, weights[name]), name


@distributed(world_size=2, timeout=200)
def test_sft_with_adapters_equals_ddp_at_stage_3(tmp_path: Path) -> None:
    compare("sft", (3,), tmp_path, peft_config=lora())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
@distributed(world_size=2, timeout=500)
def test_trainers_equal_ddp_at_every_stage_with_and_without_adapters(tmp_path: Path, kind: str) -> None:
    compare(kind, STAGES, tmp_path)
    compare(kind, STAGES, tmp_path, peft_config=lora())


@pytest.mark.slow
@distributed(world_size=2, timeout=500)
def test_reference_models_are_sharded_and_follow_what_is_trained_as_under_ddp(tmp_path: Path) -> None:
    for kind in ("dpo", "grpo"):
        settings = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
        folder = model_folder(tmp_path)
        plain = trainer_of(kind, None, folder, tmp_path, **settings)
        plain.train()
        reference = plain.ref_model.state_dict()
        for stage in STAGES:
            with subtest(f"{kind}, stage {stage}"):
                trainer = trainer_of(kind, stage, folder, tmp_path, **settings)
                engine = find_engine(trainer.ref_model)
                assert (engine is not None) == (stage == 3)
                trainer.train()
                assert logs_of(trainer) == logs_of(plain)
                found = trainer.ref_model.state_dict() if engine is None else engine.full_state_dict()
                for name, weight in found.items():
                    assert torch.equal(weight, reference[name]), name
                assert_sharded(trainer, stage)


@pytest.mark.slow
@distributed(world_size=2, timeout=500)
def test_reference_scores_are_computed_before_training_begins(tmp_path: Path) -> None:
    """The model runs before it is prepared; at stage 3 it is sharded by then."""
    for adapters in (None, lora()):
        compare(
            "dpo",
            (1, 3),
            tmp_path / str(adapters is None),
            precompute_ref_log_probs=True,
            peft_config=adapters,
        )


@pytest.mark.slow
@distributed(world_size=2, timeout=500)
def test_an_adapter_that_is_trained_on_has_its_first_self_as_reference(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    if rank() == 0:
        torch.manual_seed(3)
        adapted = peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder), lora())
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.1)
        adapted.save_pretrained(tmp_path / "adapter")
    torch.distributed.barrier()

    def adapted_model() -> Any:
        base = LlamaForCausalLM.from_pretrained(folder)
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)

    plain = trainer_of("dpo", None, folder, tmp_path, model=adapted_model())
    plain.train()
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            trainer = trainer_of("dpo", stage, folder, tmp_path, model=adapted_model())
            assert "ref" in trainer.model.peft_config
            trainer.train()
            assert logs_of(trainer) == logs_of(plain)
            assert_sharded(trainer, stage)


@pytest.mark.slow
@distributed(world_size=2, timeout=500)
def test_generation_gathers_once_or_block_by_block_and_samples_the_same(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    found = []
    for gathers_once in (True, False):
        with subtest(f"ds3_gather_for_generation={gathers_once}"):
            trainer = trainer_of("grpo", 3, folder, tmp_path, ds3_gather_for_generation=gathers_once)
            trainer.train()
            assert_sharded(trainer, 3)
            engine = trainer.engine
            found.append((logs_of(trainer), engine.ledger.comm["all_gather"]["calls"]))
            assert engine.ledger.memory["unsharded"] == 0
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1], "gathered once, and as often as block by block"


@pytest.mark.slow
@distributed(world_size=2, timeout=500)
def test_a_model_without_values_yet_is_trained_with_adapters_by_sft(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = sharded_from_pretrained(LlamaForCausalLM, folder)
            trainer = trainer_of("sft", stage, folder, tmp_path, model=model, peft_config=lora())
            trainer.train()
            assert_sharded(trainer, stage)
            base = LlamaForCausalLM.from_pretrained(folder).state_dict()
            for name, weight in whole(trainer).items():
                plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
                assert "lora_" in name or torch.equal(weight, base[plain]), name
