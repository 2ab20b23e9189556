"""The strategy names in Lightning's registries, and Lightning's own launcher.

Oracle: a fresh interpreter per case, since an import order can be tried only once in a process. No tolerance:
names are there or not. The script test runs a user's program as a user does, with `python script.py`.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zero_strategy as zs
from zero_strategy.lightning.other_strategies import KEYWORDS

ROOT = Path(__file__).parents[2]
NAMES = ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero3_nvme"]


def run_python(*arguments: str, timeout: float = 90.0, folder: Path | None = None, **variables: str) -> str:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment |= variables
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=folder,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


IMPORT_ORDERS = f"""
import sys
names = {NAMES!r}
import zero_strategy
assert not any(m.partition(".")[0] in ("lightning", "pytorch_lightning") for m in sys.modules)
import importlib.util
importlib.util.find_spec("lightning.pytorch.strategies")  # asking alone must not use the hook up
import lightning.pytorch as lp
assert set(names) <= set(lp.strategies.StrategyRegistry.available_strategies())
assert not hasattr(lp.strategies.__loader__.exec_module, "__wrapped__")
assert lp.strategies.__loader__.exec_module.__func__ is type(lp.strategies.__loader__).exec_module
import lightning.fabric as fabric  # has come with it
assert set(names) <= set(fabric.strategies.STRATEGY_REGISTRY.available_strategies())
import pytorch_lightning as pl  # imported later
assert set(names) <= set(pl.strategies.StrategyRegistry.available_strategies())
import lightning_fabric
assert set(names) <= set(lightning_fabric.strategies.STRATEGY_REGISTRY.available_strategies())
assert not [f for f in sys.meta_path if type(f).__module__.startswith("zero_strategy")]
zero_strategy.lightning.register()  # again: nothing happens
one, two = lp.strategies.StrategyRegistry.get("zero2"), pl.strategies.StrategyRegistry.get("zero2")
assert isinstance(one, lp.strategies.DDPStrategy) and isinstance(two, pl.strategies.DDPStrategy)
assert type(one) is zero_strategy.ZeroStrategy and type(one) is not type(two)
three = fabric.strategies.STRATEGY_REGISTRY.get("zero2")
four = lightning_fabric.strategies.STRATEGY_REGISTRY.get("zero2")
assert isinstance(three, fabric.strategies.DDPStrategy)
assert isinstance(four, lightning_fabric.strategies.DDPStrategy)
assert type(three) is zero_strategy.lightning.FabricZeroStrategy and type(three) is not type(four)
"""

LIGHTNING_FIRST = f"""
import lightning.pytorch as lp
import lightning.fabric.strategies as fabric
import zero_strategy
assert set({NAMES!r}) <= set(fabric.STRATEGY_REGISTRY.available_strategies())
assert type(fabric.STRATEGY_REGISTRY.get("zero3")) is zero_strategy.FabricZeroStrategy
assert set({NAMES!r}) <= set(lp.strategies.StrategyRegistry.available_strategies())
assert type(lp.strategies.StrategyRegistry.get("zero3")) is zero_strategy.ZeroStrategy
"""

LIGHTNING_MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning", "lightning_fabric"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import zero_strategy
try:
    import lightning.pytorch
except ModuleNotFoundError:
    pass
for name in ("ZeroStrategy", "FabricZeroStrategy"):
    try:
        getattr(zero_strategy, name)
    except zero_strategy.ConfigError as error:
        assert "pip install" in error.fix
    else:
        raise AssertionError
"""

FAILING_REGISTRATION = """
import pathlib, sys, tempfile, warnings
from zero_strategy.front_ends.importing import call_after_import
folder = tempfile.TemporaryDirectory()
pathlib.Path(folder.name, "newcomer.py").write_text("value = 3")
sys.path.append(folder.name)
before = list(sys.meta_path)
done = []
def fail(module):
    raise RuntimeError("boom")
call_after_import("newcomer", done.append)
call_after_import("newcomer", fail)
call_after_import("newcomer", fail)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import newcomer
assert ["boom" in str(w.message) for w in caught] == [True]
assert done == [newcomer] and newcomer.value == 3
assert sys.meta_path == before
"""


@pytest.mark.parametrize(
    "program",
    [
        IMPORT_ORDERS,
        pytest.param(LIGHTNING_FIRST, marks=pytest.mark.slow),
        LIGHTNING_MISSING,
        FAILING_REGISTRATION,
    ],
)
def test_names_are_registered_whatever_is_imported_first(program: str) -> None:
    run_python("-c", program)


@pytest.mark.parametrize("name", ["zero4", "ZERO4", "zero"])
def test_mistaken_name_is_answered_with_the_right_ones(name: str) -> None:
    pytest.importorskip("lightning.pytorch")
    with pytest.raises(zs.ConfigError) as info:
        _trainer(name)
    named = {word.strip(",.") for word in info.value.fix.split() if word.startswith("zero")}
    assert named == {"zero1", "zero2", "zero3"}
    for right in named:
        assert isinstance(_trainer(right).strategy, zs.ZeroStrategy)
    assert repr(name.lower()) in info.value.what and info.value.why


