"""`--deepspeed ds_config.json` for a Trainer, without deepspeed; what is refused; the names we build on.

Oracle: the table of "auto" of transformers' own DeepSpeed integration, written out below; losses of a run
are those of the same Trainer with the same AdamW under DDP, tolerance 0.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled

import zero_strategy as zs
from tests.harness import distributed, expect_error, subtest
from tests.integrations.accelerate_support import reset
from tests.integrations.trainer_support import (
    ZeroTrainer,
    arguments_of,
    assert_sharded,
    llama,
    run,
    samples,
    trainer_of,
)
from zero_strategy.accelerate import environment
from zero_strategy.accelerate.launch_block import Launch
from zero_strategy.transformers import ZeroArgumentsMixin, ZeroPlugin, rebinding, upstream

ALL_AUTO: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
}


class Arguments(ZeroArgumentsMixin, TrainingArguments):  # type: ignore[misc]
    pass


KEYWORDS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "max_grad_norm": 0.7,
    "adam_beta1": 0.8,
    "adam_epsilon": 1e-6,
    "weight_decay": 0.05,
    "warmup_steps": 2,
}


def line(step: int) -> float:
    """Two steps of warm-up in a line, then a line down to zero; DeepSpeed's begin one step late."""
    late = max(0, step - 1)
    return late / 2 if late < 2 else max(0.0, (4 - late) / 2)


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
@distributed(world_size=2)
def test_a_ds_config_with_auto_is_resolved_from_the_arguments_without_deepspeed(
    quick: bool, tmp_path: Path
) -> None:
    assert not any(name == "deepspeed" for name in os.listdir(sysconfig.get_path("purelib")))
    file = tmp_path / f"ds_config_{os.getpid()}.json"
    file.write_text(json.dumps(ALL_AUTO))
    rebinding.install()
    reset()
    defaults = {name: getattr(arguments_of(tmp_path), name) for name in ("learning_rate", "max_steps")}
    common = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "logging_steps": 1, **defaults}
    common |= {"disable_tqdm": True, "save_strategy": "no", **KEYWORDS}
    for given in (str(file),) if quick else (ALL_AUTO, json.dumps(ALL_AUTO)):
        with subtest(f"given as {str(given)[:20]}"):
            reset()
            arguments = TrainingArguments(**common, deepspeed=given)
            trainer = Trainer(llama(), arguments, train_dataset=samples(24))
            trainer.train()
            assert_sharded(trainer, 3)
    engine = trainer.accelerator.engine_of(trainer.model)
    config, zero = engine.config, engine.config.zero_optimization
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (2, 3)
    assert config.train_batch_size == 12 and config.gradient_clipping == 0.7
    assert not config.bf16.enabled and not config.fp16.enabled
    assert zero.reduce_bucket_size == 400 and zero.stage3_prefetch_bucket_size == 360
    assert zero.stage3_param_persistence_threshold == 200
    group = trainer.optimizer.param_groups[0]
    assert type(trainer.optimizer.optimizer.optimizer) is torch.optim.AdamW
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.999), 1e-6, 0.05)
    rates = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
    assert rates == pytest.approx([0.01 * line(step) for step in range(len(rates))])
    if quick:
        return
    with subtest("the same run under plain torch's AdamW"):
        model = llama()
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.01, betas=(0.8, 0.999), eps=1e-6, weight_decay=0.05
        )
        plain = trainer_of(
            2,
            arguments_of(tmp_path, **KEYWORDS),
            model,
            train_dataset=samples(24),
            optimizers=(optimizer, LambdaLR(optimizer, line)),
        )
        found = run(plain)
        assert found.losses == [log["loss"] for log in trainer.state.log_history if "loss" in log]


