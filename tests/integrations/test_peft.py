"""PEFT's adapters train on the engine as they do under DDP.

Oracle: the same adapted model under torch's DDP at 2 ranks, fp32, tolerance 0 in losses and in every weight
(two ranks add the same two numbers in the same order). PEFT and transformers are the real packages, the model
is a tiny Llama made from a config; dropout is off.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers.quantizers import AutoHfQuantizer

import zero_strategy as zs
from tests.harness import distributed, expect_error, rank, subtest
from tests.integrations.accelerate_support import accelerator_of
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
    train_ddp,
    trained,
)
from zero_strategy.accelerate import ZeroAccelerator
from zero_strategy.peft import update_and_allocate

QUICK = ("dora, everywhere",)


def compare_with_ddp(kind: str, stages: tuple[int, ...]) -> None:
    losses, weights = train_ddp(adapted(llama(), KINDS[kind]()))
    for stage in stages:
        with subtest(f"{kind}, stage {stage}"):
            model = adapted(llama(), KINDS[kind]())
            engine, optimizer = shard(model, stage)
            assert train(model, optimizer) == losses
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), weights)
            engine.close()


@distributed(world_size=2, timeout=120)
def test_adapters_train_as_under_ddp_in_every_bit_at_stage_3() -> None:
    for kind in QUICK:
        compare_with_ddp(kind, (3,))


@pytest.mark.slow
@distributed(world_size=2, timeout=400)
def test_adapters_of_every_kind_train_as_under_ddp_in_every_bit_at_every_stage() -> None:
    for kind in KINDS:
        compare_with_ddp(kind, STAGES)


# -- adapters that change while they are trained -------------------------------------------------------------


def switching(model: nn.Module, make_step) -> list[float]:
    """Train "default", then "other", then both ways of looking at the base; return all losses."""
    losses = []
    for number, name in enumerate(["default", "other", "default", "other"]):
        model.set_adapter(name)
        losses += make_step(number)
        with torch.no_grad(), model.disable_adapter():
            losses.append(float(model(**batch_of(number, 0)).loss))
    return losses


def with_two_adapters() -> nn.Module:
    """Both trainable when the model is wrapped, as DDP needs them to be."""
    model = adapted(llama(), lora(), other=lora(r=2, target_modules=["q_proj", "lm_head"]))
    model.base_model.set_requires_grad(["default", "other"])
    return model


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_adapters_are_switched_and_disabled_mid_run_as_under_ddp() -> None:
    plain = with_two_adapters()
    module = nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(trained(plain), lr=1e-2)
    losses = switching(plain, lambda n: train(module, optimizer, 1, start=n))
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = with_two_adapters()
            engine, optimizer = shard(model, stage)
            assert switching(model, lambda n, m=model, o=optimizer: train(m, o, 1, start=n)) == losses
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), plain.state_dict())
            engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_an_adapter_that_is_switched_on_later_is_trained_once_the_optimizer_has_it() -> None:
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = adapted(llama(), lora(), other=lora(r=2))
            engine, optimizer = shard(model, stage)
            train(model, optimizer, 1)
            before = engine.full_state_dict()
            model.set_adapter("other")
            optimizer.add_param_group({"params": trained(model)})
            train(model, optimizer, 2)
            after = engine.full_state_dict()
            changed = {name for name in before if not torch.equal(before[name], after[name])}
            assert rank() or changed == {name for name in before if ".other." in name}
            engine.close()


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_merging_and_unmerging_in_unsharded_params_is_kept_and_undone() -> None:
    batch = batch_of(0, 0)
    for stage in STAGES:
        for safe in (False, True):  # in place, and by another tensor under the parameter
            with subtest(f"stage {stage}, safe_merge={safe}"):
                model = adapted(llama(), lora(use_dora=True, lora_alpha=60))
                twin = copy.deepcopy(model).eval()
                engine, optimizer = shard(model, stage)
                base = engine.full_state_dict()
                with engine.unsharded_params(writeback=True):
                    model.merge_adapter(safe_merge=safe)
                twin.merge_adapter(safe_merge=safe)
                with torch.no_grad():
                    merged = model.eval()(**batch).logits
                    assert torch.equal(merged, twin(**batch).logits)
                assert_equal(engine.full_state_dict(), twin.state_dict())
                with engine.unsharded_params(writeback=True):
                    model.unmerge_adapter()
                twin.unmerge_adapter()
                assert_equal(engine.full_state_dict(), twin.state_dict())
                moved = [name for name in base if "base_layer.weight" in name]
                assert rank() or all(torch.allclose(twin.state_dict()[n], base[n], atol=1e-6) for n in moved)
                train(model.train(), optimizer, 1)
                assert_engine(engine, stage)
                engine.close()


# -- AdaLoRA -------------------------------------------------------------------------------------------------


def adalora() -> peft.AdaLoraConfig:
    return peft.AdaLoraConfig(
        task_type="CAUSAL_LM",
        init_r=4,
        target_r=2,
        tinit=1,
        tfinal=2,
        deltaT=1,
        total_step=8,
        target_modules=["q_proj", "down_proj"],
        orth_reg_weight=0.5,
    )


def train_adalora(module: nn.Module, optimizer: torch.optim.Optimizer, update) -> list[float]:
    losses = []
    for step in range(7):
        loss = module(**batch_of(step, rank())).loss
        loss.backward()
        optimizer.step()
        update(step)
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


@distributed(world_size=2, timeout=120)
def test_adalora_chooses_ranks_as_under_ddp() -> None:
    plain = adapted(llama(), adalora())
    module = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(trained(plain), lr=1e-2)
    losses = train_adalora(module, optimizer, plain.base_model.update_and_allocate)
    pattern = plain.peft_config["default"].rank_pattern
    assert sum(sum(kept) for kept in pattern.values()) == 2 * len(pattern), "no rank was given up"
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = adapted(llama(), adalora())
            engine, optimizer = shard(model, stage)
            found = train_adalora(model, optimizer, lambda step, m=model: update_and_allocate(m, step))
            assert found == losses
            assert model.peft_config["default"].rank_pattern == pattern
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), plain.state_dict())
            engine.close()


# -- 16 bits -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_fp32_adapters_on_a_bf16_base_share_blocks_and_train_as_under_ddp() -> None:
    def build() -> nn.Module:
        return adapted(llama(torch.bfloat16), lora())

    dtypes = {param.dtype for param in build().base_model.model.model.layers[0].parameters()}
    assert dtypes == {torch.float32, torch.bfloat16}
    losses, weights = train_ddp(build())
    for stage in STAGES:
        with subtest(f"stage {stage}"):
            model = build()
            engine, optimizer = shard(model, stage)
            assert train(model, optimizer) == losses
            assert engine.ledger.memory["master"] == 0, "fp32 adapters are their own masters"
            assert_engine(engine, stage)
            assert_equal(engine.full_state_dict(), weights)
            engine.close()


# -- what is refused -----------------------------------------------------------------------------------------


@distributed(world_size=2, timeout=60)
def test_what_cannot_be_sharded_is_refused_by_name_and_reason() -> None:
    with subtest("adapters on meta"):
        model = peft.get_peft_model(llama(), lora(), low_cpu_mem_usage=True)
        with expect_error(zs.ConfigError, ["q_proj.lora_A.default.weight", "low_cpu_mem_usage=False"]):
            zs.ZeroEngine(model, {"zero_optimization": {"stage": 3}})
    with subtest("an adapter that is added afterwards"):
        model = adapted(llama(), lora())
        _, optimizer = shard(model, 2)
        model.add_adapter("late", lora())
        texts = [".late.weight", "was not there when the model was sharded"]
        with expect_error(zs.ShardingError, texts):
            train(model, optimizer, 1)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_a_base_that_device_map_has_placed_is_refused_by_name(tmp_path: Path) -> None:
    if rank() == 0:
        llama().save_pretrained(tmp_path / "base")
    torch.distributed.barrier()
    placed = {"model.embed_tokens": "cpu", "model.layers": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    placed["model.rotary_emb"] = "cpu"
    base = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "base", device_map=placed, offload_folder=tmp_path / f"offload-{rank()}"
    )
    with expect_error(zs.ConfigError, ["Hook of Accelerate's", "device_map", "sharded_from_pretrained"]):
        zs.ZeroEngine(base)


# -- Accelerate ----------------------------------------------------------------------------------------------


def run_script(accelerator: Any, kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """PEFT's own examples: an optimizer over all parameters, AdaLoRA's ranks chosen after the step."""
    model = adapted(llama(), adalora() if kind == "adalora" else lora(use_dora=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner, losses = accelerator.unwrap_model(model), []
    for step in range(7):
        loss = model(**batch_of(step, rank())).loss
        accelerator.backward(loss)
        optimizer.step()
        if kind == "adalora":
            inner.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        losses.append(float(loss))
    if isinstance(accelerator, ZeroAccelerator):
        assert_engine(accelerator.engine_of(inner), accelerator.engine_of(inner).config.stage)
    return losses, accelerator.get_state_dict(model)


@pytest.mark.slow
@distributed(world_size=2, timeout=120)
def test_accelerate_scripts_with_adapters_run_unchanged() -> None:
    for kind in ("adalora", "dora"):
        losses, weights = run_script(accelerator_of(None, find_unused=False), kind)
        for stage in STAGES if kind == "adalora" else (3,):
            with subtest(f"{kind}, stage {stage}"):
                found, state = run_script(accelerator_of(stage), kind)
                assert found == losses
                assert_equal(dict(state), dict(weights))


@distributed(world_size=2, timeout=120)
def test_a_quantised_base_is_refused_by_name() -> None:
    """By transformers' own quantiser for BitNet, the one that needs no other package and no GPU."""
    base = llama()
    quantiser = AutoHfQuantizer.from_config(transformers.BitNetQuantConfig(), pre_quantized=True)
    quantiser.preprocess_model(base)
    quantiser.postprocess_model(base)
    with expect_error(zs.ConfigError, ["quantised by bitnet", "not built yet", "bf16"]):
        zs.ZeroEngine(base)
