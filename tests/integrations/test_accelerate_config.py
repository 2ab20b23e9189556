"""A ds_config.json and an Accelerate yaml under ZeroAccelerator: "auto", dummies, schedules, contradictions.

Oracles: Accelerate's table of what "auto" becomes, the rates of DeepSpeed's schedules written out below, and
torch's own optimizers. Tolerance 0, but for rates (1e-12). One process without a group; what several ranks
agree on is tested elsewhere.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
)
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler
from torch import nn

import zero_strategy as zs
from tests.integrations.accelerate_support import reset
from tests.models import Mlp, inputs
from tests.recorder import logged
from zero_strategy.accelerate import ZeroAccelerator, ZeroPlugin, environment
from zero_strategy.accelerate.launch_block import BLOCK_KEYS, Launch
from zero_strategy.accelerate.launcher import describe, launch_arguments, load_yaml, parse

ROOT = Path(__file__).parents[2]
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK_VARIABLES, environment.LAUNCH, environment.CONFIG, "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    reset()


def accelerator(config: Any = None, **keywords: Any) -> ZeroAccelerator:
    reset()
    return ZeroAccelerator(zero_plugin=ZeroPlugin(config=config), **keywords)


# -- "auto" --------------------------------------------------------------------------------------------------

AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    },
}


def loader(size: int) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(12, 15)), batch_size=size)


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_auto_becomes_what_accelerates_table_says(precision: str) -> None:
    given = accelerator(AUTO, mixed_precision=precision, gradient_accumulation_steps=2)
    model = Mlp()
    model.config = SimpleNamespace(hidden_size=40)  # as transformers has it
    model, *_ = given.prepare(model, loader(6), loader(4))
    config = given.engine_of(model).config
    zero = config.zero_optimization
    assert (config.bf16.enabled, config.fp16.enabled) == (precision == "bf16", precision == "fp16")
    assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (4, 2)
    assert config.train_batch_size == 8 and config.gradient_clipping == 1.0
    assert zero.reduce_bucket_size == 1600 and zero.stage3_prefetch_bucket_size == 1440
    assert zero.stage3_param_persistence_threshold == 400
    assert not zero.stage3_gather_16bit_weights_on_model_save and not config.auto_keys
    assert config.zero_optimization.stage == 3 and AUTO["train_batch_size"] == "auto"


def test_auto_without_loaders_or_a_hidden_size_leaves_the_defaults() -> None:
    given = accelerator(AUTO)
    model = given.prepare(Mlp())
    config, defaults = given.engine_of(model).config, zs.ZeroConfig()
    assert config.train_micro_batch_size_per_gpu == 1
    assert config.zero_optimization.reduce_bucket_size == defaults.zero_optimization.reduce_bucket_size
    widths = nn.Linear(2, 2)
    widths.config = SimpleNamespace(hidden_sizes=[8, 32, 16])  # the largest counts
    assert given.engine_of(given.prepare(widths)).config.zero_optimization.reduce_bucket_size == 1024


def test_the_configs_number_of_micro_batches_counts_where_accelerate_was_given_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {"gradient_accumulation_steps": 4}
    assert accelerator(said).gradient_accumulation_steps == 4
    assert accelerator(said, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
    for keywords in (
        {"gradient_accumulation_steps": 2},
        {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=3)},
    ):
        with pytest.raises(zs.ConfigError, match=r"gradient_accumulation_steps = [23], and the config has 4"):
            accelerator(said, **keywords)
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")  # of a launcher that was told nothing
    assert accelerator(said).gradient_accumulation_steps == 4
    monkeypatch.delenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
    both = accelerator({"gradient_accumulation_steps": "auto"}, gradient_accumulation_steps=3)
    assert both.gradient_accumulation_steps == 3


def test_the_configs_clipping_is_done_in_a_step_that_the_script_does_not_clip() -> None:
    def change(clip: float | None) -> float:
        given = accelerator({"gradient_clipping": 0.5})
        torch.manual_seed(1)
        model = Mlp()
        model, optimizer = given.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        before = [p.detach().clone() for p in model.parameters()]
        given.backward(1e3 * model(inputs()).square().mean())
        if clip is not None:
            given.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return float(
            torch.stack(
                [(p.detach() - q).norm() for p, q in zip(model.parameters(), before, strict=True)]
            ).norm()
        )

    assert change(None) == pytest.approx(0.5, rel=1e-4)
    assert change(math.inf) == pytest.approx(0.5, rel=1e-4)  # measured only
    assert change(2.0) == pytest.approx(2.0, rel=1e-4)


# -- contradictions ------------------------------------------------------------------------------------------


def test_another_way_of_sharding_beside_ours_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(zs.ConfigError) as info:
        accelerator(deepspeed_plugin=object(), fsdp_plugin=object())
    assert "2 faults" in info.value.what and "DeepSpeed" in info.value.what and "FSDP" in info.value.what
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(zs.ConfigError, match=r"DeepSpeed \(ACCELERATE_USE_DEEPSPEED=true\)"):
        accelerator()


def test_settings_of_ddp_are_honoured_said_to_be_idle_or_refused() -> None:
    handler = DistributedDataParallelKwargs(broadcast_buffers=False, static_graph=True, bucket_cap_mb=9)
    with logged() as lines:
        given = accelerator(kwargs_handlers=[handler])
    assert given.engine_of(given.prepare(Mlp())).config.broadcast_buffers is False
    assert any("bucket_cap_mb, static_graph: no effect" in line for line in lines)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(zs.ConfigError, match="communication_data_type"):
        accelerator(kwargs_handlers=[hook])


def test_a_second_accelerator_shares_the_plugin_and_may_have_another() -> None:
    first = accelerator({"zero_optimization": {"stage": 1}})
    assert ZeroAccelerator().zero_plugin is first.zero_plugin
    other = ZeroAccelerator(zero_plugin=ZeroPlugin(2))
    assert other.engine_of(other.prepare(Mlp())).config.stage == 2
    assert first.engine_of(first.prepare(Mlp())).config.stage == 1


# -- dummies -------------------------------------------------------------------------------------------------


def with_blocks(scheduler: dict[str, Any] | None = None, **optimizer: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}
    if optimizer:
        config["optimizer"] = optimizer
    if scheduler:
        config["scheduler"] = scheduler
    return config


def test_a_dummy_optimizer_becomes_the_configs() -> None:
    params = {"lr": "auto", "betas": [0.8, 0.99], "eps": "auto", "weight_decay": "auto", "torch_adam": True}
    for kind, cls, default in (("AdamW", torch.optim.AdamW, 0.0), ("Adam", torch.optim.AdamW, 0.0)):
        model = Mlp()
        given = accelerator(with_blocks(type=kind, params=params))
        model, optimizer = given.prepare(model, DummyOptim(model.parameters(), lr=0.03, eps=1e-6))
        assert type(optimizer.users) is cls
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["eps"]) == (0.03, (0.8, 0.99), 1e-6)
        assert group["weight_decay"] == default
        given.backward(model(inputs()).square().mean())
        optimizer.step()
        assert given.engine_of(model).ledger.memory["optimizer"] > 0
    model = Mlp()
    for block, cls in (
        ({"type": "Adam", "params": {"adam_w_mode": False, "lr": 1e-3}}, torch.optim.Adam),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, torch.optim.SGD),
    ):
        given = accelerator(with_blocks(**block))
        assert type(given.prepare(Mlp(), DummyOptim(model.parameters()))[1].users) is cls


def warmup(n: int, low: float, high: float, steps: int) -> float:
    return low if n < 0 else low + (high - low) * (1.0 if n >= steps else math.log(n + 1) / math.log(steps))


def rates_of(given: ZeroAccelerator, scheduler: Any, lr: float, num: int) -> list[float]:
    model = Mlp()
    dummy = (
        DummyOptim(model.parameters(), lr=lr)
        if given.zero_plugin.optimizer
        else torch.optim.AdamW(model.parameters(), lr=lr)
    )
    model, optimizer, scheduler = given.prepare(model, dummy, scheduler(dummy))
    found = []
    for step in range(num * given.gradient_accumulation_steps):
        with given.accumulate(model):
            given.backward(model(inputs(step)).square().mean())
            found += [optimizer.param_groups[0]["lr"]] if given.sync_gradients else []
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_dummy_scheduler_becomes_the_configs_and_moves_once_per_step(accumulation: int) -> None:
    adam = {"type": "AdamW", "params": {"lr": "auto"}}
    auto = {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    }
    low, high, steps, total = 0.0, 0.2, 3, 8

    def cosine(n: int) -> float:
        if n < steps:
            return high * max(0.0, warmup(n, 0.0, 1.0, steps))
        done = min(1.0, (n - steps + 1) / (total - steps))
        return high * (0.0001 + 0.9999 * (1 + math.cos(math.pi * done)) / 2)

    expected = {
        "WarmupLR": [warmup(n, low, high, steps) for n in range(-1, 9)],
        "WarmupDecayLR": [
            warmup(n, low, high, steps) if n < steps else high * max(0.0, (total - n) / (total - steps))
            for n in range(-1, 9)
        ],
        "WarmupCosineLR": [0.0, *(cosine(n) for n in range(9))],
    }
    for kind, rates in expected.items():
        names = {"WarmupLR": list(auto)[:3], "WarmupCosineLR": list(auto)[2:]}.get(kind, list(auto))
        block = {"type": kind, "params": {name: auto[name] for name in names}}
        given = accelerator(with_blocks(block, **adam), gradient_accumulation_steps=accumulation)
        found = rates_of(
            given,
            lambda dummy: DummyScheduler(dummy, total_num_steps=total, warmup_num_steps=steps),
            high,
            10,
        )
        assert found == pytest.approx(rates, rel=1e-12), kind
    given = accelerator(with_blocks(**adam), gradient_accumulation_steps=accumulation)
    make = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)  # noqa: E731
    found = rates_of(given, lambda dummy: DummyScheduler(dummy, lr_scheduler_callable=make), 1.0, 4)
    assert found == [1.0, 0.5, 0.25, 0.125]


def test_optimizers_and_schedulers_that_are_in_both_places_or_in_none_are_refused() -> None:
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    model = Mlp()
    real = torch.optim.AdamW(model.parameters())
    dummy = DummyOptim(model.parameters())
    cases: list[tuple[Any, Any, str]] = [
        (with_blocks(**adam), real, "one in the script, a AdamW"),
        (with_blocks(), dummy, "no block 'optimizer'"),
        (with_blocks(schedule), torch.optim.lr_scheduler.StepLR(real, 1), "one in the script, a StepLR"),
        (with_blocks(**adam), DummyScheduler(real), "no block 'scheduler'"),
        (with_blocks(type="OneBitAdam"), dummy, "'OneBitAdam'"),
        (with_blocks(type="AdamW", params={"lrr": 1}), dummy, "lrr"),
        (with_blocks({"type": "OneCycle"}), DummyScheduler(real), "WarmupLR, WarmupDecayLR"),
        (with_blocks({"type": "WarmupDecayLR"}), DummyScheduler(real), "lacks ['total_num_steps']"),
        (with_blocks({"type": "WarmupLR", "params": {"warm": 1}}), DummyScheduler(real), "['warm']"),
    ]
    for config, given, text in cases:
        with pytest.raises(zs.ConfigError) as info:
            accelerator(config).prepare(given)
        assert text in str(info.value), info.value


# -- yaml files and the environment --------------------------------------------------------------------------

YAML = """compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
num_machines: 1
num_processes: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
use_cpu: false
deepspeed_config:
"""


def yaml(folder: Path, *lines: str, head: str = YAML) -> Path:
    path = folder / "a.yaml"
    path.write_text(head + "".join(f"  {line}\n" for line in lines))
    return path


def launched(*arguments: str) -> Launch:
    parsed = parse([*arguments, "train.py"])
    return describe(parsed, load_yaml(parsed))


def test_a_deepspeed_yaml_is_read_as_a_config(tmp_path: Path) -> None:
    path = yaml(
        tmp_path, "zero_stage: 3", "gradient_accumulation_steps: 4", "gradient_clipping: 0.5",
        "offload_optimizer_device: none", "offload_param_device: none", "zero3_init_flag: true",
        "zero3_save_16bit_model: true", "deepspeed_multinode_launcher: standard",
        "deepspeed_moe_layer_cls_names: MoeBlock,Other",
    )  # fmt: skip
    launch = launched("--config_file", str(path))
    assert launch.num_processes == 2 and launch.origin == str(path)
    config = ZeroPlugin.of_launch(launch).config
    assert (config.stage, config.gradient_accumulation_steps, config.gradient_clipping) == (3, 4, 0.5)
    assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save
    assert config.zero_optimization.leaf_module.classes == ("MoeBlock", "Other")
    assert set(config.auto_keys) == {
        "bf16.enabled",
        "fp16.enabled",
    }  # Accelerate's precision, as for DeepSpeed
    assert str(path) in config.origin_of("zero_optimization.stage")
    beaten = launched("--config_file", str(path), "--zero_stage", "1", "--num_processes", "3")
    assert ZeroPlugin.of_launch(beaten).config.stage == 1 and beaten.num_processes == 3


def test_a_yaml_with_a_config_file_is_completed_and_every_contradiction_is_named(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    content = {
        "zero_optimization": {"stage": 3},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": 2,
    }
    file.write_text(json.dumps({**content, "optimizer": {"type": "AdamW"}}))
    path = yaml(tmp_path, f"deepspeed_config_file: {file}", "zero_stage: 3", "gradient_clipping: 0.25")
    plugin = ZeroPlugin.of_launch(launched("--config_file", str(path)))
    assert plugin.config.gradient_clipping == 0.25 and plugin.optimizer["type"].value == "AdamW"
    assert plugin.config.origin_of("gradient_accumulation_steps") == str(file)
    path = yaml(tmp_path, f"deepspeed_config_file: {file}", "zero_stage: 2", "gradient_accumulation_steps: 8")
    with pytest.raises(zs.ConfigError) as info:
        ZeroPlugin.of_launch(launched("--config_file", str(path)))
    assert "2 faults" in info.value.what
    assert "zero_stage = 2" in info.value.what and "gradient_accumulation_steps = 8" in info.value.what


def test_unknown_nested_keys_of_a_yaml_are_all_named(tmp_path: Path) -> None:
    path = yaml(tmp_path, "zero_stage: 3", "zero_stag: 2", "foo: 1")
    path.write_text(path.read_text() + "dynamo_config:\n  dynamo_backend: EAGER\n  dynamo_modd: x\n")
    with pytest.raises(zs.ConfigError) as info:
        launched("--config_file", str(path))
    assert "3 faults" in info.value.what and "'zero_stag'" in info.value.what and "'foo'" in info.value.what
    assert (
        "'dynamo_modd' in dynamo_config" in info.value.what and "Did you mean zero_stage?" in info.value.fix
    )
    for text, found in (("nothing: here\n", "unknown keys"), ("", "cannot be read")):
        path.write_text((YAML.replace("deepspeed_config:\n", "") if text else "") + text)
        with pytest.raises(zs.ConfigError, match=found):
            launched("--config_file", str(path))


def test_the_keys_of_the_block_are_those_of_accelerates_command_line() -> None:
    options = vars(parse(["train.py"]))
    assert set(BLOCK_KEYS) <= options.keys()
    others = {"deepspeed_fields_from_accelerate_config"}
    of_deepspeed = {name for name in options if name.startswith(("deepspeed_", "zero", "offload_"))}
    assert of_deepspeed - others <= set(BLOCK_KEYS)


def test_a_launchers_command_line_is_recognised() -> None:
    rest = ["--config_file", "a.yaml", "-m", "zero_strategy.run", "train.py"]
    for head in (
        ["python", "/venv/bin/accelerate", "launch"],
        ["accelerate", "launch"],
        ["python", "/venv/bin/accelerate-launch"],
        ["python", "-m", "accelerate.commands.launch"],
        ["python", "-m", "accelerate.commands.accelerate_cli", "launch"],
    ):
        assert launch_arguments([*head, *rest]) == rest, head
    for other in (["torchrun", "train.py"], ["accelerate", "config"], ["bash", "-c", "accelerate launch x"]):
        assert launch_arguments(other) is None


def test_what_deepspeeds_launcher_hands_over_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", "true")
    assert ZeroPlugin.from_environment().config.stage == 1
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    monkeypatch.setenv(environment.CONFIG, str(file))
    assert ZeroPlugin.from_environment().config.stage == 2
    environment.pass_on(Launch({"zero_stage": 3}, "a.yaml", 1))
    assert ZeroPlugin.from_environment().config.stage == 3
    environment.pass_on(Launch({"zero_stage": 3}, "a.yaml", 2))
    with pytest.raises(zs.ConfigError) as info:
        ZeroAccelerator()
    assert "2 processes were asked for (a.yaml), and 1 was started" in info.value.what
    for name in (environment.LAUNCH, environment.CONFIG):
        monkeypatch.delenv(name)
    for name in ("ZERO_STAGE", "ZERO3_SAVE_16BIT_MODEL"):
        monkeypatch.delenv(f"ACCELERATE_DEEPSPEED_{name}")
    assert ZeroPlugin.from_environment().config.stage == 3  # nobody has asked


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_our_yaml_files_load_and_say_what_they_are_for(stage: int) -> None:
    path = ROOT / "configs" / "accelerate" / f"zero{stage}.yaml"
    launch = launched("--config_file", str(path))
    config = ZeroPlugin.of_launch(launch).config
    assert config.stage == stage and launch.num_processes == 2
    assert path.read_text().startswith(f"# ZeRO stage {stage} for a script that uses Accelerate")


def test_every_yaml_of_ours_is_loaded_by_a_test() -> None:
    names = sorted(path.name for path in (ROOT / "configs" / "accelerate").iterdir())
    assert names == ["zero1.yaml", "zero2.yaml", "zero3.yaml"]


# -- versions ------------------------------------------------------------------------------------------------


def test_versions_outside_the_tested_range_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.34.2", "1.99.0", "2.0.0"):
        monkeypatch.setattr("importlib.metadata.version", lambda _, version=version: version)
        with pytest.raises(zs.ConfigError, match=rf"needs accelerate 1\.\d+\.\.1\.\d+, and {version}"):
            ZeroAccelerator()
