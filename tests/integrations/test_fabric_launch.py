"""Fabric's registry, its own launcher and `fabric run`, and LightningCLI's `class_path`.

Oracle: what the program printed; scripts are run as a user runs them. The standalone `lightning_fabric` gives
the bits of `lightning.fabric`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

import zero_strategy as zs
from tests.harness import distributed, subtest
from tests.integrations.fabric_support import adamw, make_fabric, new_net, train, whole, zero
from tests.integrations.lightning_support import SMALL_BUCKETS, HarnessEnvironment, assert_same_weights
from tests.integrations.test_lightning_register import run_python

SCRIPT = """
import torch
import zero_strategy
from lightning.fabric import Fabric

if __name__ == "__main__":
    torch.set_num_threads(1)
    fabric = Fabric(FABRIC_ARGUMENTS)
    fabric.launch()
    fabric.seed_everything(7)
    model = torch.nn.Sequential(torch.nn.Linear(4, 400), torch.nn.ReLU(), torch.nn.Linear(400, 400))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    data = torch.utils.data.TensorDataset(torch.randn(12, 4))
    for (x,) in fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2)):
        fabric.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    comm = fabric.strategy.engine_of(model).ledger.comm
    assert type(fabric.strategy) is zero_strategy.FabricZeroStrategy and fabric.world_size == 2
    assert comm["all_gather"]["bytes_sent"] > 0 and comm["reduce_scatter"]["bytes_sent"] > 0
    open(f"rank-{fabric.global_rank}", "w").close()
"""


@pytest.mark.slow
def test_a_script_runs_under_fabrics_own_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FABRIC_ARGUMENTS", 'accelerator="cpu", devices=2, strategy="zero3"'))
    run_python(str(script), folder=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


@pytest.mark.slow
def test_fabric_run_takes_the_strategy_from_the_environment(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("FABRIC_ARGUMENTS", "").replace("fabric.launch()", ""))
    command = "import sys; from lightning.fabric.cli import _main; sys.argv[0] = 'fabric'; _main()"
    arguments = ["run", "--accelerator", "cpu", "--devices", "2", str(script)]
    run_python("-c", command, *arguments, folder=tmp_path, LT_STRATEGY="zero3")
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


@pytest.mark.parametrize("name", ["zero4", "zero2_offload", "zero3_offload", "zero3_nvme"])
def test_names_that_are_no_strategy_or_not_built_are_refused(name: str) -> None:
    with pytest.raises(zs.ConfigError) as info:
        Fabric(accelerator="cpu", devices=1, strategy=name)
    assert info.value.what and info.value.why and info.value.fix


@distributed(world_size=2)
def test_lightning_fabric_has_a_strategy_of_its_own() -> None:
    standalone = pytest.importorskip("lightning_fabric")
    with subtest("training"):
        cls = zs.lightning.strategy_class("lightning_fabric")
        assert issubclass(cls, standalone.strategies.DDPStrategy) and cls is not zs.FabricZeroStrategy
        methods = ("creates_processes_externally", "world_size", "global_rank", "local_rank")
        base = standalone.plugins.environments.LightningEnvironment
        environment = type("Environment", (base,), {name: vars(HarnessEnvironment)[name] for name in methods})
        fabric = standalone.Fabric(
            accelerator="cpu",
            devices=2,
            strategy=cls(stage=3, **SMALL_BUCKETS),
            plugins=[environment()],
            precision="bf16-mixed",
        )
        fabric.launch()
        found = _trained(fabric)
        assert_same_weights(found, _trained(make_fabric(zero(3), precision="bf16-mixed")))


def _trained(fabric: Any) -> dict[str, torch.Tensor]:
    net = new_net()
    model, optimizer = fabric.setup(net, adamw(net))
    train(fabric, model, optimizer)
    return whole(fabric, model)


@pytest.mark.parametrize(
    "given",
    [
        {"init_args": {"stage": 2}, "dict_kwargs": {"reduce_bucket_size": 1000}},
        {"init_args": {"config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}}}},
    ],
    ids=["keywords", "config"],
)
def test_lightning_cli_takes_the_class_path(given: dict[str, Any], tmp_path: Path) -> None:
    found = _run_cli(given, tmp_path)
    assert type(found) is zs.ZeroStrategy and found._zero_config.stage == 2
    assert found._zero_config.zero_optimization.reduce_bucket_size == 1000


def test_lightning_cli_shows_what_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Did you mean zero_optimization\.reduce_bucket_size\?"):
        _run_cli({"dict_kwargs": {"reduce_bucket_sise": 1}}, tmp_path)


def _run_cli(given: dict[str, Any], folder: Path) -> Any:
    """Return the strategy of the Trainer that a file of settings makes."""
    strategy = {"class_path": "zero_strategy.lightning.ZeroStrategy", **given}
    trainer = {"accelerator": "cpu", "devices": 1, "logger": False, "strategy": strategy}
    path = folder / "settings.yaml"
    path.write_text(json.dumps({"trainer": trainer}))  # JSON is YAML
    cli = LightningCLI(BoringModel, run=False, save_config_callback=None, args=["--config", str(path)])
    return cli.trainer.strategy