@pytest.mark.parametrize("name", ["zero_3", "zero-3", "Zero 3", "ZeRO_Stage_3", "zero_stage3"])
def test_a_name_that_is_nearly_right_is_answered_with_the_one_that_was_meant(name: str) -> None:
    pytest.importorskip("lightning.pytorch")
    with pytest.raises(zs.ConfigError) as info:
        _trainer(name)
    assert info.value.fix == "Use 'zero3'."
    assert isinstance(_trainer("ZeRO3").strategy, zs.ZeroStrategy)  # Lightning does not mind capitals


@pytest.mark.parametrize("name", ["zero2_offload", "zero3_offload", "zero3_nvme"])
def test_offload_is_refused_when_the_strategy_is_made(name: str) -> None:
    pytest.importorskip("lightning.pytorch")
    with pytest.raises(zs.ConfigError, match="offload"):
        _trainer(name)


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_spawn_launch_is_refused_at_stage_3_when_the_strategy_is_made(method: str) -> None:
    pytest.importorskip("lightning.pytorch")
    with pytest.raises(zs.ConfigError) as info:
        zs.ZeroStrategy(stage=3, start_method=method)
    assert method in info.value.what and "stage 3" in info.value.what and "popen" in info.value.fix
    assert zs.ZeroStrategy(stage=2, start_method=method)._start_method == method


def test_constructor_takes_configs_of_every_kind(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    path = tmp_path / "ds_config.json"
    path.write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}')
    stages = {
        3: zs.ZeroStrategy(),
        2: zs.ZeroStrategy(config=path),
        1: zs.ZeroStrategy(stage=1, config=str(path)),
    }
    for stage, strategy in stages.items():
        assert strategy._zero_config.stage == stage
    assert zs.ZeroStrategy(config=zs.ZeroConfig(stage=1))._zero_config.stage == 1
    assert (
        zs.ZeroStrategy(config={"zero_optimization": {"stage": 2}}, reduce_bucket_size=5)._zero_config.stage
        == 2
    )
    with pytest.raises(zs.ConfigError, match="reduce_bucket_size"):
        zs.ZeroStrategy(reduce_bucket_sise=1)
    with pytest.raises(zs.ConfigError, match="stage"):
        zs.ZeroStrategy(stage=4)


def test_users_precision_plugin_keeps_its_class_and_its_overrides() -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.plugins import MixedPrecision

    class Own(MixedPrecision):
        def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
            self.clipped = clip_val

    plugin = Own("bf16-mixed", "cpu")
    strategy = zs.ZeroStrategy(stage=2, precision_plugin=plugin)
    found = strategy.precision_plugin
    assert found is not plugin and isinstance(found, Own) and type(found).__qualname__ == Own.__qualname__
    found.clip_gradients(None, 3.0, "value")
    assert found.clipped == 3.0
    strategy.precision_plugin = found
    assert strategy.precision_plugin is found


def test_autocast_keeps_no_bf16_copies_of_weights() -> None:
    pytest.importorskip("lightning.pytorch")
    import torch
    from lightning.pytorch.plugins import MixedPrecision

    plugin = zs.ZeroStrategy(precision_plugin=MixedPrecision("bf16-mixed", "cpu")).precision_plugin
    with plugin.train_step_context():
        assert not torch.is_autocast_cache_enabled()


SCRIPT = """
import sys
import torch
import zero_strategy
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 400), nn.Linear(400, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

if __name__ == "__main__":
    torch.set_num_threads(1)
    data = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2)
    trainer = Trainer(strategy="zero3", devices=2, accelerator="cpu", max_epochs=1, logger=False,
                      enable_progress_bar=False, default_root_dir=sys.argv[1])
    trainer.fit(Module(), data)
    assert trainer.world_size == 2 and trainer.global_step == 3
    comm = trainer.strategy.engine.ledger.comm
    assert comm["all_gather"]["bytes_sent"] > 0 and comm["reduce_scatter"]["bytes_sent"] > 0
    print(f"rank {trainer.global_rank} done")
"""


@pytest.mark.slow
def test_a_script_runs_under_lightnings_own_launcher(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    output = run_python(str(script), str(tmp_path))
    assert "rank 0 done" in output and "rank 1 done" in output
    assert len(list(tmp_path.rglob("*.ckpt"))) == 1


SPAWN_SCRIPT = SCRIPT.replace(
    'strategy="zero3"', 'strategy=zero_strategy.ZeroStrategy(stage=2, start_method="spawn")'
)
SPAWN_SCRIPT = SPAWN_SCRIPT[: SPAWN_SCRIPT.index("    assert trainer.world_size")] + (
    "    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())\n    print('main done')\n"
)


@pytest.mark.slow
def test_spawn_launch_works_at_stage_2(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    script = tmp_path / "train.py"
    script.write_text(SPAWN_SCRIPT)
    assert "main done" in run_python(str(script), str(tmp_path))


def _trainer(strategy: Any) -> Any:
    from lightning.pytorch import Trainer

    return Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)


@pytest.mark.parametrize("name", KEYWORDS)
def test_what_is_said_to_be_another_strategys_keyword_is_one(name: str) -> None:
    from lightning.pytorch import strategies
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    owner = KEYWORDS[name].owner
    passed_on = {"DDPStrategy": [DistributedDataParallel], "FSDPStrategy": [FullyShardedDataParallel]}
    takers = [getattr(strategies, owner), *passed_on.get(owner, [])]
    assert any(name in inspect.signature(taker).parameters for taker in takers)