@distributed(world_size=2)
def test_everything_in_which_config_and_arguments_differ_is_named_at_once(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 5,
        "gradient_accumulation_steps": 9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.5}},
    }
    reset()
    common: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    refused = {"optim": "adamw_8bit", "save_on_each_node": True}
    arguments = Arguments(**common, deepspeed=config, per_device_train_batch_size=2, **refused)
    assert arguments.deepspeed is config
    with pytest.raises(zs.ConfigError) as caught:
        ZeroTrainer(llama(), arguments, train_dataset=samples())
    said = str(caught.value)
    for text in (
        "train_batch_size = 7", "train_micro_batch_size_per_gpu = 5", "gradient_accumulation_steps = 9",
        "bf16.enabled = True", "optimizer.params.lr = 0.0003", "optimizer.params.betas = [0.9, 0.95]",
        "optimizer.params.eps = 1e-07", "scheduler.params.warmup_max_lr = 0.5",
        "optim = 'adamw_8bit' cannot update shards", "save_on_each_node = True",
    ):  # fmt: skip
        assert text in said, f"{text!r} is not in\n{said}"
    assert "gradient_clipping" not in said  # 1.0 is max_grad_norm, too
    with subtest("numbers that are known when training begins"):
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 77}}
        given = {"zero_optimization": {"stage": 2}, "scheduler": schedule}
        reset()
        trainer = ZeroTrainer(
            llama(), Arguments(**common, deepspeed=given, max_steps=2), train_dataset=samples()
        )
        with expect_error(zs.ConfigError, "warmup_num_steps = 77"):
            trainer.train()
    with subtest("said twice"):
        reset()
        arguments = Arguments(**common, deepspeed={"zero_optimization": {"stage": 2}}, max_steps=2)
        with expect_error(zs.ConfigError, "zero_plugin"):
            ZeroTrainer(llama(), arguments, zero_plugin=ZeroPlugin(stage=2))
        environment.pass_on(Launch({"zero_stage": 3}, "some.yaml", None))
        with expect_error(zs.ConfigError, "zero_optimization.stage = 2"):
            ZeroTrainer(llama(), arguments)
        del os.environ[environment.LAUNCH]


@distributed(world_size=2)
def test_an_optimizer_in_the_config_and_in_the_script_is_refused(tmp_path: Path) -> None:
    model = llama()
    given = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    plugin = ZeroPlugin(stage=2, config=config)
    trainer = ZeroTrainer(
        model, arguments_of(tmp_path), train_dataset=samples(), zero_plugin=plugin, optimizers=(given, None)
    )
    with expect_error(zs.ConfigError, "There is an optimizer in the config"):
        trainer.train()


@pytest.mark.parametrize("optimizer", ["adamw_bnb_8bit", "paged_lion_8bit", "adamw_torch_4bit"])
def test_an_8_bit_optimizer_is_refused_by_name(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for stage in (1, 3):
        with pytest.raises(zs.ConfigError, match=f"optim = '{optimizer}' cannot update shards"):
            trainer_of(stage, arguments_of(tmp_path, optim=optimizer))
    with pytest.raises(zs.ConfigError, match="bf16_full_eval = True cannot be had"):
        trainer_of(2, arguments_of(tmp_path, bf16_full_eval=True))


@distributed(world_size=2)
def test_from_pretrained_still_reports_what_is_missing(tmp_path: Path) -> None:
    model = llama()
    weights = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=weights)  # by rank 0
    torch.distributed.barrier()
    reset()
    zero = {"zero_optimization": {"stage": 3}}
    arguments = Arguments(str(tmp_path), use_cpu=True, report_to=[], deepspeed=zero)
    assert not is_deepspeed_zero3_enabled() and arguments.deepspeed is zero
    _, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}


# -- the names we build on ---------------------------------------------------------------------------------


def test_every_method_that_is_stood_in_for_is_in_the_table() -> None:
    from zero_strategy.transformers.methods import BODIES

    table = {name.path for name in upstream.REBOUND}
    assert {f"Trainer.{name}" for name in BODIES} | {
        "TrainingArguments.__post_init__",
        "Trainer.create_accelerator_and_postprocess",
    } == table


def test_other_versions_of_transformers_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    arguments = arguments_of(tmp_path)
    real = importlib.metadata.version
    for version in ("4.57.1", "5.99.0", "6.0.0"):

        def other(package: str, version: str = version) -> Any:
            return version if package == "transformers" else real(package)

        monkeypatch.setattr("importlib.metadata.version", other)
        with pytest.raises(zs.ConfigError, match=rf"needs transformers 5\.\d+\.\.5\.\d+, and {version}"):
            trainer_of(2, arguments)
