"""Adapters of a sharded model are saved whole and small, load into plain PEFT, and resume.

Oracle: plain `PeftModel.from_pretrained` on an unsharded base gives the logits of the sharded model,
tolerance 0; a resumed run gives the losses of one that was not interrupted, tolerance 0. Files are read with
safetensors' own reader.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.peft_support import (
    KINDS,
    STAGES,
    adapted,
    assert_engine,
    assert_equal,
    batch_of,
    llama,
    lora,
    shard,
    train,
)
from zero_strategy.peft import adapter_state_dict, load_adapter, save_adapters

SAVED = ("lora, everywhere", "dora", "modules to save", "trainable tokens")


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model.eval()(**batch_of(9, 0)).logits
    return logits


def stored(folder: Path) -> dict[str, Tensor]:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_saved_adapters_are_small_and_load_in_plain_peft_with_the_same_logits(tmp_path: Path) -> None:
    for kind in SAVED:
        stages = STAGES if kind == SAVED[0] else (3,)
        for stage in stages:
            with subtest(f"{kind}, stage {stage}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # PEFT says that it saves targeted embeddings too
                folder = tmp_path / f"{kind}-{stage}"
                model = adapted(llama(), KINDS[kind]())
                engine, optimizer = shard(model, stage)
                train(model, optimizer, 2)
                engine.ledger.reset()
                save_adapters(model, folder)
                logits = logits_of(model)
                assert_engine_has_saved(engine, stage, folder)
                if rank() == 0:
                    twin = peft.PeftModel.from_pretrained(llama(), folder)
                    assert torch.equal(logits_of(twin), logits)
                engine.close()


def assert_engine_has_saved(engine: zs.ZeroEngine, stage: int, folder: Path) -> None:
    """The file has tensors of whole shapes, and no more than the adapter's."""
    assert engine.config.stage == stage
    if rank() == 0:
        tensors = stored(folder)
        assert tensors and all(t.numel() and (t.dim() > 1 or "lora_A" not in k) for k, t in tensors.items())
        whole = sum(p.numel() for p in engine.model.parameters())
        assert sum(t.numel() for t in tensors.values()) < 0.7 * whole


@distributed(world_size=2, timeout=120)
def test_several_adapters_are_saved_and_loaded_one_by_one(tmp_path: Path) -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            folder = tmp_path / str(stage)
            model = adapted(llama(), lora(), other=lora(r=2))
            engine, optimizer = shard(model, stage)
            train(model, optimizer, 1)
            save_adapters(model, folder)
            assert rank() or {p.name for p in folder.iterdir()} >= {"adapter_model.safetensors", "other"}
            state = adapter_state_dict(model, ["other"])
            assert rank() or (state and all(".other." in name for name in state))
            model.set_adapter("other")  # frozen when it was sharded: saved and loaded all the same
            before = logits_of(model)
            engine.load_full_state_dict(
                {name: torch.zeros_like(v) for name, v in state.items()}, strict=False
            )
            assert not torch.equal(logits_of(model), before)
            load_adapter(model, folder / "other", "other")
            assert torch.equal(logits_of(model), before)
            with expect_error(zs.ConfigError, ["'third'", "'default', 'other'"]):
                load_adapter(model, folder, "third")
            with expect_error(zs.CheckpointError, ["does not fit the adapter 'default'", "missing"]):
                load_adapter(model, other_kind(tmp_path), "default")
            engine.close()


def other_kind(folder: Path) -> Path:
    """An adapter on other layers, as plain PEFT saves it."""
    path = folder / "plain"
    if rank() == 0 and not path.exists():
        adapted(llama(), lora(target_modules=["k_proj"])).save_pretrained(path)
    torch.distributed.barrier()
    return path


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_adapters_resume_under_strict_load_from_what_is_trained_alone(tmp_path: Path) -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            engine, optimizer = shard(model := adapted(llama(), KINDS["modules to save"]()), stage)
            train(model, optimizer, 2)
            engine.save_checkpoint(tmp_path / str(stage), trainable_only=True)
            losses = train(model, optimizer, 2, start=2)
            weights = engine.full_state_dict()
            engine.close()

            engine, optimizer = shard(model := adapted(llama(), KINDS["modules to save"]()), stage)
            engine.load_checkpoint(tmp_path / str(stage))
            assert train(model, optimizer, 2, start=2) == losses
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), weights)
            engine.close()

            engine, _ = shard(adapted(llama(), lora(target_modules=["q_proj", "down_proj", "k_proj"])), stage)
            with expect_error(zs.CheckpointError, ["k_proj.lora_A.default.weight"]):
                engine.load_checkpoint(tmp_path / str(stage))
            engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=60)
def test_plain_save_pretrained_at_stage_3_is_an_error_and_no_file_of_nothing(tmp_path: Path) -> None:
    model = adapted(llama(), lora())
    engine, _ = shard(model, 3)
    with expect_error(zs.ShardingError, ["which is sharded at this moment", "full_state_dict"]):
        model.save_pretrained(tmp_path / "adapter")
    assert not list(tmp_path.rglob("*.safetensors"))
    engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=60)
def test_pissa_is_saved_as_the_lora_that_its_residual_base_needs(tmp_path: Path) -> None:
    """PEFT's own conversion, with the state gathered here: it loads on the original base."""
    initial = tmp_path / "initial"
    model = adapted_pissa()
    if rank() == 0:
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(initial)
        model.peft_config["default"].init_lora_weights = "pissa"
    torch.distributed.barrier()
    engine, optimizer = shard(model, 3)
    train(model, optimizer, 2)
    logits = logits_of(model)
    save_adapters(model, tmp_path / "trained")
    assert engine.config.stage == 3
    if rank() == 0:
        fresh = adapted_pissa()
        peft.set_peft_model_state_dict(fresh, peft.load_peft_weights(str(tmp_path / "trained")))
        assert torch.equal(logits_of(fresh), logits)
        fresh.save_pretrained(tmp_path / "lora", path_initial_model_for_weight_conversion=str(initial))
        twin: Any = peft.PeftModel.from_pretrained(llama(), tmp_path / "lora")
        torch.testing.assert_close(logits_of(twin), logits, atol=1e-4, rtol=1e-4)
    engine.close()


def adapted_pissa() -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), KINDS["pissa"]()).train()
