"""transformers' Trainer on two ranks: training, saving, resuming, by the mixin and by rebinding.

Oracle: the same Trainer on plain Accelerate, which wraps in DDP. Tolerance 0 where there is one reduction for
each step, for logged losses, norms and weights; norms are those of DDP's gradients in fp64, rounded once as
the engine's are (torch adds up in fp32).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer

from tests.harness import distributed, rank, run_ranks, subtest
from tests.integrations.trainer_support import (
    STAGES,
    arguments_of,
    assert_same,
    assert_sharded,
    llama,
    run,
    samples,
    trainer_of,
    whole,
)
from zero_strategy.transformers import rebinding


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_ten_steps_equal_ddp_bit_for_bit_by_the_mixin_and_by_rebinding(quick: bool, tmp_path: Path) -> None:
    def arguments() -> Any:
        return arguments_of(tmp_path, max_steps=10)

    with subtest("ddp"):
        expected = run(trainer_of(None, arguments()))
        assert len(expected.losses) == 10 and len(set(expected.losses)) == 10
    for stage in (2,) if quick else (1, 3):
        with subtest(f"stage {stage}"):
            trainer = trainer_of(stage, arguments())
            assert_same(run(trainer), expected)
            assert_sharded(trainer, stage)
    rebinding.install()
    rebinding.install()
    with subtest("rebound, stage 3, which is the default"):
        trainer = Trainer(llama(), arguments(), train_dataset=samples())
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        assert losses == expected.losses
        assert_sharded(trainer, 3)
        found = whole(trainer)
        assert all(torch.equal(found[name], weight) for name, weight in expected.weights.items())


@pytest.mark.slow
@distributed(world_size=2)
def test_clipping_equals_ddp_and_the_norm_before_is_logged(tmp_path: Path) -> None:
    expected = run(trainer_of(None, arguments_of(tmp_path, max_grad_norm=1e6, max_steps=1)))
    with subtest("ddp"):
        clipped = trainer_of(None, arguments_of(tmp_path, max_grad_norm=0.3))
        clipped.train()
    norms = [log["grad_norm"] for log in clipped.state.log_history if "grad_norm" in log]
    assert all(norm > 0.3 for norm in norms)
    for stage, max_norm in ((1, 0.3), (3, 0.3), (2, 0.0)):
        with subtest(f"stage {stage}, {max_norm}"):
            trainer = trainer_of(stage, arguments_of(tmp_path, max_grad_norm=max_norm))
            found = run(trainer)
            assert found.norms[0] == expected.norms[0]
            if max_norm:
                torch.testing.assert_close(torch.tensor(found.norms), torch.tensor(norms), rtol=2e-5, atol=0)
            assert_sharded(trainer, stage)


# -- saving and resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_save_model_writes_what_from_pretrained_loads(quick: bool, tmp_path: Path) -> None:
    for stage in (3,) if quick else STAGES:
        for tied in (True,) if quick else (False, True):
            with subtest(f"stage {stage}, tied {tied}"):
                folder = tmp_path / f"{stage}-{tied}"
                model = llama(tie_word_embeddings=tied)
                trainer = trainer_of(stage, arguments_of(folder, max_steps=1), model)
                trainer.save_model()  # before it is sharded
                before = LlamaForCausalLM.from_pretrained(folder) if rank() == 0 else None
                if before is not None:
                    plain = llama(tie_word_embeddings=tied).state_dict()
                    assert all(torch.equal(plain[n], w) for n, w in before.state_dict().items())
                trainer.train()
                trainer.save_model(str(folder / "after"))
                found = whole(trainer)
                assert_sharded(trainer, stage)
                if rank() == 0:
                    loaded = LlamaForCausalLM.from_pretrained(folder / "after")
                    assert loaded.config.architectures == ["LlamaForCausalLM"]
                    assert all(torch.equal(found[n], w) for n, w in loaded.state_dict().items())
                    assert any(not torch.equal(found[n], w) for n, w in plain.items())


def resumed(stage: int | None, folder: str, resume: str | None, kind: str = "full") -> Any:
    """Train with checkpoints, or go on from one; return what is left."""
    arguments = arguments_of(Path(folder), save_strategy="steps", save_steps=2, warmup_steps=1)
    config = {"state_dict_type": kind}
    trainer = trainer_of(stage, arguments, llama(seed=7 if resume is None else 8), config)
    found = run(trainer, resume)
    if stage is not None:
        assert_sharded(trainer, stage)
    return found


@pytest.mark.slow
def test_a_run_is_resumed_exactly_at_any_stage_and_by_plain_transformers(tmp_path: Path) -> None:
    expected = run_ranks(resumed, 2, {"stage": None, "folder": str(tmp_path / "ddp"), "resume": None})[0]
    for stage in (1, 3):
        folder = tmp_path / f"stage{stage}"
        found = run_ranks(resumed, 2, {"stage": stage, "folder": str(folder), "resume": None})[0]
        assert_same(found, expected)
        assert {path.name for path in (folder / "checkpoint-2").iterdir()} >= {
            "model.safetensors",
            "optimizer.pt",
            "scheduler.pt",
            "trainer_state.json",
            "rng_state_1.pth",
        }
    for stage, source in ((3, "stage1"), (2, "stage3"), (1, "ddp"), (None, "stage3")):
        keywords = {
            "stage": stage,
            "folder": str(tmp_path / "again"),
            "resume": str(tmp_path / source / "checkpoint-2"),
        }
        found = run_ranks(resumed, 2, keywords)[0]
        # A checkpoint brings the logs of its run, with norms as torch adds them up if that was under DDP.
        assert_same(found, expected._replace(norms=[*found.norms[:2], *expected.norms[2:]]))


def test_checkpoints_of_shards_are_resumed_exactly_and_the_best_is_loaded(tmp_path: Path) -> None:
    keywords: dict[str, Any] = {"stage": 3, "folder": str(tmp_path), "resume": None, "kind": "sharded"}
    expected = run_ranks(resumed, 2, keywords)[0]
    names = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert names >= {"zero_model", "scheduler.pt", "config.json", "rng_state_1.pth", "training_args.bin"}
    assert not names & {"model.safetensors", "optimizer.pt"}
    keywords |= {"folder": str(tmp_path / "again"), "resume": str(tmp_path / "checkpoint-2")}
    assert_same(run_ranks(resumed, 2, keywords)[0], expected)
    assert_same(run_ranks(resumed, 2, keywords | {"stage": 1, "kind": "full"})[0], expected)


def resumed_in_bf16(folder: str, resume: str | None) -> Any:
    """Train bf16 parameters with fp32 masters, or go on from a checkpoint."""
    arguments = arguments_of(Path(folder), bf16=True, save_strategy="steps", save_steps=2)
    trainer = trainer_of(3, arguments, llama(seed=7 if resume is None else 8), {"bf16": {"enabled": "auto"}})
    found = run(trainer, resume)
    assert_sharded(trainer, 3)
    engine = trainer.engine
    assert {param.dtype for param in trainer.model.parameters()} == {torch.bfloat16}
    masters = engine.full_state_dict(dtype=torch.float32)
    return found._replace(weights={name: value.clone() for name, value in masters.items()})


@pytest.mark.slow
def test_a_run_of_bf16_parameters_is_resumed_with_its_masters(tmp_path: Path) -> None:
    expected = run_ranks(resumed_in_bf16, 2, {"folder": str(tmp_path), "resume": None})[0]
    weights = expected.weights
    assert any(not torch.equal(value, value.bfloat16().float()) for value in weights.values())
    keywords = {"folder": str(tmp_path / "again"), "resume": str(tmp_path / "checkpoint-2")}
    for num_ranks in (2, 3):
        found = run_ranks(resumed_in_bf16, num_ranks, keywords)[0]
        assert len(found.losses) == 4
        if num_ranks == 2:
            assert_same(found, expected)


@pytest.mark.slow
@distributed(world_size=2)
def test_bf16_under_autocast_equals_ddp(tmp_path: Path) -> None:
    with subtest("ddp"):
        expected = run(trainer_of(None, arguments_of(tmp_path, bf16=True)))
    for stage in (2, 3):
        with subtest(f"stage {stage}"):
            trainer = trainer_of(stage, arguments_of(tmp_path, bf16=True))
            assert_same(run(trainer), expected)
            assert_sharded(trainer, stage)
